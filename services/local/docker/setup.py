"""Finds out whether this machine's engine can run sandboxes, and prepares what they share."""

from __future__ import annotations

import os
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from services.common.logs import get_logger
from services.common.settings import SettingsError
from services.local.docker.container import Place, label_of, platform_of
from services.local.docker.engine import (
    DEFAULT_HOST,
    Engine,
    EngineAwayError,
    EngineError,
    EngineFacts,
    socket_of,
    wait_for,
)
from services.local.docker.images import Puller
from services.local.docker.runtime import DockerRuntime

_log = get_logger(__name__)

_ENGINE_SECONDS: Final = 3.0
_SAME_ARCHITECTURE: Final = {"amd64": "x86_64", "arm64": "aarch64"}


@asynccontextmanager
async def prepared(
    data: Path,
    run: Path,
    payload: Path | None,
    *,
    may_pull: bool,
    concurrent_starts: int,
    public_keys_pem: Callable[[], str],
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[DockerRuntime]:
    """The runtime of the daemon with these folders; `payload` is the agent's, None for the one of this checkout.

    Raises:
        SettingsError: there is no engine, or it cannot run sandboxes; the message says what to do.
    """
    payload = _payload(payload)
    async with _engine(environment) as (engine, facts):
        place = Place(platform_of(data), payload, data / "sandboxes", run / "d", facts)
        for folder in (data, place.sandboxes, place.links):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _log.info("engine found", engine=facts.name, cgroups=facts.cgroup_version)
        yield DockerRuntime(
            engine,
            place,
            Puller(engine, environment, may_pull=may_pull),
            public_keys_pem=public_keys_pem,
            concurrent_starts=concurrent_starts,
        )


async def check(environment: Mapping[str, str]) -> None:
    """See that a daemon with this environment would start.

    Raises:
        SettingsError: as for `prepared`.
    """
    payload = environment.get("ORCHARD_PAYLOAD_FOLDER")
    _payload(Path(payload) if payload else None)
    async with _engine(environment):
        pass


@asynccontextmanager
async def _engine(environment: Mapping[str, str]) -> AsyncIterator[tuple[Engine, EngineFacts]]:
    try:
        socket = socket_of(environment.get("DOCKER_HOST") or DEFAULT_HOST)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    async with Engine.connected(socket) as engine:
        try:
            facts = await wait_for(engine, _ENGINE_SECONDS)
        except (EngineAwayError, EngineError) as error:
            raise SettingsError(f"the docker runtime cannot start: {error}") from None
        _check_architecture(facts)
        yield engine, facts


async def remove_left(data: Path, environment: Mapping[str, str]) -> None:
    """Remove the containers of a platform that has ended, where a node daemon that was killed could not.

    Raises:
        EngineAwayError, EngineError: that cannot be done now; the next start does it, or takes them over.
        ValueError: DOCKER_HOST names no socket.
    """
    async with Engine.connected(socket_of(environment.get("DOCKER_HOST") or DEFAULT_HOST)) as engine:
        await wait_for(engine, 0)
        for container in await engine.containers(label_of(platform_of(data))):
            await engine.remove(container.id)


def _payload(chosen: Path | None) -> Path:
    folder = chosen or Path(__file__).parents[3] / "build/payload" / platform.machine()
    if not (folder / "init").is_file():
        raise SettingsError(
            f"there is no agent payload in {folder}: build it with `make payload`, or set ORCHARD_PAYLOAD_FOLDER"
        )
    return folder.resolve()


def _check_architecture(facts: EngineFacts) -> None:
    theirs, ours = _SAME_ARCHITECTURE.get(facts.architecture, facts.architecture), platform.machine()
    if theirs != ours:
        raise SettingsError(
            f"the engine {facts.name} runs on {theirs} and this is {ours}: an engine on this machine is needed"
        )
