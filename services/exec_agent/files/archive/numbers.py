"""Numbers in tar headers, and the error of everything that reads tar."""

from __future__ import annotations


class ArchiveError(Exception):
    """The stream is not what it should be.

    Attributes:
        message: what is wrong.
        reason: ARCHIVE_MALFORMED or ARCHIVE_TRUNCATED.
    """

    def __init__(self, message: str, *, reason: str = "ARCHIVE_MALFORMED") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason


def parse_number(field: bytes) -> int:
    """Octal digits, or GNU's base-256 with the first bit set.

    Raises:
        ArchiveError: it is neither.
    """
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        negative = field[0] & 0x40
        return value - (1 << (8 * len(field) - 1)) if negative else value
    text = field.replace(b"\0", b" ").strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        raise ArchiveError("a number is not octal") from None
