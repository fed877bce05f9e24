"""The terminal of this machine, or its pipes, as those of a command in a sandbox."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from orchard._client.attach import Attachment
from orchard._client.errors import OrchardError

if TYPE_CHECKING:
    from orchard import AsyncProcess, ExecResult

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2
_READ_BYTES: Final = 32 << 10
_CANCEL_SECONDS: Final = 10.0
# What a pipe or terminal that is ready takes at once (PIPE_BUF of POSIX).
_SURELY_TAKEN: Final = 512
_TERM: Final = re.compile(r"[A-Za-z0-9+._-]{1,64}")
_LEAVING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
_LOST_TITLE: Final = b"\x1b[22;2t\x1b]2;orchard: connection lost, trying again; Enter ~. leaves\x07"
_OLD_TITLE: Final = b"\x1b[23;2t"


class Detached(Exception):  # noqa: N818 (the user wants it)
    """The user leaves, and the command goes on."""


class Left(Exception):  # noqa: N818
    """A signal ended this program."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Escape:
    """Finds Enter ~ . in what is typed. ~~ stands for one ~."""

    def __init__(self) -> None:
        self._is_fresh = True
        self._is_tilde = False
        self.left = False
        """Whether it was typed."""

    def feed(self, typed: bytes) -> bytes:
        """What of it is meant for the command."""
        meant = bytearray()
        for byte in typed:
            if self._is_tilde:
                self._is_tilde = False
                if byte == ord("."):
                    self.left = True
                    break
                if byte != ord("~"):
                    meant += b"~"
            elif self._is_fresh and byte == ord("~"):
                self._is_tilde = True
                continue
            meant.append(byte)
            self._is_fresh = byte in b"\r\n"
        return bytes(meant)


def local_terminal() -> Any:
    """A Terminal like this one."""
    from orchard import Terminal

    rows, columns = _size()
    term = os.environ.get("TERM", "")
    kind = {"term": term} if _TERM.fullmatch(term) else {}
    return Terminal(rows=rows, columns=columns, **kind)


def has_terminal() -> bool:
    """Whether somebody sits at this program."""
    return os.isatty(_STDIN) and os.isatty(_STDOUT)


class Session:
    """One command that has this program's standard descriptors."""

    def __init__(self, process: AsyncProcess, *, stdin: bool, terminal: bool, offset: int = 0) -> None:
        """`stdin`: what is read here goes there. `terminal`: it has a terminal, and so have we."""
        self._process = process
        self._takes_input = stdin
        self._terminal = terminal
        process.run.offset = offset
        self._attachment = Attachment(process.run, self._connection)
        self._escape = Escape() if terminal else None
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._is_lost = False
        self._writer = _Writer(self._loop)

    async def run(self) -> ExecResult:
        """To the command's end.

        Raises:
            Detached: the user left.
            Left: a signal ended this program; the command is ended too.
        """
        try:
            return await self._attached()
        except Detached:
            raise
        except BaseException:
            # Nobody is there any more who could end it.
            with suppress(OrchardError, TimeoutError):
                async with asyncio.timeout(_CANCEL_SECONDS):
                    await self._process.cancel()
            raise

    async def _attached(self) -> ExecResult:
        with _raw(_STDIN) if self._terminal else nullcontext() as raw, self._signals(raw):
            if self._terminal:
                self._resize()
            if self._takes_input:
                # It waits in a read that nothing can end: not for anybody to wait for.
                threading.Thread(target=self._read, name="standard input", daemon=True).start()
            running: asyncio.Task[ExecResult] = self._loop.create_task(
                self._attachment.run(self._emit), name="attached"
            )
            try:
                await asyncio.wait((running, self._end), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                raise self._end.exception() or RuntimeError("neither ended nor left")
            finally:
                running.cancel()
                await asyncio.wait([running])
                self._connection(True)

    # ------------------------------------------------------------ in

    def _read(self) -> None:
        """On a thread of its own: hand on what is read, as fast as the command takes it."""
        with suppress(RuntimeError, OSError, CancelledError):  # nobody wants it any more
            while data := os.read(_STDIN, _READ_BYTES):
                if self._escape is not None:
                    data = self._escape.feed(data)
                taken = asyncio.run_coroutine_threadsafe(self._attachment.write(data), self._loop).result()
                if self._escape is not None and self._escape.left:
                    self._loop.call_soon_threadsafe(self._leave, Detached())
                    return
                if not taken:
                    return
            self._loop.call_soon_threadsafe(self._attachment.end)

    def _leave(self, why: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(why)

    def _resize(self) -> None:
        self._attachment.resize(*_size())

    @contextmanager
    def _signals(self, raw: Raw | None) -> Iterator[None]:
        def pause() -> None:
            if raw is not None:
                raw.leave()
            os.kill(os.getpid(), signal.SIGSTOP)
            if raw is not None:
                raw.enter()
                self._resize()

        handlers: dict[int, Any] = {number: lambda number=number: self._leave(Left(number)) for number in _LEAVING}
        if raw is not None:
            handlers[signal.SIGWINCH] = self._resize
            handlers[signal.SIGTSTP] = pause
        for number, handler in handlers.items():
            self._loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                self._loop.remove_signal_handler(number)

    # ------------------------------------------------------------ out

    async def _emit(self, stream: str, data: bytes) -> None:
        descriptor = _STDERR if stream == "stderr" else _STDOUT
        rest = memoryview(data)
        while rest:
            if len(rest) <= _SURELY_TAKEN and select.select((), (descriptor,), (), 0)[1]:
                taken = _write(descriptor, rest)
            else:
                # A pipe that nobody reads must not stop the rest of this program, its end neither.
                taken = await self._writer.write(descriptor, rest)
            rest = rest[taken:]

    def _connection(self, is_there: bool) -> None:
        """Say in the window's title that the connection is lost; the screen is the command's."""
        if self._terminal and self._is_lost == is_there and os.environ.get("TERM", "dumb") != "dumb":
            self._is_lost = not is_there
            with suppress(OSError):
                os.write(_STDOUT, _OLD_TITLE if is_there else _LOST_TITLE)


class _Writer:
    """Writes on a thread of its own. It waits in a write that nothing can end, and nobody waits for it at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked: queue.SimpleQueue[tuple[int, memoryview, asyncio.Future[int]]] = queue.SimpleQueue()
        self._is_running = False

    async def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of it; how much.

        Raises:
            OSError: it cannot be written.
        """
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._run, name="standard output", daemon=True).start()
        written: asyncio.Future[int] = self._loop.create_future()
        self._asked.put((descriptor, data, written))
        return await written

    def _run(self) -> None:
        while True:
            descriptor, data, written = self._asked.get()
            taken, error = 0, None
            try:
                taken = _write(descriptor, data)
            except OSError as failure:
                error = failure
            with suppress(RuntimeError):  # the loop is gone, and so is whoever asked
                self._loop.call_soon_threadsafe(_settle, written, taken, error)


def _settle(written: asyncio.Future[int], taken: int, error: OSError | None) -> None:
    if written.done():
        return  # whoever asked has gone
    if error is None:
        written.set_result(taken)
    else:
        written.set_exception(error)


class Raw:
    """A terminal whose keys come as they are typed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] = termios.tcgetattr(descriptor)

    def enter(self) -> None:
        """Make it so. What was typed already stays."""
        tty.setraw(self._descriptor, termios.TCSANOW)

    def leave(self) -> None:
        """As it was."""
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(self._descriptor, termios.TCSANOW, self._before)


@contextmanager
def _raw(descriptor: int) -> Iterator[Raw]:
    raw = Raw(descriptor)
    raw.enter()
    try:
        yield raw
    finally:
        raw.leave()


def _size() -> tuple[int, int]:
    for descriptor in (_STDIN, _STDOUT, _STDERR):
        with suppress(OSError):
            size = os.get_terminal_size(descriptor)
            if size.lines and size.columns:
                return size.lines, size.columns
    return 24, 80


def _write(descriptor: int, data: memoryview) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:  # whoever shares it has made it so
        select.select((), (descriptor,), ())
        return 0
