"""The node daemon's side of the zygote: starts it, starts it again when it dies, and asks it for sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.common.grpc_core import CORE_ENVIRONMENT
from services.common.logs import get_logger
from services.exec_agent.launcher import LauncherMissingError, open_launcher
from services.local.runtime import cgroups
from services.local.runtime.identity import Identity
from services.local.runtime.plain_init import PlainInitError, open_plain_init
from services.local.runtime.plan import Ids, Plan
from services.local.runtime.steps import DEADLINE_SECONDS, StartError
from services.local.runtime.zygote import READY, Configuration

_log = get_logger(__name__)
_READY_SECONDS: Final = 30.0
_ANSWER_SECONDS: Final = DEADLINE_SECONDS + 5.0
_ANSWER_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """Processes of a sandbox, and where an agent that waits is told its fields; the receiver closes descriptors."""

    init: Identity
    init_fd: int
    agent: Identity | None
    agent_fd: int | None
    milliseconds: dict[str, float]
    claim: socket.socket | None = None


class ZygoteError(Exception):
    """The zygote does not start; the message says why."""


class ZygoteDiedError(Exception):
    """The zygote died with the request; what of it was made is in the sandbox's record."""


class Zygote:
    """One zygote at a time."""

    def __init__(self, configuration: Configuration, lifeline: int, launcher_file: Path | None = None) -> None:
        """`launcher_file`: the launcher, if it is not where scripts/build-launcher puts it."""
        self._configuration = configuration
        self._lifeline = lifeline
        self._launcher_file = launcher_file
        self._control: socket.socket | None = None
        self._pid = 0
        self._starting = asyncio.Lock()
        self._launcher: int | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    async def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            ZygoteError: it ended instead.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [
            *(sys.executable, "-m", "services.local.runtime.zygote"),
            *(str(theirs.fileno()), str(self._lifeline), self._configuration.to_json()),
        ]
        inherited = (theirs.fileno(), self._lifeline)
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        try:
            self._pid = os.posix_spawn(sys.executable, arguments, _environment())  # noqa: ASYNC221 (it does not block)
        finally:
            os.set_inheritable(self._lifeline, False)
            theirs.close()
        ours.setblocking(False)
        try:
            async with asyncio.timeout(_READY_SECONDS):
                word = await asyncio.get_running_loop().sock_recv(ours, 64)
        except (TimeoutError, ConnectionError):
            word = b""
        if word != READY:
            ours.close()
            raise ZygoteError("the process that agents are forked from did not start; its error is in the log above")
        self._control = ours

    async def ask(self, plan: Plan, group: cgroups.Group = cgroups.NO_GROUP) -> Answer:
        """Have a sandbox made, or an agent. `group` stays the caller's to close.

        Raises:
            StartError: it could not be; nothing is left running.
            ZygoteDiedError: the zygote died on the way.
            ZygoteError: the zygote does not start.
        """
        values, descriptors = await self._request(plan, group)
        return _answer(values, descriptors)

    async def remove(self, ids: Ids, folders: Sequence[str]) -> None:
        """Remove folders as root of a namespace with these ids.

        Raises:
            StartError: something could not be removed.
            ZygoteDiedError: the zygote died on the way.
            ZygoteError: the zygote does not start.
        """
        await self._request(Plan(folder="", socket_folder="", ids=ids, remove=tuple(folders)), cgroups.NO_GROUP)

    async def _request(self, plan: Plan, group: cgroups.Group) -> tuple[dict[str, Any], list[int]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setblocking(False)
            with theirs:
                await self._send(plan, group, theirs)
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    data, descriptors = await _receive(ours)
            except TimeoutError:
                raise StartError("the zygote does not answer") from None
        if not data:
            raise ZygoteDiedError("the zygote died")
        values = json.loads(data)
        if "error" in values:
            raise StartError(values["error"])
        return values, descriptors

    async def _send(self, plan: Plan, group: cgroups.Group, answer: socket.socket) -> None:
        launcher, whole = self._open_launcher()
        request = os.memfd_create("plan")
        try:
            os.write(request, plan.to_json())
            os.lseek(request, 0, os.SEEK_SET)
            optional = [d for d in (group.oom_event, group.oom_counter) if d is not None]
            header = {
                "launcher": whole,
                "procs": len(group.procs),
                "event": group.oom_event is not None,
                "counter": group.oom_counter is not None,
            }
            descriptors = [request, answer.fileno(), launcher, *group.procs, *optional]
            await self._deliver(json.dumps(header).encode(), descriptors)
        finally:
            os.close(request)
            os.close(launcher)

    def _open_launcher(self) -> tuple[int, bool]:
        """What becomes the first process of one sandbox, and whether it is the launcher, which starts commands too.

        One copy serves all where its owner is nobody inside. Elsewhere a sandbox's root owns it and could change its
        mode.
        """
        try:
            if self._configuration.stage is None:
                return open_launcher(self._launcher_file), True
            if self._launcher is None:
                self._launcher = open_launcher(self._launcher_file)
            return os.dup(self._launcher), True
        except LauncherMissingError:
            pass
        try:
            return open_plain_init(self._lifeline), False
        except PlainInitError as error:
            raise ZygoteError(str(error)) from None

    async def _deliver(self, header: bytes, descriptors: list[int]) -> None:
        for _ in range(2):
            control = await self._live()
            try:
                socket.send_fds(control, [header], descriptors)
            except ConnectionError:
                self._drop(control)
            except BlockingIOError:
                raise StartError("too many sandboxes are being started; try again") from None
            else:
                return
        raise ZygoteError("the process that agents are forked from keeps dying")

    async def _live(self) -> socket.socket:
        async with self._starting:
            if self._control is None:
                await self.start()
            assert self._control is not None  # noqa: S101 (start sets it or raises)
            return self._control

    def _drop(self, control: socket.socket) -> None:
        if self._control is control:
            control.close()
            self._control = None
            _log.warning("the zygote died; starting another", pid=self._pid)

    def close(self) -> None:
        """Let it end. Sandboxes live on."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._launcher is not None:
            os.close(self._launcher)
            self._launcher = None


def _environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV", *CORE_ENVIRONMENT)
    return {**CORE_ENVIRONMENT, **{key: os.environ[key] for key in kept if key in os.environ}, "PYTHONSAFEPATH": "1"}


async def _receive(ours: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(ours.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(ours.fileno())
    try:
        data, descriptors, _, _ = socket.recv_fds(ours, _ANSWER_BYTES, 3)
    except ConnectionError:
        return b"", []
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, list(descriptors)


def _answer(values: dict[str, Any], descriptors: list[int]) -> Answer:
    agent = values["agent"]
    return Answer(
        init=Identity(**values["init"]),
        init_fd=descriptors[0],
        agent=None if agent is None else Identity(**agent),
        agent_fd=None if agent is None else descriptors[1],
        milliseconds=values["milliseconds"],
        claim=socket.socket(fileno=descriptors[2]) if len(descriptors) > 2 else None,
    )
