"""Users of the sandbox, from its own /etc/passwd and /etc/group.

The C library's name service must not be asked: it would load modules and read the configuration of whatever root the
agent happens to be in, and on musl or scratch images there is none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.common.errors import FailedPreconditionError

_MAXIMUM_ID: Final = 2**32 - 2  # 2**32 - 1 means "leave as it is" to chown and setuid
_MAXIMUM_BYTES: Final = 16 << 20
_MAXIMUM_LINKS: Final = 40
_DEFAULT_SHELL: Final = "/bin/sh"


@dataclass(frozen=True, slots=True)
class ResolvedUser:
    """Who a command runs as or a file belongs to.

    Attributes:
        uid: user id inside the sandbox.
        gid: primary group id, or the one that was asked for.
        groups: supplementary group ids, the primary one included, ascending.
        name: login name; the decimal uid where it has no entry.
        home: home directory; None for a number that has no entry.
        shell: login shell; /bin/sh where the entry names none.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str | None
    shell: str


def resolve_user(text: str, root: str = "/") -> ResolvedUser:
    """Find a user by "name", "1000", "name:group" or "1000:1000" in the root file system `root`.

    A number needs no entry; without one its group is 0. A name is looked up first, so that an all-digit name works, as
    in chown. An explicit group is the user's only one. Both are Docker's rules for `--user`.

    Raises:
        FailedPreconditionError: USER_NOT_FOUND, naming what is missing.
    """
    user_text, colon, group_text = text.partition(":")
    if not user_text or (colon and not group_text):
        raise _not_found(text, "write it as user or user:group, by name or number")
    entry = _find_passwd(user_text, root)
    if entry is None:
        uid = _number(user_text)
        if uid is None:
            raise _not_found(text, f"/etc/passwd has no user {user_text!r}; use a name from it or a numeric id")
        entry = _Passwd(name=str(uid), uid=uid, gid=0, home=None, shell="")
    gid = _find_group(group_text, root, text) if colon else entry.gid
    groups = {gid}
    if not colon:
        groups.update(group.gid for group in _groups(root) if entry.name in group.members)
    return ResolvedUser(
        uid=entry.uid,
        gid=gid,
        groups=tuple(sorted(groups)),
        name=entry.name,
        home=entry.home,
        shell=entry.shell or _DEFAULT_SHELL,
    )


@dataclass(frozen=True, slots=True)
class _Passwd:
    name: str
    uid: int
    gid: int
    home: str | None
    shell: str


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    gid: int
    members: frozenset[str]


def _not_found(text: str, hint: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"user {text!r} not found: {hint}", reason="USER_NOT_FOUND", user=text)


def _number(text: str) -> int | None:
    if not (text.isascii() and text.isdigit()) or len(text) > 10:
        return None
    value = int(text)
    return value if value <= _MAXIMUM_ID else None


def _find_passwd(text: str, root: str) -> _Passwd | None:
    """By name, else by number; the first entry wins, as in the C library."""
    number = _number(text)
    by_number = None
    for fields in _lines(root, "passwd"):
        if len(fields) < 4:
            continue
        uid, gid = _number(fields[2]), _number(fields[3])
        if uid is None or gid is None:
            continue
        home, shell = (*fields[5:7], "", "")[:2]
        entry = _Passwd(fields[0], uid, gid, home or "/", shell)
        if entry.name == text:
            return entry
        if by_number is None and uid == number:
            by_number = entry
    return by_number


def _groups(root: str) -> Iterator[_Group]:
    for fields in _lines(root, "group"):
        gid = _number(fields[2]) if len(fields) >= 3 else None
        if gid is not None:
            members = fields[3] if len(fields) > 3 else ""
            yield _Group(fields[0], gid, frozenset(filter(None, members.split(","))))


def _find_group(text: str, root: str, asked: str) -> int:
    for group in _groups(root):
        if group.name == text:
            return group.gid
    number = _number(text)
    if number is None:
        raise _not_found(asked, f"/etc/group has no group {text!r}; use a name from it or a numeric id")
    return number


def _lines(root: str, name: str) -> Iterator[list[str]]:
    """The colon-separated entries of a file in `root`/etc; none where it is missing or unreadable."""
    try:
        descriptor = _open_in_root(root, ["etc", name])
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MAXIMUM_BYTES)
    for line in content.decode("utf-8", "surrogateescape").split("\n"):
        if line and line[0] not in "#+-":
            yield line.strip().split(":")


def _open_in_root(root: str, parts: list[str]) -> int:
    """Open a regular file below `root`; links resolve as they would after a chroot, never out of it."""
    stack = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
    todo = parts[::-1]
    links = 0
    part = ""
    try:
        while todo:
            part = todo.pop()
            if part == "..":
                if len(stack) > 1:
                    os.close(stack.pop())
                continue
            found = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=stack[-1])
            stack.append(found)
            if not stat.S_ISLNK(os.fstat(found).st_mode):
                continue
            links += 1
            if links > _MAXIMUM_LINKS:
                raise OSError(f"too many links below {root}")
            target = os.readlink("", dir_fd=found)
            os.close(stack.pop())
            if target.startswith("/"):
                while len(stack) > 1:
                    os.close(stack.pop())
            todo.extend(p for p in reversed(target.split("/")) if p not in {"", "."})
        if not stat.S_ISREG(os.fstat(stack[-1]).st_mode):
            raise OSError(f"not a regular file below {root}: {'/'.join(parts)}")
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=stack[-2])
    finally:
        for descriptor in stack:
            os.close(descriptor)
