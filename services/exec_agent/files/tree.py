"""Walks a tree by descriptors, so that a link swapped in meanwhile leads nowhere and no depth is too deep."""

from __future__ import annotations

import errno
import heapq
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from services.exec_agent.files.errors import BelowError
from services.exec_agent.files.paths import DIRECTORY_FLAGS

_T = TypeVar("_T")
_BATCH: Final = 20_000  # names held at a time; a larger directory is scanned again for the next ones
_VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESRCH})


class Cursor:
    """Stands in one directory of a tree; holds one descriptor however deep it is.

    On the way up it takes ".." and checks that this is the directory it came from (as fts does).

    Attributes:
        fd: the directory it stands in.
    """

    def __init__(self, descriptor: int) -> None:
        self.fd = descriptor
        self._above: list[tuple[int, int]] = []

    @property
    def depth(self) -> int:
        """How far below the top."""
        return len(self._above)

    def enter(self, name: bytes) -> bool:
        """Go down into a directory of this one; links are not followed. Returns True."""
        status = os.fstat(self.fd)
        below = os.open(name, DIRECTORY_FLAGS, dir_fd=self.fd)
        self._above.append((status.st_dev, status.st_ino))
        self._replace(below)
        return True

    def leave(self) -> None:
        """Go up.

        Raises:
            OSError: ESTALE, the directory was moved elsewhere meanwhile.
        """
        above = os.open("..", DIRECTORY_FLAGS, dir_fd=self.fd)
        status = os.fstat(above)
        if (status.st_dev, status.st_ino) != self._above[-1]:
            os.close(above)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._above.pop()
        self._replace(above)

    def _replace(self, descriptor: int) -> None:
        old, self.fd = self.fd, descriptor
        os.close(old)

    def close(self) -> None:
        """Let the directory go."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Node:
    """An entry met on a walk.

    Attributes:
        path: below the top.
        name: last component.
        parent_fd: its directory; good until the walk goes on.
        status: of the entry itself, links not followed.
    """

    path: bytes
    name: bytes
    parent_fd: int
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory itself, not a link to one."""
        return stat.S_ISDIR(self.status.st_mode)


def sorted_names(cursor: Cursor, after: bytes, batch: int) -> Iterator[bytes]:
    """Names in the cursor's directory in byte order, those after `after`, with flat memory however many there are.

    The cursor must stand in the same directory whenever the next name is asked for. The directory may change between
    two names: what is there all the time comes exactly once.
    """
    while True:
        with os.scandir(cursor.fd) as entries:
            names = (os.fsencode(entry.name) for entry in entries)
            found = heapq.nsmallest(batch, (name for name in names if name > after))
        yield from found
        if len(found) < batch:
            return
        after = found[-1]


def walk(cursor: Cursor, *, recursive: bool, after: bytes = b"", batch: int = _BATCH) -> Iterator[Node]:
    """Every entry below the cursor, directories before their contents, names in byte order.

    Begins behind the path `after`, which need not exist any more. Entries that vanish meanwhile are left out.

    Raises:
        BelowError: a directory cannot be read.
    """
    pending = after.split(b"/") if after else []
    expects = pending.pop(0) if pending else b""
    levels = [(b"", _names(cursor, expects, batch))]
    while levels:
        prefix, names = levels[-1]
        name = next(names, None)
        if name is None:
            levels.pop()
            if levels:
                cursor.leave()
            continue
        is_resumed = bool(expects) and name == expects
        expects = b""
        status = _unless_vanished(os.stat, name, dir_fd=cursor.fd, follow_symlinks=False)
        if status is None:
            continue
        path = prefix + name
        if not is_resumed:
            yield Node(path, name, cursor.fd, status)
        if not (recursive and stat.S_ISDIR(status.st_mode)):
            continue
        try:
            if _unless_vanished(cursor.enter, name) is None:
                continue
            expects = pending.pop(0) if is_resumed and pending else b""
            levels.append((path + b"/", _names(cursor, expects, batch)))
        except OSError as error:
            raise BelowError(error, path) from error


def _unless_vanished(call: Callable[..., _T], *args: object, **kwargs: object) -> _T | None:
    try:
        return call(*args, **kwargs)
    except OSError as error:
        if error.errno in _VANISHED:
            return None
        raise


def _names(cursor: Cursor, start: bytes, batch: int) -> Iterator[bytes]:
    """Names from `start` on, where it is given: the walk stopped at it or below it."""
    if start:
        yield start
    yield from sorted_names(cursor, start, batch)
