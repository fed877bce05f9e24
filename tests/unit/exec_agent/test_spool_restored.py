"""The next agent has the output that one before it kept: all of it, or a gap, and never a wrong byte."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.exec_agent import ring as rings
from services.exec_agent.model import Chunk, Gap
from services.exec_agent.ring import SEGMENT_LIMIT
from services.exec_agent.spool import CAPACITY_FLOOR
from tests.unit.exec_agent.spools import Model, appends, check_all, finishes, retained, store


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
