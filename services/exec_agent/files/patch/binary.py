"""Binary changes of git: base-85 text of zlib data, the whole content (literal) or a delta against the old one."""

from __future__ import annotations

import base64
import re
import zlib
from typing import Final

from services.exec_agent.files.patch.lines import Lines
from services.exec_agent.files.patch.model import BinaryChange, PatchMalformedError

MAXIMUM_BYTES: Final = 64 << 20
_HEADER: Final = re.compile(rb"(literal|delta) (\d{1,12})\Z")


class DeltaError(ValueError):
    """The delta is broken or made against another content."""


def read_binary(lines: Lines) -> tuple[BinaryChange, BinaryChange | None]:
    """Read what follows `GIT binary patch`: the change, and the one that undoes it where it is there.

    Raises:
        PatchMalformedError: it is cut short or broken.
    """
    forward = _read_block(lines)
    if forward is None:
        raise PatchMalformedError(lines.number, "expected 'literal SIZE' or 'delta SIZE' after 'GIT binary patch'")
    return forward, _read_block(lines)


def _read_block(lines: Lines) -> BinaryChange | None:
    match = _HEADER.match(lines.header)
    if match is None:
        return None
    start = lines.number
    size = int(match[2])
    if size > MAXIMUM_BYTES:
        raise PatchMalformedError(start, f"a binary change may have at most {MAXIMUM_BYTES >> 20} MiB")
    lines.advance()
    inflate = zlib.decompressobj()
    content = bytearray()
    try:
        while lines.header:
            # One byte more than announced shows a lie without inflating all of it.
            content += inflate.decompress(_decode(lines.header), max(1, size + 1 - len(content)))
            if len(content) > size:
                break
            lines.advance()
    except (ValueError, zlib.error):
        raise PatchMalformedError(lines.number, "broken binary data") from None
    if len(content) != size or not inflate.eof:
        raise PatchMalformedError(start, f"the binary data does not have the {size} bytes that its header says")
    lines.advance()
    return BinaryChange(is_delta=match[1] == b"delta", payload=bytes(content))


def _decode(line: bytes) -> bytes:
    """One line: a letter for the number of bytes (A-Z 1 to 26, a-z 27 to 52), then five characters for each four."""
    first = line[0]
    if ord("A") <= first <= ord("Z"):
        count = first - ord("A") + 1
    elif ord("a") <= first <= ord("z"):
        count = first - ord("a") + 27
    else:
        raise ValueError("bad length")
    text = line[1:]
    if len(text) != (count + 3) // 4 * 5:
        raise ValueError("bad length")
    return base64.b85decode(text)[:count]


def apply_delta(delta: bytes, base: bytes) -> bytes:
    """Apply a git delta: two sizes, then pieces that are copied from `base` or inserted.

    Source: git's Documentation/gitformat-pack.txt, "Deltified representation".

    Raises:
        DeltaError: it is broken or does not fit `base`.
    """
    base_size, position = _varint(delta, 0)
    size, position = _varint(delta, position)
    if base_size != len(base):
        raise DeltaError(f"the patch is for a file of {base_size} bytes, this one has {len(base)}")
    if size > MAXIMUM_BYTES:
        raise DeltaError(f"the new content would have more than {MAXIMUM_BYTES >> 20} MiB")
    result = bytearray()
    while position < len(delta):
        code = delta[position]
        position += 1
        if code & 0x80:
            offset, count, position = _copy_operands(delta, position, code)
            piece = base[offset : offset + count]
        else:
            count = code
            piece = delta[position : position + count]
            position += count
        if not count or len(piece) != count or len(result) + count > size:
            raise DeltaError("the binary delta is broken")
        result += piece
    if len(result) != size:
        raise DeltaError("the binary delta is cut short")
    return bytes(result)


def _copy_operands(delta: bytes, position: int, code: int) -> tuple[int, int, int]:
    """Offset and size of a copy; each bit of the code says whether one byte of them follows."""
    operands = 0
    for bit in range(7):
        if code & (1 << bit):
            if position >= len(delta):
                raise DeltaError("the binary delta is cut short")
            operands |= delta[position] << (8 * bit)
            position += 1
    return operands & 0xFFFFFFFF, (operands >> 32) or 0x10000, position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 56:
            raise DeltaError("the binary delta is cut short")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, position
