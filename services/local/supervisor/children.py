"""Processes that the supervisor starts, and the one place that waits for them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from services.local.stores.command import Command

LINE_LIMIT: Final = 64 << 10
_CAPTURE_LIMIT: Final = 1 << 20
_UNKNOWN_CODE: Final = 255

LineSink = Callable[[str], None]
StopStep = tuple[signal.Signals, float]
"""A signal, and how many seconds it gets."""


class Child:
    """One process of its own session. Its exit code is collected here and nowhere else."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, forget: Callable[[Child], None]) -> None:
        self.pid = process.pid
        self.started = asyncio.get_running_loop().time()
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.doomed = False
        """Whether somebody has killed it: what it still answers does not count."""
        self._process = process
        self._pidfd = pidfd
        self._forget = forget

    def collect(self) -> None:
        """Take the exit code if it has ended; idempotent."""
        if self.exited.done():
            return
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            # Collected by somebody who waits for any child: it is dead all the same.
            code = _UNKNOWN_CODE
        else:
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self._forget(self)
        os.close(self._pidfd)
        self.exited.set_result(code)

    @property
    def pidfd(self) -> int:
        """Readable once it has ended."""
        return self._pidfd

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has ended."""
        if self.exited.done():
            return
        if number == signal.SIGKILL:
            self.doomed = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, steps: Sequence[StopStep], *, hurry: asyncio.Event | None = None) -> bool:
        """Send each signal in turn until it has ended; whether it has. `hurry` cuts the waits short."""
        for number, seconds in steps:
            if self.exited.done():
                break
            self.signal(number)
            await _wait_any(self.exited, hurry if number != signal.SIGKILL else None, seconds)
        return self.exited.done()


async def _wait_any(exited: asyncio.Future[int], hurry: asyncio.Event | None, seconds: float) -> None:
    waits: set[asyncio.Future[Any]] = {exited}
    hurrying = asyncio.ensure_future(hurry.wait()) if hurry else None
    if hurrying:
        waits.add(hurrying)
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if hurrying:
        hurrying.cancel()


class _Lines(asyncio.Protocol):
    """Cuts a pipe into lines of at most LINE_LIMIT bytes."""

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line)
        if len(self._rest) >= LINE_LIMIT:
            self._say(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._rest:
            self._say(self._rest)

    def _say(self, line: bytes) -> None:
        self._sink(line.decode(errors="replace").rstrip("\r"))


class _Capture(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data = (self.data + data)[:_CAPTURE_LIMIT]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():
            self.ended.set_result(None)


class Children:
    """Starts processes and collects them, each by its own pidfd, so that nobody else's children are touched.

    With `adopt` it also collects whatever processes this one inherits as their subreaper; nothing else in this process
    may then wait for children. Needs a running loop in the main thread: the kernel's parent-death signal follows the
    thread that forks.
    """

    def __init__(self, *, pass_fds: Sequence[int] = (), adopt: bool = False) -> None:
        self._own: dict[int, Child] = {}
        self._pass_fds = tuple(pass_fds)
        self._adopt = adopt
        self._transports: set[asyncio.BaseTransport] = set()
        self._loop = asyncio.get_running_loop()
        self.adopted = 0
        """Inherited processes collected so far."""
        if adopt:
            self._loop.add_signal_handler(signal.SIGCHLD, self._collect_all)

    async def start(self, command: Command, sink: LineSink) -> Child:
        """Start a process; each line of its standard output and error goes to `sink`."""
        child, reading = self._spawn(command)
        await self._read(reading, _Lines(sink))
        return child

    async def run(self, command: Command, sink: LineSink, *, seconds: float) -> tuple[int, bytes]:
        """Run a command to its end: exit code and standard output; each line of its standard error goes to `sink`.

        Raises:
            TimeoutError: it took longer, and was killed.
        """
        reading, writing = os.pipe()
        try:
            child, errors = self._spawn(command, stdout=writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        capture = _Capture()
        await self._read(errors, _Lines(sink))
        await self._read(reading, capture)
        try:
            async with asyncio.timeout(seconds):
                code = await asyncio.shield(child.exited)
                await capture.ended
        finally:
            await child.end([(signal.SIGKILL, 5.0)])
        return code, capture.data

    def _spawn(self, command: Command, *, stdout: int | None = None) -> tuple[Child, int]:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                command.argv,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=writing if stdout is None else stdout,
                stderr=writing,
                # Ctrl-C on the terminal is for the supervisor alone, which then stops the others in order.
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        child = Child(process, os.pidfd_open(process.pid), self._forget)
        self._own[child.pid] = child
        self._loop.add_reader(child.pidfd, child.collect)
        return child, reading

    async def _read(self, descriptor: int, protocol: asyncio.Protocol) -> None:
        transport, _ = await self._loop.connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb", buffering=0))
        self._transports = {known for known in self._transports if not known.is_closing()} | {transport}

    def _forget(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        self._own.pop(child.pid, None)

    def _collect_all(self) -> None:
        while True:
            try:
                # Only looks: a child of ours is collected through its own object.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            child = self._own.get(found.si_pid)
            if child is not None:
                child.collect()
                continue
            with suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)
            self.adopted += 1

    def inherited(self) -> list[int]:
        """Pids of living children that are not ours by birth; only with `adopt`."""
        if not self._adopt:
            return []
        own = os.getpid()
        return [pid for pid in _children_of(own) if pid not in self._own]

    async def close(self) -> None:
        """Kill what is left and stop reading. Call it last."""
        for child in list(self._own.values()):
            await child.end([(signal.SIGKILL, 5.0)])
        if self._adopt:
            self._loop.remove_signal_handler(signal.SIGCHLD)
        for transport in self._transports:
            transport.close()
        # A closed transport lets go of its descriptor in the loop's next round.
        await asyncio.sleep(0)


def _children_of(parent: int) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", encoding="ascii", errors="replace") as stat:  # noqa: PTH123
                # The command's name, in brackets, may hold anything.
                state, ppid = stat.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.append(int(entry.name))
    return found
