"""The launcher's fork server, seen from the agent: starts commands and tells how they go on."""

from __future__ import annotations

import array
import asyncio
import contextlib
import enum
import errno
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.common import logs
from services.exec_agent.launcher import GAP, fork_server
from services.exec_agent.launcher import protocol as wire
from services.exec_agent.process_spec import ProcessSpec
from services.exec_agent.waits import Waits

_log = logs.get_logger(__name__)

_IN_FLIGHT_LIMIT: Final = 64
_SEND_BUFFER: Final = 1 << 20
_RETRY_SECONDS: Final = 0.05
_QUICK_DEATH_SECONDS: Final = 1.0
_PATIENCE: Final = 40
"""So many failed starts or messages in a row, two seconds of them, and commands that wait for them are told so."""


class Target(enum.IntEnum):
    """Who gets a signal."""

    TREE = 1
    LEADER = 2


class Stage(enum.IntEnum):
    """Where a start failed."""

    FORK = 1
    SPEC = 2
    USER = 3
    CWD = 4
    EXEC = 5
    INTERPRETER = 6
    TTY = 7


@dataclass(frozen=True, slots=True)
class Exited:
    """The end of a command's own process."""

    status: int
    """As waitpid gives it."""
    user_us: int
    system_us: int
    peak_bytes: int
    tree_empty: bool
    child_killed: bool
    """A descendant had been ended by SIGKILL that the launcher did not send."""


class ProcessEvents(Protocol):
    """What happens to a command, in this order. Called on the event loop."""

    def on_started(self, pid: int) -> None:
        """Its process runs."""

    def on_failed(self, stage: Stage, error: int) -> None:
        """It could not start. Nothing follows."""

    def on_exited(self, exited: Exited) -> None:
        """Its own process has ended."""

    def on_empty(self) -> None:
        """No descendant is left. Not called if Exited said so."""

    def on_lost(self) -> None:
        """Its reaper was killed before the command's end was known. Nothing follows."""


class Process:
    """A command that was handed to the launcher; reports to its ProcessEvents until it is detached."""

    __slots__ = ("_control", "_events", "_launcher", "_reaper", "_reaper_end", "_under_way", "_waits")

    def __init__(self, waits: Waits, launcher: Launcher, events: ProcessEvents) -> None:
        self._waits = waits
        self._launcher = launcher
        self._events: ProcessEvents | None = events
        self._control, self._reaper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._under_way = False
        self._reaper = 0

    def signal(self, target: Target, number: int) -> bool:
        """Send a signal. Before the start it waits for it. False: user code has stopped the reaper, and it is full."""
        try:
            self._control.send(wire.ORDER.pack(target, number))
        except BlockingIOError:
            return False
        except OSError:
            pass  # the reaper is gone, and on_lost or on_empty says so
        return True

    def kill(self) -> None:
        """Kill the whole tree, also where user code has stopped the reaper."""
        taken = self.signal(Target.TREE, signal.SIGKILL)
        if self._reaper and self._events is not None:
            with contextlib.suppress(OSError):
                os.kill(self._reaper, signal.SIGCONT)
            if not taken:
                self._waits.call_later(_RETRY_SECONDS, self.kill)

    def detach(self) -> None:
        """Hear no more of it. A command that still runs is killed; what an ended one left behind lives on."""
        self._settle()
        if self._control.fileno() >= 0:
            self._waits.unwatch(self._control.fileno())
            self._control.close()
        self._reaper_end.close()
        self._events = None

    def sent(self) -> None:
        """The launcher has the other end."""
        self._under_way = True
        self._reaper_end.close()
        self._waits.watch(self._control.fileno(), self._readable)

    def fail(self, stage: Stage, error: int) -> None:
        """It cannot be handed to the launcher."""
        events = self._events
        self.detach()
        if events is not None:
            events.on_failed(stage, error)

    @property
    def reaper_end(self) -> int:
        """Descriptor that the launcher gets."""
        return self._reaper_end.fileno()

    def _settle(self) -> None:
        if self._under_way:
            self._under_way = False
            self._launcher.settled()

    def _readable(self) -> None:
        while (events := self._events) is not None:
            try:
                message = self._control.recv(wire.EVENT.size)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            self._settle()
            if len(message) != wire.EVENT.size:
                self.detach()
                events.on_lost()
                return
            self._dispatch(events, message)

    def _dispatch(self, events: ProcessEvents, message: bytes) -> None:
        kind, a, b, flags, user_us, system_us, peak_kb = wire.EVENT.unpack(message)
        if kind == wire.STARTED:
            self._reaper = b
            events.on_started(a)
        elif kind == wire.FAILED:
            self.detach()
            events.on_failed(Stage(a), b)
        elif kind == wire.EXITED:
            empty = bool(flags & wire.TREE_EMPTY)
            if empty:
                self.detach()
            killed = bool(flags & wire.CHILD_KILLED)
            events.on_exited(Exited(a, user_us, system_us, peak_kb << 10, empty, killed))
        elif kind == wire.EMPTY:
            self.detach()
            events.on_empty()


class Launcher:
    """Owns the fork server and restarts it when user code has killed it."""

    def __init__(self, waits: Waits, launcher_fd: int | None, cgroup_procs_fds: Sequence[int]) -> None:
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        if launcher_fd is None:
            _log.warning(GAP)
        self._launcher_fd = launcher_fd
        self._cgroup_procs_fds = tuple(cgroup_procs_fds)
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._pid = 0
        self._death = select.poll()
        self._waiting: deque[tuple[Process, bytes, tuple[int, ...], Callable[[], None]]] = deque()
        self._in_flight = 0
        self._writing = False
        self._closed = False
        self._started_at = 0.0
        self._quick_deaths = 0
        self._failed_sends = 0

    def start(self) -> None:
        """Start the fork server.

        Raises:
            OSError: it cannot be executed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        try:
            self._pid = self._start_server(theirs.fileno())
            self._pidfd = self._watch_server(self._pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._started_at = self._loop.time()
        self._death = select.poll()
        self._death.register(self._pidfd, select.POLLIN)
        self._loop.add_reader(self._pidfd, self._died)

    @staticmethod
    def _watch_server(pid: int) -> int:
        try:
            return os.pidfd_open(pid)
        except OSError:  # no descriptor is left: nobody would hear of its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _start_server(self, channel: int) -> int:
        if self._launcher_fd is None:
            return fork_server.start(channel, self._cgroup_procs_fds)
        passed = (channel, *self._cgroup_procs_fds)
        for descriptor in passed:
            os.set_inheritable(descriptor, True)
        try:
            arguments = ["orchard-launcher", "serve", *map(str, passed)]
            return os.posix_spawn(f"/proc/self/fd/{self._launcher_fd}", arguments, {}, setsid=True)
        finally:
            for descriptor in passed:
                os.set_inheritable(descriptor, False)

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._pid

    def spawn(
        self,
        spec: ProcessSpec,
        descriptors: tuple[int, int, int],
        events: ProcessEvents,
        sent: Callable[[], None],
    ) -> Process:
        """Start a command on these standard descriptors; `sent` is called when they are no longer needed here.

        Raises:
            OSError: no descriptor is left.
        """
        process = Process(self._waits, self, events)
        self._waiting.append((process, spec.encode(), descriptors, sent))
        self._send_waiting()
        return process

    def kill(self) -> None:
        """It does not answer: end it, and let another one take its place."""
        if self._pidfd >= 0:
            os.kill(self._pid, signal.SIGKILL)

    def settled(self) -> None:
        """A command has started, failed or been given up: the next may be sent."""
        self._in_flight -= 1
        if self._waiting:
            self._loop.call_soon(self._send_waiting)

    def close(self) -> None:
        """End the fork server. Commands that run are ended by their own reapers when they are detached."""
        self._closed = True
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            os.kill(self._pid, signal.SIGKILL)  # user code may have stopped it
            os.waitpid(self._pid, 0)

    def _send_waiting(self) -> None:
        while self._waiting and self._in_flight < _IN_FLIGHT_LIMIT and self._socket is not None:
            process, message, descriptors, sent = self._waiting[0]
            if process.reaper_end < 0:  # given up while it waited
                self._waiting.popleft()
                sent()
                continue
            if self._death.poll(0):
                return  # it was just killed: _died starts another one, which then gets this
            try:
                _send(self._socket, message, (*descriptors, process.reaper_end))
            except BlockingIOError:
                self._start_writing()
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    self._send_later(error)
                # Otherwise the fork server is gone, and _died starts another one.
                return
            self._waiting.popleft()
            self._failed_sends = 0
            self._in_flight += 1
            process.sent()
            sent()
        if not self._waiting:
            self._stop_writing()

    def _send_later(self, error: OSError) -> None:
        """No descriptor or memory is left for the message: try again for a while, then give up the first command."""
        self._failed_sends += 1
        if self._failed_sends > _PATIENCE:
            self._failed_sends = 0
            process, _, _, sent = self._waiting.popleft()
            sent()
            process.fail(Stage.FORK, error.errno or errno.EAGAIN)
        self._loop.call_later(_RETRY_SECONDS, self._send_waiting)

    def _start_writing(self) -> None:
        if self._socket is not None and not self._writing:
            self._writing = True
            self._loop.add_writer(self._socket.fileno(), self._send_waiting)

    def _stop_writing(self) -> None:
        if self._socket is not None and self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket.fileno())

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        _, status = os.waitpid(self._pid, 0)
        self._stop_writing()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        _log.warning("the launcher was killed and is started again", status=status)
        if self._loop.time() - self._started_at > _QUICK_DEATH_SECONDS:
            self._quick_deaths = 0
            self._restart()
        else:
            self._restart_later()

    def _restart(self) -> None:
        if self._closed:
            return
        try:
            self.start()
        except OSError as error:  # for instance no process is left in the sandbox's limit
            _log.warning("the launcher does not start; trying again", error=str(error))
            self._restart_later()
            return
        self._send_waiting()

    def _restart_later(self) -> None:
        self._quick_deaths += 1
        if self._quick_deaths > _PATIENCE:
            waiting, self._waiting = self._waiting, deque()
            for process, _, _, sent in waiting:
                sent()
                process.fail(Stage.FORK, errno.EAGAIN)
        self._loop.call_later(_RETRY_SECONDS, self._restart)


def _send(channel: socket.socket, message: bytes, descriptors: tuple[int, ...]) -> None:
    if len(message) <= wire.INLINE_LIMIT:
        channel.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
        return
    memory = os.memfd_create("orchard-spec", os.MFD_CLOEXEC)
    try:
        view = memoryview(message)
        while view:
            view = view[os.write(memory, view) :]
        rights = array.array("i", (*descriptors, memory))
        channel.sendmsg([message[: wire.SPEC.size]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(memory)
