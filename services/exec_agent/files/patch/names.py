"""File names in patches: quoting, strip levels, timestamps, and what may not leave the target."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Final

from services.exec_agent.files.patch.model import PatchPathError

DEV_NULL: Final = b"/dev/null"
_ESCAPES: Final = {
    ord("a"): 7,
    ord("b"): 8,
    ord("t"): 9,
    ord("n"): 10,
    ord("v"): 11,
    ord("f"): 12,
    ord("r"): 13,
    ord('"'): 34,
    ord("\\"): 92,
}
_ESCAPE: Final = re.compile(rb"\\(?:([0-3][0-7]{2})|([abtnvfr\"\\]))")
_QUOTED: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ISO_TIME: Final = re.compile(
    rb"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?(?:\s*([-+]\d\d):?(\d\d)|\s*(Z))?\s*\Z"
)
_OTHER_TIME: Final = re.compile(
    rb"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:\S+ )?\d{4}(?: [-+]\d{4})?\s*\Z"
)
_BLANKS_BEFORE_TIME: Final = re.compile(rb"[ \t]+(?=\d{4}-\d\d-\d\d[ T]\d\d:\d\d|[A-Z][a-z]{2} [A-Z][a-z]{2} )")


class BadNameError(ValueError):
    """A name that is not written as one."""


def unquote(text: bytes) -> tuple[bytes, bytes]:
    """Read a name in C quotes at the start of `text`; returns it and what follows.

    Raises:
        BadNameError: the quotes do not end, or an escape is unknown.
    """
    match = _QUOTED.match(text)
    if match is None:
        raise BadNameError("the quoted name does not end")
    inner = match[1]
    pieces = []
    end = 0
    for escape in _ESCAPE.finditer(inner):
        pieces.append(inner[end : escape.start()])
        pieces.append(bytes([int(escape[1], 8) if escape[1] else _ESCAPES[escape[2][0]]]))
        end = escape.end()
    pieces.append(inner[end:])
    if any(b"\\" in piece for piece in pieces[::2]):
        raise BadNameError("the quoted name has an unknown escape")
    return b"".join(pieces), text[match.end() :]


def split_name(text: bytes) -> tuple[bytes, bytes]:
    """Split what follows `--- ` or `+++ ` into the name and the timestamp, which may be empty."""
    if text.startswith(b'"'):
        return unquote(text)
    name, tab, rest = text.partition(b"\t")
    if tab:
        return name, rest
    for blanks in _BLANKS_BEFORE_TIME.finditer(text):
        rest = text[blanks.end() :]
        if blanks.start() and (_ISO_TIME.match(rest) or _OTHER_TIME.match(rest)):
            return text[: blanks.start()], rest
    return text, b""


def is_epoch(timestamp: bytes) -> bool:
    """Whether a timestamp is 1970-01-01 00:00:00 UTC: so diff marks a file that is not there."""
    match = _ISO_TIME.match(timestamp.strip())
    if match is None or match[4] is None or set(match[3] or b"") - {ord("0")}:
        return False
    text = f"{match[1].decode()}T{match[2].decode()}{match[4].decode()}:{match[5].decode()}"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    return moment == datetime(1970, 1, 1, tzinfo=timezone.utc)  # noqa: UP017 (the same on every version)


def strip_components(name: bytes, count: int) -> bytes | None:
    """The name without its first `count` components, runs of slashes as one; None if it has not more than that."""
    for _ in range(count):
        _first, slash, name = name.partition(b"/")
        if not slash:
            return None
        name = name.lstrip(b"/")
    return name or None


def git_header_name(text: bytes, strip: int) -> bytes | None:
    """The name in what follows `diff --git `, if both sides name the same file; None if they differ.

    Raises:
        BadNameError: broken quotes.
    """
    if text.startswith(b'"'):
        left, rest = unquote(text)
        if not rest.startswith(b" "):
            raise BadNameError("a blank should stand between the two names")
        right = unquote(rest[1:])[0] if rest.startswith(b' "') else rest[1:]
        return _same(left, right, strip)
    if text.endswith(b'"') and b' "' in text:
        left, _, rest = text.partition(b' "')
        return _same(left, unquote(b'"' + rest)[0], strip)
    # Blanks inside names are not quoted: the right split is the one that makes both sides the same.
    start = text.find(b" ")
    while start >= 0:
        found = _same(text[:start], text[start + 1 :], strip)
        if found is not None:
            return found
        start = text.find(b" ", start + 1)
    return None


def _same(left: bytes, right: bytes, strip: int) -> bytes | None:
    a, b = strip_components(left, strip), strip_components(right, strip)
    return a if a is not None and a == b else None


def checked(path: bytes) -> bytes:
    """The path with superfluous slashes and dots gone.

    Raises:
        PatchPathError: it is absolute, has a ".." or names the target itself.
    """
    shown = path.decode("utf-8", "replace")
    if path.startswith(b"/"):
        raise PatchPathError(path, f"the patch names the absolute path {shown!r}; paths must be relative to the target")
    parts = [part for part in path.split(b"/") if part not in {b"", b"."}]
    if b".." in parts:
        raise PatchPathError(path, f"the patch's path {shown!r} has a '..'; no path may leave the target directory")
    if not parts or b"\0" in path:
        raise PatchPathError(path, f"the patch's path {shown!r} does not name a file")
    return b"/".join(parts)
