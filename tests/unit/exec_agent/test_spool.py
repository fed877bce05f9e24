"""The spool of a command's output: what it retains, within which space, and what its readers get."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.exec_agent import ring as rings
from services.exec_agent.model import Chunk, Gap
from services.exec_agent.ring import SEGMENT_LIMIT
from services.exec_agent.spool import CAPACITY_FLOOR, INLINE_LIMIT, RECENT_COUNT, NotCachedError
from tests.unit.exec_agent.spools import KIB, Files, Model, appends, check, check_all, finishes, retained, store

reads = st.tuples(st.just("read"), st.floats(0, 1), st.integers(1, 256 * KIB))


@given(
    st.lists(st.one_of(appends, appends, reads, finishes), max_size=60),
    st.sampled_from([CAPACITY_FLOOR, 100_000, 300_001, 64 << 20]),
    st.sampled_from([1 << 30, 250_000, CAPACITY_FLOOR // 2]),
)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_a_model(operations: list[tuple[str, object, object]], capacity: int, limit: int) -> None:
    with store(limit) as files:
        spool, model = files.spool(capacity), Model()
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
        spool.remove()
        assert files.allocated == 0


def test_small_output_needs_no_file() -> None:
    with store() as files:
        spool = files.spool(1 << 20)
        for _ in range(INLINE_LIMIT):
            spool.append(1, b"x")
        assert files.allocated == 0
        spool.append(2, b"y")
        assert files.allocated == INLINE_LIMIT + 1
        spool.remove()


def test_the_command_that_ended_first_makes_room() -> None:
    with store(400_000) as files:
        first, second, third = (files.spool(1 << 20, exec_id) for exec_id in ("a", "b", "c"))
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
            spool.remove()
        assert files.allocated == 0


def test_a_full_disk_makes_the_ring_smaller_and_no_call_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.pwrite, rings._DATA + 200_000

    def pwrite(descriptor: int, data: memoryview, place: int) -> int:
        if place + len(data) > room:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with store() as files:
        spool, model = files.spool(1 << 20), Model()
        for number in range(12):
            data = bytes([number]) * 50_000
            spool.append(1, data)
            model.append(1, data)
        assert spool.end - spool.start >= 100_000
        check_all(spool, model)
        spool.remove()


def test_without_any_disk_the_newest_output_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with store() as files:
        monkeypatch.setattr(files, "create", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        spool, model = files.spool(1 << 20), Model()
        for number in range(100):
            data = bytes([number]) * 20_000
            spool.append(1 + number % 2, data)
            model.append(1 + number % 2, data)
        assert spool.end - spool.start >= 400_000
        check_all(spool, model)
        spool.remove()


def test_streams_that_alternate_by_the_byte_stay_bounded() -> None:
    with store() as files:
        spool, model = files.spool(64 << 20), Model()
        count = SEGMENT_LIMIT + 20_000
        for number in range(count):
            data = bytes([number % 251])
            spool.append(1 + number % 2, data)
            model.append(1 + number % 2, data)
        assert spool.end - spool.start >= SEGMENT_LIMIT - 1
        offset = spool.start
        for _ in range(100):
            offset = check(spool, model, offset, 100)
        check(spool, model, count - 5, 100)
        spool.remove()


def test_listeners_hear_of_output_and_of_the_end() -> None:
    class Listener:
        calls = 0

        def changed(self) -> None:
            self.calls += 1

    with store() as files:
        spool, listener = files.spool(1 << 20), Listener()
        spool.listeners.add(listener)
        spool.append(1, b"x")
        spool.append(1, b"")
        assert listener.calls == 1
        spool.finish()
        assert listener.calls == 2
        spool.remove()


def test_a_failing_directory_leaves_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path, 1 << 30)
    tmp_path.rmdir()
    spool = files.spool(1 << 20)
    spool.append(1, bytes(100_000))
    assert isinstance(spool.read(0, 100), Chunk)
    spool.remove()
    os.close(files.descriptor)


def test_small_alternating_output_takes_no_more_memory_than_large() -> None:
    with store() as files:
        spool = files.spool(64 << 20)
        for number in range(4 * RECENT_COUNT):
            spool.append(1 + number % 2, b"x")
        spool.finish()
        assert len(spool._recent) <= RECENT_COUNT
        assert len(retained(spool)) == 4 * RECENT_COUNT
        spool.remove()


def test_bytes_that_are_not_cached_are_asked_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", preadv)
    with store() as files:
        spool = files.spool(1 << 20)
        spool.append(1, b"a" * 50_000)
        spool.append(2, b"b" * 50_000)
        spool.finish()
        with pytest.raises(NotCachedError) as caught:
            spool.read(49_000, 64 * KIB)
        assert (caught.value.stream, caught.value.size) == (1, 1_000)
        assert spool.load(49_000, caught.value.size) == b"a" * 1_000
        spool.remove()
        with pytest.raises(OSError, match="neither"):
            spool.load(49_000, 1_000)


def test_without_a_file_it_keeps_no_more_than_memory_does_and_says_so() -> None:
    """So that a command waits for its reader where it would have a file's room to run ahead otherwise."""
    with store() as files:
        files.create = lambda exec_id, capacity: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))  # type: ignore[method-assign]
        spool = files.spool(64 << 20)
        block, offset = b"x" * (512 * KIB), 0
        for _ in range(4):
            assert not spool.would_overwrite(offset, len(block))
            spool.append(1, block)
            assert spool.would_overwrite(offset, 1)
            while (found := spool.read(offset, 256 * KIB)) is not None:
                assert isinstance(found, Chunk)
                assert found.offset == offset
                offset += len(found.data)
        spool.finish()
        spool.close()
