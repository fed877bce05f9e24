"""Bytes to text: several streams, each cut into chunks anywhere."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

_FIRST_OF_SEVERAL = 0xC0  # from here on a byte begins a character of more than one byte


class Characters:
    """Joins the bytes of a character that is split over two chunks of a stream: it comes whole with the later one.

    Nothing is decoded but the last bytes of a chunk, so that whoever does not want text does not pay for it.
    """

    def __init__(self) -> None:
        self._begun: dict[str, bytes] = {}

    def whole(self, stream: str, data: bytes) -> bytes:
        """The characters that `data` completes; `data` itself where it ends with one."""
        begun = self._begun.pop(stream, b"")
        if begun:
            data = begun + data
        left = _begun_at_end(data)
        if left:
            self._begun[stream] = data[-left:]
            return data[:-left]
        return data

    def finish(self) -> Iterable[tuple[str, bytes]]:
        """(stream, bytes) for each stream that ended within a character."""
        return self._begun.items()


def _begun_at_end(data: bytes) -> int:
    """How many bytes at the end are the begin of a character that may go on."""
    if not data or data[-1] < 0x80:
        return 0
    for size in range(1, min(3, len(data)) + 1):
        if data[-size] >= _FIRST_OF_SEVERAL:
            used = codecs.utf_8_decode(data[-size:], "replace", False)[1]
            return 0 if used else size
    return 0


def decode_in_order(chunks: Iterable[tuple[str, bytes]]) -> str:
    """The text of interleaved streams, in order."""
    characters = Characters()
    parts = [characters.whole(stream, data).decode(errors="replace") for stream, data in chunks]
    parts.extend(rest.decode(errors="replace") for _stream, rest in characters.finish())
    return "".join(parts)
