"""The whole platform on one machine: started in the order that takes least time, kept running, and stopped in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

from services.local.runtime import cgroups
from services.local.stores.command import Command
from services.local.stores.errors import StoreError
from services.local.stores.postgres import Postgres
from services.local.supervisor.children import Child, Children
from services.local.supervisor.directories import (
    DataDirectory,
    default_data_directory,
    make_run_directory,
    remove_run_directory,
    run_directory_of,
)
from services.local.supervisor.errors import PlatformError
from services.local.supervisor.files import write_private
from services.local.supervisor.layout import STOP_ORDER, Layout, migrations_digest
from services.local.supervisor.listen import DEFAULT_LISTEN, Listen, choose_listen
from services.local.supervisor.node_client import NodeFacts, ask_node
from services.local.supervisor.output import Output
from services.local.supervisor.profile import write_profile
from services.local.supervisor.status import write_status
from services.local.supervisor.unit import Unit, UnitSpec

_INITIALISE_SECONDS: Final = 120.0
_COMMAND_SECONDS: Final = 60.0
_INHERITED_SECONDS: Final = 5.0
_CREATE_KEY: Final = ("create-key", "--tenant", "default", "--name", "local", "--role", "user", "--role", "admin")


@dataclass(frozen=True, slots=True)
class PlatformOptions:
    """What can be chosen.

    Attributes:
        data_directory: where everything is kept; None for the default of the environment.
        listen: the gateway's "host:port"; port 0 takes a free one.
        profile: the connection profile to write; None writes none.
        subreaper: inherit and collect the processes of dead services. Only in a process that starts no other processes.
        log_format: "text" or "json".
        log_level: of the services.
        ready_seconds: how long the start may take.
        environment: the user's environment, with DATABASE_URL and REDIS_URL if given.
    """

    data_directory: Path | None = None
    listen: str = DEFAULT_LISTEN
    profile: Path | None = None
    subreaper: bool = False
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    ready_seconds: float = 60.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class Platform:
    """`async with Platform(options) as platform:` runs it; on exit everything is stopped. Use it in the main thread.

    Raises, on entry:
        PlatformError, StoreError: it cannot start; nothing is left running.
    """

    def __init__(self, options: PlatformOptions, output: Output | None = None) -> None:
        self.options = options
        self.endpoint = ""
        self.api_key = ""
        self.start_seconds = 0.0
        self.facts: NodeFacts | None = None
        self.profile_note = ""
        self.hurry = asyncio.Event()
        """Set it to cut the patience of `stop` short."""
        self._own_output = output is None
        self._output = output or Output(log_format=options.log_format)
        self._units: dict[str, Unit] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._data: DataDirectory | None = None
        self._children: Children | None = None
        self._layout: Layout | None = None
        self._run_lock: int | None = None
        self._lifeline: tuple[int, ...] = ()
        self._listen: Listen | None = None

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def layout(self) -> Layout:
        """Paths and addresses; only once it has started."""
        if self._layout is None:
            raise RuntimeError("the platform has not started")
        return self._layout

    def process(self, name: str) -> Child:
        """The present process of a service or store.

        Raises:
            LookupError: there is no such service, or it is down at the moment.
        """
        child = self._units[name].child
        if child is None:
            raise LookupError(f"{name} is down at the moment")
        return child

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a service or store a signal. After SIGKILL, `wait_ready` waits for its successor."""
        self._units[name].signal(number)

    async def wait_ready(self, name: str, *, seconds: float = 30.0) -> None:
        """Wait until a service or store serves.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(seconds):
            await self._units[name].ready.wait()

    async def wait_failure(self) -> BaseException:
        """Wait until the supervision of something ends, which is a fault of ours."""
        await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        return _first_failure(self._tasks)

    async def _start(self) -> None:
        if not sys.platform.startswith("linux"):
            raise PlatformError(
                f"`orchard up` needs Linux, since its sandboxes are made of namespaces, and this is {sys.platform}: "
                "run it in a Linux virtual machine or container"
            )
        options = self.options
        chosen = options.data_directory or default_data_directory(options.environment)
        self._data = DataDirectory.open(chosen)
        await self._data.wait_for_leftovers(self._output.say)
        listen = self._listen = choose_listen(options.listen)
        self._data.write_holder(listen.endpoint)
        run = run_directory_of(self._data.path, options.environment)
        self._run_lock = make_run_directory(run)
        self._lifeline = os.pipe()
        self._layout = Layout(
            self._data.path, run, listen, self._lifeline[0], options.environment, options.log_format, options.log_level
        )
        await _check_runtime(self._layout)
        self.endpoint = self._layout.endpoint
        self._children = Children(pass_fds=(self._lifeline[0], self._data.processes_fd), adopt=options.subreaper)
        if listen.beyond_this_machine and not self._layout.gateway_tls:
            self._output.shout(
                f"{listen.address} can be reached from other machines, without TLS: set ORCHARD_TLS_CERT_FILE and "
                "ORCHARD_TLS_KEY_FILE"
            )
        try:
            async with asyncio.timeout(options.ready_seconds) as limit:
                await self._start_units(self._layout, self._children)
        except TimeoutError:
            if not limit.expired():
                raise
        waiting = [name for name in STOP_ORDER if name in self._units and not self._units[name].ready.is_set()]
        if limit.expired() or waiting:
            late = ", ".join(waiting) or "the database"
            raise PlatformError(f"not ready after {options.ready_seconds:.0f} s: {late}. The lines above say why")

    async def _start_units(self, layout: Layout, children: Children) -> None:
        postgres, valkey = layout.postgres(), layout.valkey()
        first_time = postgres.prepare() if postgres else False
        layout.make_folders()
        if valkey:
            self._add(layout.valkey_unit(valkey))
        if postgres and not first_time:
            self._add(layout.postgres_unit(postgres))
        layout.keys.prepare()
        self.api_key = layout.keys.read_api_key() or ""
        migrated = postgres is not None and not first_time and _stamp(postgres) == migrations_digest()
        if migrated:
            # They take longest to start.
            self._add_users_of_database(layout)
        for name in ("node", "scheduler", "watcher"):
            self._add(layout.service_unit(name))
        if postgres and first_time:
            await self._initialise(postgres, children, layout)
            self._add(layout.postgres_unit(postgres))
        if not migrated:
            await self._migrate(postgres, children, layout)
            self._add_users_of_database(layout)
        if not self.api_key:
            answer = await self._gateway_command(children, layout, *_CREATE_KEY)
            self.api_key = layout.keys.write_api_key(answer)
        await self._wait_units("node")
        asking = asyncio.ensure_future(ask_node(layout.address("node")))
        try:
            await self._wait_units(*self._units)
            self.facts = await asking
        finally:
            asking.cancel()
        if self.options.profile is not None:
            self.profile_note = write_profile(
                self.options.profile, endpoint=self.endpoint, api_key=self.api_key, files=layout.client_files
            )

    async def _migrate(self, postgres: Postgres | None, children: Children, layout: Layout) -> None:
        if postgres:
            await self._wait_units("postgres")
        await self._run(children, layout.migrate_command(), "migrate", _COMMAND_SECONDS)
        if postgres:
            write_private(_stamp_path(postgres), migrations_digest().encode())

    def _add_users_of_database(self, layout: Layout) -> None:
        for name in ("gateway", "trajectories", "judge"):
            self._add(layout.service_unit(name))

    def _add(self, spec: UnitSpec) -> None:
        if self._children is None:
            raise RuntimeError("the platform has not started")
        unit = Unit(spec, self._children, self._output, self._publish)
        self._units[unit.name] = unit
        self._tasks[unit.name] = _named(unit.run(), f"unit {unit.name}")

    async def _wait_units(self, *names: str) -> None:
        """Wait until these serve; fail as soon as one dies again and again."""
        units = [self._units[name] for name in names]
        everything = asyncio.gather(*(unit.ready.wait() for unit in units))
        failing = [asyncio.ensure_future(unit.failing.wait()) for unit in self._units.values()]
        waits: list[asyncio.Future[Any]] = [everything, *failing, *self._tasks.values()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() for task in self._tasks.values()):
                raise _first_failure(self._tasks)
            dying = [unit.name for unit in self._units.values() if unit.failing.is_set()]
            if dying:
                raise PlatformError(f"{', '.join(dying)} cannot start; the lines above say why")
        finally:
            for waiting in waits[: 1 + len(failing)]:
                waiting.cancel()
            await asyncio.gather(everything, *failing, return_exceptions=True)

    async def _initialise(self, postgres: Postgres, children: Children, layout: Layout) -> None:
        self._output.say("making the database, this once")
        await self._run(children, postgres.initialise(layout.store_environment()), "initdb", _INITIALISE_SECONDS)
        postgres.initialised()

    async def _gateway_command(self, children: Children, layout: Layout, *arguments: str) -> bytes:
        command = layout.service_command("gateway", *arguments)
        return await self._run(children, command, f"gateway {arguments[0]}", _COMMAND_SECONDS)

    async def _run(self, children: Children, command: Command, name: str, seconds: float) -> bytes:
        try:
            # What it prints may be a key, so only its errors are shown.
            code, printed = await children.run(command, lambda line: self._output.line(name, line), seconds=seconds)
        except TimeoutError:
            raise PlatformError(f"{name} did not end within {seconds:.0f} s") from None
        if code != 0:
            raise PlatformError(f"{name} failed with exit code {code}; the lines above say why")
        return printed

    def _publish(self) -> None:
        if self._layout is not None and self._run_lock is not None:
            with suppress(OSError):
                write_status(self._layout.run, self.endpoint, self._units.values())

    async def stop(self) -> None:
        """Stop everything in order; each step is bounded. Idempotent."""
        for name in STOP_ORDER:
            unit = self._units.get(name)
            if unit is None:
                continue
            self._output.say(f"stopping {name}")
            if name == "node":
                # So that it knows that its sandboxes end too, and can remove what they leave.
                self._end_lifeline()
            if not await unit.stop(self.hurry):
                self._output.shout(f"{name} does not end, even when killed")
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._units, self._tasks = {}, {}
        if self._listen is not None:
            self._listen.close()
            self._listen = None
        self._end_lifeline()
        if self._children is not None:
            await self._end_inherited(self._children)
            await self._children.close()
            self._children = None
        if self._layout is not None and self._run_lock is not None:
            os.close(self._run_lock)
            self._run_lock = None
            await self._remove_leftovers(self._layout)
        if self._data is not None:
            self._data.close()
            self._data = None
        if self._own_output:
            self._output.close()

    async def _remove_leftovers(self, layout: Layout) -> None:
        """What is outside of the data directory, also where a node daemon that was killed could not remove it."""
        try:
            await asyncio.to_thread(cgroups.remove_left, cgroups.name_of(layout.node_data))
        except OSError as error:
            self._output.shout(f"control groups are left behind: {error}")
        if layout.runtime == "docker":
            # Imported here: nobody else needs an HTTP client.
            from services.local.docker.engine import EngineAwayError, EngineError
            from services.local.docker.setup import remove_left

            with suppress(EngineAwayError, ValueError):  # then there is nothing, or the next start does it
                try:
                    await remove_left(layout.docker_data, layout.environment)
                except EngineError as error:
                    self._output.shout(f"containers are left behind: {error}")
        try:
            remove_run_directory(layout.run)
        except PlatformError as error:
            self._output.shout(str(error))

    def _end_lifeline(self) -> None:
        """Whatever still lives below us, such as sandboxes of a killed node daemon, ends now."""
        for descriptor in reversed(self._lifeline):
            os.close(descriptor)
        self._lifeline = ()

    async def _end_inherited(self, children: Children) -> None:
        """Processes of dead services end with the lifeline; those that do not are killed."""
        for kill in (False, True):
            end = time.monotonic() + (0.5 if self.hurry.is_set() else _INHERITED_SECONDS)
            while (left := children.inherited()) and time.monotonic() < end:
                for pid in left if kill else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
            if not left:
                return
        self._output.shout(f"processes that do not end: {', '.join(map(str, left))}")


async def _check_runtime(layout: Layout) -> None:
    """At once, instead of when the node daemon has died again and again."""
    if layout.runtime not in {"process", "docker"}:
        raise PlatformError(
            f"ORCHARD_RUNTIME is {layout.runtime!r}: `orchard up` knows process and docker; unset it, or give --runtime"
        )
    if layout.runtime == "docker":
        # Imported here: nobody else needs an HTTP client.
        from services.common.settings import SettingsError
        from services.local.docker.setup import check

        try:
            await check(layout.environment)
        except SettingsError as error:
            raise PlatformError(str(error)) from None


def _named(work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)


def _first_failure(tasks: Mapping[str, asyncio.Task[None]]) -> BaseException:
    for name, task in tasks.items():
        if task.done():
            error = None if task.cancelled() else task.exception()
            return error or PlatformError(f"the supervision of {name} ended")
    return PlatformError("the supervision ended")


def _stamp_path(postgres: Postgres) -> Path:
    # Beside the data, not within: only PostgreSQL writes there.
    return postgres.directory / "migrated"


def _stamp(postgres: Postgres) -> str:
    try:
        return _stamp_path(postgres).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


__all__ = ["Platform", "PlatformError", "PlatformOptions", "StoreError"]
