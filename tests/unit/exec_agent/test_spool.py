"""The spool against a plain model: all bytes ever written, with the stream of each."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.exec_agent import spool as spools
from services.exec_agent.model import Chunk, Gap
from services.exec_agent.spool import CAPACITY_FLOOR, INLINE_LIMIT, Spool, SpoolStore

KIB = 1 << 10


class Model:
    def __init__(self) -> None:
        self.data = bytearray()
        self.streams = bytearray()

    def append(self, stream: int, data: bytes) -> None:
        self.data += data
        self.streams += bytes([stream]) * len(data)


@contextmanager
def store(limit: int = 1 << 30) -> Iterator[SpoolStore]:
    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            yield SpoolStore(descriptor, limit)
        finally:
            assert list(Path(folder).iterdir()) == [], "spool files have no names"
            os.close(descriptor)


def check(spool: Spool, model: Model, offset: int, maximum: int) -> int:
    """Read once and compare; returns the next offset."""
    found = spool.read(offset, maximum, may_block=True)
    if offset >= len(model.data):
        assert found is None
        return offset
    if offset < spool.start:
        assert found == Gap(offset, spool.start - offset)
        return spool.start
    assert isinstance(found, Chunk)
    assert found.offset == offset
    assert 0 < len(found.data) <= maximum
    end = offset + len(found.data)
    assert found.data == model.data[offset:end]
    assert set(model.streams[offset:end]) == {found.stream}
    return end


def check_all(spool: Spool, model: Model) -> None:
    offset = 0
    while offset < len(model.data):
        offset = check(spool, model, offset, 256 * KIB)


appends = st.tuples(
    st.just("append"),
    st.sampled_from([1, 2]),
    st.one_of(st.integers(0, 200), st.integers(3000, 9000), st.integers(50_000, 256 * KIB)),
)
reads = st.tuples(st.just("read"), st.floats(0, 1), st.integers(1, 256 * KIB))
finishes = st.tuples(st.just("finish"), st.none(), st.none())


@given(
    st.lists(st.one_of(appends, appends, reads, finishes), max_size=60),
    st.sampled_from([CAPACITY_FLOOR, 100_000, 300_001, 64 << 20]),
    st.sampled_from([1 << 30, 250_000, CAPACITY_FLOOR // 2]),
)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_model(operations: list[tuple[str, object, object]], capacity: int, limit: int) -> None:
    with store(limit) as files:
        spool, model = Spool(files, capacity), Model()
        content = bytes(range(256)) * 2048
        for kind, first, second in operations:
            if kind == "append":
                assert isinstance(first, int)
                assert isinstance(second, int)
                begin = len(model.data) * 7 % 1000  # so that equal positions of two laps differ
                data = content[begin : begin + second]
                spool.append(first, data)
                model.append(first, data)
            elif kind == "read":
                assert isinstance(first, float)
                assert isinstance(second, int)
                check(spool, model, round(first * len(model.data)), second)
            else:
                spool.finish()
            assert spool.end == len(model.data)
            assert spool.start <= spool.end
            retained = spool.end - spool.start
            if limit >= capacity:
                assert retained == min(capacity, spool.end)
            else:
                assert retained >= min(CAPACITY_FLOOR, spool.end, 64 * KIB)
        check_all(spool, model)
        spool.close()
        assert files.allocated == 0


def test_small_output_needs_no_file() -> None:
    with store() as files:
        spool = Spool(files, 1 << 20)
        for _ in range(INLINE_LIMIT):
            spool.append(1, b"x")
        assert files.allocated == 0
        spool.append(2, b"y")
        assert files.allocated == INLINE_LIMIT + 1
        spool.close()


def test_the_command_that_ended_first_makes_room() -> None:
    with store(400_000) as files:
        first, second, third = (Spool(files, 1 << 20) for _ in range(3))
        for spool in (first, second):
            spool.append(1, bytes(150_000))
            spool.finish()
        third.append(1, b"z" * 200_000)
        assert first.read(0, 10) == Gap(0, 150_000)
        assert isinstance(second.read(0, 10), Chunk)
        assert third.read(0, 10) == Chunk(0, 1, b"z" * 10)
        # What outlives a dropped output is kept again.
        first.append(2, b"late")
        assert first.read(150_000, 10) == Chunk(150_000, 2, b"late")
        # Where only running commands use the space, the ring stays as small as it is.
        third.append(1, b"y" * 300_000)
        assert third.start > 0
        assert third.end - third.start >= 150_000
        for spool in (first, second, third):
            spool.close()
        assert files.allocated == 0


def test_a_full_disk_makes_the_ring_smaller_and_no_call_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.pwrite, 200_000

    def pwrite(descriptor: int, data: memoryview, place: int) -> int:
        if place + len(data) > room:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, place)

    monkeypatch.setattr(spools.os, "pwrite", pwrite)
    with store() as files:
        spool, model = Spool(files, 1 << 20), Model()
        for number in range(12):
            data = bytes([number]) * 50_000
            spool.append(1, data)
            model.append(1, data)
        assert spool.end - spool.start >= 100_000
        check_all(spool, model)
        spool.close()


def test_without_any_disk_the_newest_output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with store() as files:
        monkeypatch.setattr(files, "open", lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        spool, model = Spool(files, 1 << 20), Model()
        for number in range(100):
            data = bytes([number]) * 20_000
            spool.append(1 + number % 2, data)
            model.append(1 + number % 2, data)
        assert spool.end - spool.start >= 400_000
        check_all(spool, model)
        spool.close()


def test_streams_that_alternate_by_the_byte_stay_bounded() -> None:
    with store() as files:
        spool, model = Spool(files, 64 << 20), Model()
        count = spools.SEGMENT_LIMIT + 20_000
        for number in range(count):
            data = bytes([number % 251])
            spool.append(1 + number % 2, data)
            model.append(1 + number % 2, data)
        assert spool.end - spool.start >= spools.SEGMENT_LIMIT - 1
        offset = spool.start
        for _ in range(100):
            offset = check(spool, model, offset, 100)
        check(spool, model, count - 5, 100)
        spool.close()


def test_listeners_hear_of_output_and_of_the_end() -> None:
    class Listener:
        calls = 0

        def changed(self) -> None:
            self.calls += 1

    with store() as files:
        spool, listener = Spool(files, 1 << 20), Listener()
        spool.listeners.add(listener)
        spool.append(1, b"x")
        spool.append(1, b"")
        assert listener.calls == 1
        spool.finish()
        assert listener.calls == 2
        spool.close()


def test_a_failing_directory_leaves_nothing(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    files = SpoolStore(descriptor, 1 << 30)
    tmp_path.rmdir()
    spool = Spool(files, 1 << 20)
    spool.append(1, bytes(100_000))
    assert isinstance(spool.read(0, 100), Chunk)
    spool.close()
    os.close(descriptor)
