"""Knows in which directories a patch leaves files."""

from __future__ import annotations

from collections.abc import Iterator


def parents(path: bytes) -> Iterator[bytes]:
    """The directories above a path, the nearest first."""
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


class Occupied:
    """The directories above a set of files; it costs a file's depth to put one in or take it out."""

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._counts: dict[bytes, int] = {}

    def __contains__(self, directory: bytes) -> bool:
        return directory in self._counts

    def mark(self, path: bytes, is_there: bool) -> None:
        """A file is there, or is no more; what is known already may be said again."""
        if (path in self._files) == is_there:
            return
        if is_there:
            self._files.add(path)
        else:
            self._files.discard(path)
        for parent in parents(path):
            count = self._counts.get(parent, 0) + (1 if is_there else -1)
            if count:
                self._counts[parent] = count
            else:
                del self._counts[parent]
