"""Lines that stand a kill: each ends with a CRC-32, and what was cut short does not count.

They outlive the agent's process and not the machine, as the sandbox itself does, so nothing is synced to the disk.
"""

from __future__ import annotations

import os
import zlib
from typing import Final

_READ_SIZE: Final = 1 << 20


def line(text: str) -> bytes:
    """A line that says this."""
    body = text.encode("ascii")
    return b"%b %08x\n" % (body, zlib.crc32(body))


def body_of(written: bytes) -> str | None:
    """What a line says; None if it is not whole."""
    body, _, crc = written.rpartition(b" ")
    return body.decode("ascii") if crc == b"%08x" % zlib.crc32(body) else None


def append(descriptor: int, text: str) -> None:
    """Add a line at the end of a file, all of it or nothing.

    Raises:
        OSError: the disk is full or failed.
    """
    size = os.lseek(descriptor, 0, os.SEEK_END)
    rest = memoryview(line(text))
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def read_whole(descriptor: int) -> list[bytes]:
    """The lines of a file from its beginning. What is behind the last was cut short by a kill, and is cut off.

    Raises:
        OSError: the disk failed.
    """
    blocks = []
    os.lseek(descriptor, 0, os.SEEK_SET)
    while block := os.read(descriptor, _READ_SIZE):
        blocks.append(block)
    data = b"".join(blocks)
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.ftruncate(descriptor, whole)
    return data[:whole].splitlines()
