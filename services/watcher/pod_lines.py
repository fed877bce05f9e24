"""The body of a watch: one JSON object a line, cut out of chunks as they arrive."""

from __future__ import annotations

from typing import Any, Final

import orjson

_LINE_BYTES: Final = 16 << 20  # objects of an API server have at most a few MiB
_MANAGED_FIELDS: Final = b',"managedFields":[{"'
_STATUS: Final = b',"status":{"'


class BrokenBodyError(Exception):
    """The body is not what an API server sends, or ended in the middle."""


class Lines:
    """Cuts a body into lines. A line counts only with its end, so that half an event is never one."""

    def __init__(self, limit: int = _LINE_BYTES) -> None:
        self._limit = limit
        self._partial: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, without their ends; blank ones are left out.

        Raises:
            BrokenBodyError: a line is too long.
        """
        if not self._partial and chunk.find(b"\n") == len(chunk) - 1 > 0:
            return [] if chunk.isspace() else [chunk[:-1]]  # as API servers send: one line a chunk
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if lines and self._partial:
            lines[0] = b"".join([*self._partial, lines[0]])
            self._partial.clear()
            self._size = 0
        if rest:
            self._partial.append(rest)
            self._size += len(rest)
            if self._size > self._limit:
                raise BrokenBodyError(f"a line of more than {self._limit} bytes")
        return [line for line in lines if line and not line.isspace()]

    def end(self) -> None:
        """The body has ended.

        Raises:
            BrokenBodyError: in the middle of a line.
        """
        if self._partial:
            raise BrokenBodyError(f"the body ended {self._size} bytes into a line")


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """The type of a watch event and its object; of a Pod without managedFields and spec, which nobody here reads.

    Raises:
        BrokenBodyError: the line is none.
    """
    event = parse(_trimmed(line))
    kind, thing = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(thing, dict):
        raise BrokenBodyError("a line that is no watch event")
    return kind, thing


def _trimmed(line: bytes) -> bytes:
    """Without the stretch from managedFields, the last of the metadata, to the status, which comes after the spec.

    Two thirds of a Pod, four fifths of the time to parse it. Neither mark can be within a string, where a quote is
    escaped, and neither is the name of anything in between (tests/unit/watcher/test_pod_lines.py).
    """
    start = line.find(_MANAGED_FIELDS)
    end = line.find(_STATUS, start) if start > 0 else -1
    return b"%b}%b" % (line[:start], line[end:]) if end > 0 else line


def parse(text: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BrokenBodyError: it is none.
    """
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BrokenBodyError(f"no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BrokenBodyError("no JSON object")
    return parsed


def version_of(thing: dict[str, Any]) -> int:
    """The resource version of an object or list. An API server's only grow, so they are compared as numbers.

    Raises:
        BrokenBodyError: it has none.
    """
    try:
        return int(thing["metadata"]["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        raise BrokenBodyError("an object without a resource version") from None
