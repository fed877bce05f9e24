"""Composition of a node daemon whose sandboxes are containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from services.common.logs import get_logger
from services.common.tasks import TaskGroup
from services.local.docker.images import EngineImages
from services.local.docker.references import is_reference
from services.local.docker.runtime import DockerRuntime
from services.local.docker.setup import prepared
from services.local.node.journal import Journal
from services.local.node.model import Creation
from services.local.node.service import Node
from services.local.node.servicer import Offer, docker_offer, rebuilt
from services.local.node.settings import NodeSettings

_log = get_logger(__name__)

# Starts wait for pulls, so the runtime counts its own.
_MOST_STARTS = 100_000


@asynccontextmanager
async def docker_node(
    settings: NodeSettings, tasks: TaskGroup, platform_ended: Callable[[], bool]
) -> AsyncIterator[tuple[Node, Offer]]:
    """A node, and on exit its end. If the platform has ended by then, its sandboxes end too."""
    data = settings.data_directory / "docker"
    async with prepared(
        data,
        settings.run_directory,
        settings.payload_folder,
        may_pull=settings.docker_pull == "missing",
        concurrent_starts=settings.concurrent_starts,
        public_keys_pem=settings.public_keys_file.read_text,
    ) as runtime:
        node = Node(
            runtime,
            EngineImages(),
            Journal(data / "journal"),
            tasks,
            concurrent_starts=_MOST_STARTS,
            give_up=runtime.give_up,
            outliving=lambda recorded: _outliving(runtime, recorded),
        )
        await node.start()
        tasks.start("containers", runtime.follow())
        try:
            yield node, docker_offer(is_reference)
        finally:
            await tasks.close()
            await runtime.close(platform_ends=platform_ended())


async def _outliving(runtime: DockerRuntime, recorded: set[str]) -> list[tuple[str, Creation]]:
    found = []
    for uid, said in await runtime.unrecorded(recorded):
        creation = _creation(uid, said)
        if creation is not None:
            found.append((uid, creation))
    return found


def _creation(uid: str, said: Mapping[str, str]) -> Creation | None:
    try:
        creation = rebuilt(said)
    except ValueError as error:
        _log.error("a container without a record cannot be kept", uid=uid, why=str(error))
        return None
    _log.warning("the record of a sandbox was rebuilt", uid=uid, sandbox_id=creation.request.sandbox_id)
    return creation
