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

from services.exec_agent import ring as rings
from services.exec_agent.model import Chunk, Gap
from services.exec_agent.records import Past
from services.exec_agent.ring import SEGMENT_LIMIT
from services.exec_agent.spool import CAPACITY_FLOOR, INLINE_LIMIT, RECENT_COUNT, NotCachedError, Spool
from services.exec_agent.spools import SpoolStore

KIB = 1 << 10


class Model:
    def __init__(self) -> None:
        self.data = bytearray()
        self.streams = bytearray()

    def append(self, stream: int, data: bytes) -> None:
        self.data += data
        self.streams += bytes([stream]) * len(data)


class Log:
    """What the journal would have of each command."""

    def __init__(self) -> None:
        self.pasts: dict[str, Past] = {}

    def past(self, exec_id: str) -> Past:
        return self.pasts.setdefault(exec_id, Past(exec_id, 0, 0, "hash", "true"))

    def output(self, exec_id: str, chunk: Chunk) -> None:
        self.past(exec_id).add(chunk)

    def lost(self, exec_id: str, end: int) -> None:
        self.past(exec_id).lose(end)


class Files(SpoolStore):
    """A store with its folder and its log at hand."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.descriptor = os.open(folder, os.O_RDONLY)
        self.log: Log = Log()
        super().__init__(self.descriptor, limit, self.log)

    def spool(self, capacity: int, exec_id: str = "one") -> Spool:
        return Spool(self, exec_id, capacity)

    def reborn(self) -> Files:
        """The store of the next agent."""
        other = Files(self.folder, 1 << 30)
        other.log.pasts = self.log.pasts
        return other

    def restored(self, exec_id: str = "one") -> Spool:
        spool, past = self.spool(0, exec_id), self.log.past(exec_id)
        spool.restore(past.start, list(past.output), past.end)
        return spool


@contextmanager
def store(limit: int = 1 << 30) -> Iterator[Files]:
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), limit)
        try:
            yield files
        finally:
            assert list(Path(folder).iterdir()) == [], "no file is left"
            os.close(files.descriptor)


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


# ---------------------------------------------------------------- the next agent


def retained(spool: Spool) -> list[tuple[int, int, bytes]]:
    """All that a reader gets: offset, stream and bytes of each run."""
    runs: list[tuple[int, int, bytes]] = []
    offset = 0
    while (found := spool.read(offset, 64 * KIB, may_block=True)) is not None:
        if isinstance(found, Gap):
            offset += found.size
            continue
        if runs and runs[-1][1] == found.stream and found.offset == runs[-1][0] + len(runs[-1][2]):
            found = Chunk(runs[-1][0], found.stream, runs.pop()[2] + found.data)
        runs.append(found)
        offset = found.offset + len(found.data)
    return runs


@given(
    st.lists(st.one_of(appends, finishes), max_size=40),
    st.sampled_from([CAPACITY_FLOOR, 100_000, 300_001, 64 << 20]),
    st.sampled_from([1 << 30, 250_000, CAPACITY_FLOOR // 2]),
)
@settings(max_examples=150, deadline=None)
def test_the_next_agent_has_the_same(operations: list[tuple[str, object, object]], capacity: int, limit: int) -> None:
    with store(limit) as files:
        spool, model = files.spool(capacity), Model()
        content = bytes(range(256)) * 2048
        for kind, first, second in operations:
            if kind == "append":
                assert isinstance(first, int)
                assert isinstance(second, int)
                begin = len(model.data) * 7 % 1000
                spool.append(first, content[begin : begin + second])
                model.append(first, content[begin : begin + second])
            else:
                spool.finish()
        before, start, allocated = retained(spool), spool.start, files.allocated
        spool.close()
        following = files.reborn()
        again = following.restored()
        assert (again.start, again.end) == (start, len(model.data))
        assert retained(again) == before
        assert following.allocated <= allocated
        check_all(again, model)
        again.remove()
        assert following.allocated == 0
        os.close(following.descriptor)


class Killed(BaseException):
    """The agent dies here."""


class DyingDisk:
    """Lets so many writes through, then a part of one more."""

    def __init__(self, writes: int, share: float) -> None:
        self.left = writes
        self.share = share
        self.real = os.pwrite

    def pwrite(self, descriptor: int, data: memoryview, place: int) -> int:
        self.left -= 1
        if self.left >= 0:
            return self.real(descriptor, data, place)
        # The kernel looks for a fatal signal between pages: what lies within one is written whole or not at all.
        room = 4096 - place % 4096
        if len(data) > room:
            whole_pages = room + int(self.share * (len(data) - room)) // 4096 * 4096
            self.real(descriptor, data[:whole_pages], place)
        elif self.share > 0.5:
            self.real(descriptor, data, place)
        raise Killed


@given(
    st.lists(appends, min_size=1, max_size=12),
    st.sampled_from([CAPACITY_FLOOR, 100_000, 300_001]),
    st.integers(0, 45),
    st.floats(0, 1),
)
@settings(max_examples=400, deadline=None)
def test_an_agent_that_dies_anywhere_leaves_no_wrong_byte(
    operations: list[tuple[str, int, int]], capacity: int, writes: int, share: float
) -> None:
    with store() as files, pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "pwrite", DyingDisk(writes, share).pwrite)
        spool, model, shown, start = files.spool(capacity), Model(), 0, 0
        content = bytes(range(256)) * 2048
        size = 0
        try:
            for _, stream, size in operations:
                begin = len(model.data) * 7 % 1000
                model.append(stream, content[begin : begin + size])
                spool.append(stream, content[begin : begin + size])
                shown, start = spool.end, spool.start
        except Killed:
            pass
        patches.undo()
        following = files.reborn()
        again = following.restored()
        assert shown <= again.end <= len(model.data), "what was shown to somebody is known"
        del model.data[again.end :]
        check_all(again, model)
        # What was being overwritten is gone; nothing else is.
        assert start <= again.start <= max(start, shown + size - capacity, 0)
        again.remove()
        following.remove_others(())
        os.close(following.descriptor)


def test_alternating_streams_come_back_within_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More runs of bytes than the table has room for: it has gone round."""
    with store() as files:
        spool = files.spool(64 << 20)
        for number in range(SEGMENT_LIMIT + 5000):
            spool.append(1 + number % 2, bytes([number % 251]))
        before, start = spool.read(spool.end - 50, 100), spool.start
        spool.close()
        following = files.reborn()
        again = following.restored()
        assert (again.start, again.end) == (start, SEGMENT_LIMIT + 5000)
        assert again.read(again.end - 50, 100, may_block=True) == before
        for offset in range(start, again.end, 997):
            found = again.read(offset, 10, may_block=True)
            assert found == Chunk(offset, 1 + offset % 2, bytes([offset % 251]))
        again.remove()
        os.close(following.descriptor)


def test_small_alternating_output_takes_no_more_memory_than_large() -> None:
    with store() as files:
        spool = files.spool(64 << 20)
        for number in range(4 * RECENT_COUNT):
            spool.append(1 + number % 2, b"x")
        spool.finish()
        assert len(spool._recent) <= RECENT_COUNT
        assert len(retained(spool)) == 4 * RECENT_COUNT
        spool.remove()


@pytest.mark.parametrize("damage", ["empty", "header", "magic", "cut", "table", "gone"])
def test_a_damaged_file_is_a_gap(damage: str) -> None:
    with store() as files:
        spool = files.spool(64 << 20)
        spool.append(1, b"a" * 50_000)
        spool.append(2, b"b" * 50_000)
        spool.append(1, b"c" * 50_000)
        spool.close()
        files.log.past("one").lose(150_000)  # as the journal has it when the command ended
        (path,) = files.folder.iterdir()
        if damage == "gone":
            path.unlink()
        elif damage in ("empty", "header", "cut"):
            os.truncate(path, {"empty": 0, "header": 20, "cut": path.stat().st_size - 1}[damage])
        else:
            with path.open("r+b") as file:
                file.seek({"magic": 0, "table": 4096 + 8}[damage])
                file.write(b"\1\2\3\4\5\6\7\0")
        following = files.reborn()
        again = following.restored()
        assert (again.start, again.end) == (150_000, 150_000)
        assert again.read(0, 100) == Gap(0, 150_000)
        again.remove()
        following.remove_others(())
        os.close(following.descriptor)


def test_what_is_dropped_stays_dropped() -> None:
    with store(400_000) as files:
        first, second = files.spool(1 << 20, "a"), files.spool(1 << 20, "b")
        first.append(1, bytes(300_000))
        first.finish()
        second.append(1, bytes(300_000))
        assert first.start == first.end == 300_000
        first.append(2, b"late")
        first.close()
        second.close()
        following = files.reborn()
        again = following.restored("a")
        assert (again.start, again.end) == (300_004, 300_004)
        following.remove_others(("b",))
        assert len(list(files.folder.iterdir())) == 1
        following.remove_others(())
        os.close(following.descriptor)


def test_a_table_that_finds_no_space_hides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """This agent still has the output; the next one says that it is gone."""
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, place: int) -> int:
        if 8192 <= place < rings._DATA:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with store() as files:
        spool, model = files.spool(1 << 20), Model()
        for number in range(600):
            data = bytes([number % 251]) * 100
            spool.append(1 + number % 2, data)
            model.append(1 + number % 2, data)
        check_all(spool, model)
        assert spool.start == 0
        assert list(files.folder.iterdir()) == []
        following = files.reborn()
        again = following.restored()
        assert (again.start, again.end) == (60_000, 60_000)
        spool.remove()
        again.remove()
        os.close(following.descriptor)


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
