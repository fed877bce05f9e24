"""What has become of every command of this sandbox, so that none ever runs twice and each can be asked for, also after
the agent was restarted.

Lines (records.py) that are appended to a file in the agent's own directory: before a command is spawned, with what it
writes as long as that is little, and when it has ended. What is no longer kept is left out when the file is written
anew, but for the ids. It outlives the agent's process and not the machine, as the sandbox itself does, so nothing is
synced to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, Self

from services.common import logs
from services.common.errors import ResourceExhaustedError
from services.exec_agent import records
from services.exec_agent.model import Chunk
from services.exec_agent.records import History, Past

_log = logs.get_logger(__name__)

KEPT_COUNT: Final = 1000
"""So many commands that ended are kept, the last ones."""
BURIED_COUNT: Final = 10_000
"""So many that were cancelled before they arrived."""
_NAME: Final = "journal"
_NEW_NAME: Final = "journal.new"
_READ_SIZE: Final = 1 << 20
_WRITE_SIZE: Final = 1 << 20
_GROWTH_LIMIT: Final = 4 << 20
"""So much may be appended, or as much again as there was if that is more, before the file is written anew."""
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class JournalInUseError(Exception):
    """Another agent of this sandbox still runs."""


class Journal:
    """Open journal of one sandbox."""

    def __init__(self, directory_fd: int, lock: int, descriptor: int, size: int, history: History) -> None:
        """Owns `lock` and `descriptor`. See `open`."""
        self._directory_fd = directory_fd
        self._lock = lock
        self._descriptor = descriptor
        self._size = size
        self._limit = _limit_after(size)
        self._torn = False
        self._history: History | None = history
        self._ended = history.digests

    @classmethod
    def open(cls, directory_fd: int) -> Self:
        """Read what previous agents left in the agent's own directory, and go on writing there.

        Raises:
            JournalInUseError: another agent has it open.
            OSError: the directory cannot be written.
        """
        with contextlib.ExitStack() as held:
            # The directory is locked and not the file, which is another one each time it is written anew.
            lock = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalInUseError("another agent of this sandbox still runs") from None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_NEW_NAME, dir_fd=directory_fd)
            descriptor = os.open(_NAME, _FLAGS, 0o600, dir_fd=directory_fd)
            held.callback(os.close, descriptor)
            history = History(KEPT_COUNT, BURIED_COUNT)
            size, torn = _read(descriptor, history)
            journal = cls(directory_fd, lock, descriptor, size, history)
            journal._torn = torn
            held.pop_all()
            return journal

    def take_history(self) -> History:
        """What previous agents left; once, as it may be large."""
        history, self._history = self._history, None
        if history is None:
            raise RuntimeError("the history was taken before")
        return history

    def ended(self, exec_id: str) -> bool:
        """Whether a command with this id has ended or will never start."""
        return records.digest_of(exec_id) in self._ended

    def begin(self, past: Past) -> None:
        """Note that the command is about to be spawned.

        Raises:
            ResourceExhaustedError: the disk is full; the command must not be spawned.
        """
        try:
            self._append(records.begin_line(past))
        except OSError as error:
            raise ResourceExhaustedError(
                f"the agent cannot note the command before it starts it: {error.strerror}; free space in the"
                " platform's data directory",
                reason="NO_SPACE",
            ) from None

    def started(self, exec_id: str, pid: int, start_ns: int) -> None:
        """Note that its process runs."""
        self._try_append(records.start_line(exec_id, pid, start_ns))

    def output(self, exec_id: str, chunk: Chunk) -> None:
        """Note output that stands in no file. See spools.OutputLog."""
        self._try_append(records.output_line(exec_id, chunk))

    def lost(self, exec_id: str, end: int) -> None:
        """Note that no output before `end` is kept. See spools.OutputLog."""
        self._try_append(records.lost_line(exec_id, end))

    def end(self, past: Past) -> bool:
        """Note that the command has ended, or that it will never start; returns whether the disk had room for that."""
        self._ended.add(records.digest_of(past.exec_id))
        # Only a restarted agent reads it; it then says AGENT_RESTARTED, and still never runs the command again.
        return self._try_append(records.end_line(past) if past.begun else records.never_line(past))

    @property
    def overgrown(self) -> bool:
        """Whether it is time to call `rewrite`."""
        return self._size >= self._limit

    def rewrite(self, pasts: Iterable[Past]) -> None:
        """Leave out what is no longer kept: the file is written anew with these commands and all ids that ended.

        Those that have ended come in that order. On a full disk the file stays as it is.
        """
        try:
            descriptor, size = self._write_new(pasts)
        except OSError as error:
            _log.warning("the journal cannot be written anew", error=str(error))
            self._limit = _limit_after(self._size)
            with contextlib.suppress(OSError):
                os.unlink(_NEW_NAME, dir_fd=self._directory_fd)
            return
        os.close(self._descriptor)
        self._descriptor, self._size, self._torn = descriptor, size, False
        self._limit = _limit_after(size)

    def close(self) -> None:
        """Close the file and let the next agent have it."""
        os.close(self._descriptor)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_new(self, pasts: Iterable[Past]) -> tuple[int, int]:
        descriptor = os.open(_NEW_NAME, _FLAGS | os.O_TRUNC, 0o600, dir_fd=self._directory_fd)
        try:
            size, block = 0, bytearray()
            for line in self._lines(pasts):
                block += line
                if len(block) >= _WRITE_SIZE:
                    size += _write_all(descriptor, block)
                    block.clear()
            size += _write_all(descriptor, block)
            os.rename(_NEW_NAME, _NAME, src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, size

    def _lines(self, pasts: Iterable[Past]) -> Iterator[bytes]:
        yield from records.digest_lines(self._ended)
        for past in pasts:
            if past.result is not None or past.begun:  # what waits has a file of its own (backlog.py)
                yield from past.lines()

    def _try_append(self, line: bytes) -> bool:
        try:
            self._append(line)
        except OSError:
            return False
        return True

    def _append(self, line: bytes) -> None:
        if self._torn:  # a line that was cut short must not take this one with it
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._size += written
        self._torn = written < len(line)
        if self._torn:
            raise OSError(0, "a short write")


def _limit_after(size: int) -> int:
    return size + max(size, _GROWTH_LIMIT)


def _read(descriptor: int, history: History) -> tuple[int, bool]:
    """Replay all lines; returns the size, and whether the last one was cut short when its agent died."""
    size, rest = 0, b""
    while block := os.read(descriptor, _READ_SIZE):
        size += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            history.replay(line)
    # Without a newline it may be whole all the same.
    history.replay(rest)
    return size, bool(rest)


def _write_all(descriptor: int, data: bytearray) -> int:
    with memoryview(data) as view:
        place = 0
        while place < len(view):
            place += os.write(descriptor, view[place:])
    return place
