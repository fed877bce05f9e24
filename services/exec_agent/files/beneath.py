"""Opens directories below a base, and nothing outside of it, whatever links are or come in the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self

from services.exec_agent.files.ownership import DefaultOwner, make_directory
from services.exec_agent.files.resolving import open_path

_MAXIMUM_LINKS: Final = 40  # as the kernel
_FLAGS: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class EscapeError(Exception):
    """A path leads out of the base."""


class Beneath:
    """A base directory. Links below it are followed as long as they stay below it, step by step and by descriptors."""

    def __init__(self, path: bytes, default_owner: DefaultOwner) -> None:
        self.path = os.path.realpath(path)
        self._base = open_path(self.path, os.O_PATH | os.O_DIRECTORY)
        self._default_owner = default_owner
        self._cached_parts: tuple[bytes, ...] = ()
        self._cached_names: tuple[bytes, ...] = ()
        self._cached = os.dup(self._base)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the directories go. Safe to call again."""
        for descriptor in (self._base, self._cached):
            if descriptor >= 0:
                os.close(descriptor)
        self._base = self._cached = -1

    @contextmanager
    def directory(self, parts: Sequence[bytes], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the directory `parts`, for names in it, good inside the block.

        Args:
            parts: names from the base down; no "." or "..".
            make: make what is missing, mode 0755, the default owner's.

        Raises:
            EscapeError: a link leads out of the base.
            OSError: as openat.
        """
        key = tuple(parts)
        if key != self._cached_parts:
            found, names = self._open(parts, make)
            os.close(self._cached)
            self._cached, self._cached_parts, self._cached_names = found, key, names
        descriptor = os.dup(self._cached)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def followed(self, parts: Sequence[bytes]) -> tuple[bytes, ...]:
        """The names of the directory `parts` from the base down, with no link among them; raises as directory()."""
        with self.directory(parts):
            return self._cached_names

    def _open(self, parts: Sequence[bytes], make: bool) -> tuple[int, tuple[bytes, ...]]:
        stack = [os.dup(self._base)]
        names: list[bytes] = []
        todo = list(reversed(parts))
        links = 0
        try:
            while todo:
                part = todo.pop()
                if part == b"..":
                    self._leave(stack)
                    del names[-1:]
                    continue
                try:
                    stack.append(self._step(part, stack[-1], make))
                    names.append(part)
                    continue
                except NotADirectoryError:
                    target = self._read_link(part, stack[-1])
                links += 1
                if links > _MAXIMUM_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith(b"/"):
                    target = self._below(target)
                    while len(stack) > 1:
                        os.close(stack.pop())
                    names.clear()
                todo.extend(p for p in reversed(target.split(b"/")) if p not in {b"", b"."})
            return os.dup(stack[-1]), tuple(names)
        finally:
            for descriptor in stack:
                os.close(descriptor)

    def _step(self, part: bytes, directory: int, make: bool) -> int:
        try:
            return os.open(part, _FLAGS, dir_fd=directory)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):
            make_directory(part, directory, 0o755, self._default_owner)
        return os.open(part, _FLAGS, dir_fd=directory)

    def _leave(self, stack: list[int]) -> None:
        if len(stack) > 1:
            os.close(stack.pop())
        elif self.path != b"/":
            raise EscapeError

    def _below(self, target: bytes) -> bytes:
        """What follows the base in an absolute path."""
        if self.path == b"/":
            return target
        if target != self.path and not target.startswith(self.path + b"/"):
            raise EscapeError
        return target[len(self.path) :]

    @staticmethod
    def _read_link(part: bytes, directory: int) -> bytes:
        try:
            return os.readlink(part, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
            raise
