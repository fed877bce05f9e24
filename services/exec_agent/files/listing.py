"""Describes paths and lists directories."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.common.errors import InvalidArgumentError
from services.common.pages import decode_token, encode_token
from services.exec_agent.files.errors import file_errors
from services.exec_agent.files.resolving import open_path, status_of
from services.exec_agent.files.tree import Cursor, walk

_PAGE_BYTES: Final = 700_000  # keeps a message below 1 MiB, also where names grow by U+FFFD
_ENTRY_BYTES: Final = 60  # what an entry takes besides its path and target


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A path with what the file system says of it; `link_target` is empty unless it is a link."""

    path: bytes
    status: os.stat_result
    link_target: bytes = b""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing, and the token of the next part; empty at the end."""

    files: list[FileStatus]
    next_page_token: str


def describe(path: bytes, *, follow: bool) -> FileStatus:
    """Stat one path."""
    with file_errors(path):
        found = status_of(path, follow=follow)
    return FileStatus(path, found.status, found.target)


def list_page(path: bytes, *, recursive: bool, size: int, token: str) -> Page:
    """One page of a directory, in byte order. The token is the last path, so changes in between move nothing."""
    after = _position(token)
    with file_errors(path), Cursor(open_path(path, os.O_RDONLY | os.O_DIRECTORY)) as cursor:
        found: list[FileStatus] = []
        bytes_left = _PAGE_BYTES
        for file in _statuses(cursor, recursive, after, size + 1):
            if len(found) == size or bytes_left < 0:
                return Page(found, encode_token((found[-1].path.decode("latin-1"),)))
            found.append(file)
            bytes_left -= 2 * len(file.path) + len(file.link_target) + _ENTRY_BYTES
    return Page(found, "")


def _statuses(cursor: Cursor, recursive: bool, after: bytes, batch: int) -> Iterator[FileStatus]:
    for node in walk(cursor, recursive=recursive, after=after, batch=batch):
        target = b""
        if stat.S_ISLNK(node.status.st_mode):
            try:
                target = os.readlink(node.name, dir_fd=node.parent_fd)
            except FileNotFoundError:
                continue
        yield FileStatus(node.path, node.status, target)


def _position(token: str) -> bytes:
    if not token:
        return b""
    (text,) = decode_token("page_token", token, (str,))
    try:
        position: bytes = text.encode("latin-1")
    except UnicodeEncodeError:
        position = b""
    if any(part in {b"", b".", b".."} for part in position.split(b"/")) or b"\0" in position:
        raise InvalidArgumentError.of("page_token", "is not a token of an earlier page; leave it empty to begin again")
    return position
