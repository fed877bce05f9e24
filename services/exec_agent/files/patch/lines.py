"""A cursor over the lines of a patch."""

from __future__ import annotations

from typing import Final

from services.exec_agent.files.patch.model import PatchMalformedError

_MAXIMUM_LINES: Final = 5_000_000  # bounds the memory that 64 MiB of very short lines would take


class Lines:
    """Reads a patch line by line, with one line to look ahead.

    Attributes:
        number: the number of the next line, from 1.
        head: the next line with its end; empty at the end of the text.
    """

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.number = 0
        self.head = b""
        self._end = 0
        self.advance()

    def advance(self) -> None:
        """Go on by a line."""
        start = self._end
        self._end = self._text.find(b"\n", start) + 1 or len(self._text)
        self.head = self._text[start : self._end]
        self.number += 1
        if self.number > _MAXIMUM_LINES:
            raise PatchMalformedError(self.number, f"a patch may have at most {_MAXIMUM_LINES:,} lines; split it")

    @property
    def header(self) -> bytes:
        """The next line without its end, LF or CRLF."""
        return self.head.rstrip(b"\r\n")

    @property
    def after_head(self) -> bytes:
        """The line after the next one."""
        newline = self._text.find(b"\n", self._end)
        return self._text[self._end :] if newline < 0 else self._text[self._end : newline + 1]
