"""A spool on a disk of the test, and the plain model it must agree with: all bytes ever written, and whose they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from services.exec_agent.model import Chunk, Gap
from services.exec_agent.records import Past
from services.exec_agent.spool import Spool
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
finishes = st.tuples(st.just("finish"), st.none(), st.none())


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
