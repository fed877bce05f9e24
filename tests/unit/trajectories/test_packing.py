"""What is packed comes back, whole or piece by piece."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from services.trajectories.packing import DamagedError, Packer, count_of, frame, pack, runs, unpacked, unpacked_whole

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


BROKEN = {
    "nothing": b"",
    "something else": b"nothing of the kind",
    "cut at its end": pack(BODIES)[0][:-10],
    "cut in half": pack(BODIES)[0][: len(pack(BODIES)[0]) // 2],
    "changed": bytes(pack(BODIES)[0][:-1]) + b"\0",
}
LONGER = pack(BODIES)[0] + b"more"


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_what_is_broken_is_left_to_whoever_reads_it_piece_by_piece(broken: bytes) -> None:
    assert unpacked_whole(broken, 1 << 20) is None


@pytest.mark.parametrize("broken", [*BROKEN.values(), LONGER], ids=[*BROKEN, "longer"])
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
async def test_who_reads_it_is_told(broken: bytes, size: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(broken), size):
            yield broken[start : start + size]

    with pytest.raises(DamagedError):
        async for _run in runs(unpacked(chunks()), first=0, most_bytes=1 << 20):
            pass


async def test_a_step_that_is_cut_is_told_and_the_steps_before_it_are_counted() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield FRAMED[:-1]

    count = 0
    with pytest.raises(DamagedError):
        async for run in runs(chunks(), first=1, most_bytes=100):
            count += run.count
    assert (count, count_of(FRAMED[:-1]), count_of(FRAMED)) == (len(BODIES) - 2, len(BODIES) - 1, len(BODIES))
