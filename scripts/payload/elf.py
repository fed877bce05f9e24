"""What an ELF file says of itself."""

from __future__ import annotations

import struct
from pathlib import Path


def dynamic_section(path: Path) -> tuple[int, list[str]]:
    """Machine and needed libraries of a 64-bit little-endian ELF file (System V ABI, chapters 4 and 5)."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return 0, []
    machine = struct.unpack_from("<H", data, 18)[0]
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + i * size) for i in range(count)]
    offsets, strings = [], 0
    for kind, _, offset, _, _, length, _, _ in headers:
        if kind != 2:  # PT_DYNAMIC
            continue
        for tag, value in struct.iter_unpack("<QQ", data[offset : offset + length]):
            if tag == 0:
                break
            if tag == 1:  # DT_NEEDED
                offsets.append(value)
            elif tag == 5:  # DT_STRTAB, an address
                strings = next(value - h[3] + h[2] for h in headers if h[0] == 1 and h[3] <= value < h[3] + h[6])
    return machine, [data[strings + o : data.index(b"\0", strings + o)].decode() for o in offsets]


def machine_of(path: Path) -> int:
    with path.open("rb") as file:
        head = file.read(20)
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" else 0
