"""What is packed comes back, whole or piece by piece."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from services.trajectories.packing import Packer, frame, pack, unpacked, unpacked_whole

BODIES = [random.Random(size).randbytes(size) for size in (0, 1, 127, 128, 20_000)]
FRAMED = b"".join(map(frame, BODIES))


def packed_in_pieces() -> tuple[bytes, str]:
    packer = Packer()
    for body in BODIES:
        packer.add_all([body])
    file, content_hash = packer.finish()
    with file:
        return file.read(), content_hash


@pytest.mark.parametrize("packed", [pack(BODIES), packed_in_pieces()], ids=["at once", "in pieces"])
async def test_it_comes_back_both_ways(packed: tuple[bytes, str]) -> None:
    body, content_hash = packed

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    assert content_hash == hashlib.sha256(FRAMED).hexdigest()
    assert b"".join([piece async for piece in unpacked(chunks())]) == FRAMED
    assert unpacked_whole(body, len(FRAMED)) == FRAMED
    assert unpacked_whole(body, len(FRAMED) - 1) is None


@pytest.mark.parametrize("broken", [b"", b"nothing of the kind", pack(BODIES)[0][:-10]])
def test_what_is_broken_is_left_to_whoever_reads_it_piece_by_piece(broken: bytes) -> None:
    assert unpacked_whole(broken, 1 << 20) is None
