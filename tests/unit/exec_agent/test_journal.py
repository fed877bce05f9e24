from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import FailedPreconditionError, OrchardError, ResourceExhaustedError
from services.exec_agent import journal as journals
from services.exec_agent.journal import Journal, JournalInUseError
from services.exec_agent.model import Chunk, End, Result
from services.exec_agent.records import History, Past


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def history(directory: int) -> History:
    with Journal.open(directory) as journal:
        return journal.take_history()


def past(exec_id: str, spec_hash: str = "hash", **fields: object) -> Past:
    return Past(exec_id, 7, 1_000, spec_hash, "echo 'a b'\n\u20ac", **{"begun": True, **fields})  # type: ignore[arg-type]


RESULT = Result(ended=End.EXITED, exit_code=3, end_ns=123, user_us=4, system_us=5, peak_bytes=6)


def ended(exec_id: str, *, size: int = 0, error: OrchardError | None = None, **fields: object) -> Past:
    result = Result(ended=End.NOT_STARTED, message=error.message, end_ns=1) if error else RESULT
    return past(exec_id, result=result, error=error, end=size, **fields)


def test_what_was_begun_and_not_ended_was_interrupted(directory: int) -> None:
    with Journal.open(directory) as journal:
        journal.begin(past("one", "hash1"))
        journal.begin(past("two", "hash2"))
        journal.started("two", 55, 1_234)
        journal.end(ended("one"))
        assert journal.ended("one")
        assert not journal.ended("two")
    with Journal.open(directory) as journal:
        found = journal.take_history()
        assert found.begun == {"two": past("two", "hash2", pid=55, start_ns=1_234)}
        assert journal.ended("one")
        assert not journal.ended("two")
        journal.end(ended("two"))
    assert history(directory).begun == {}


def test_an_end_comes_back_whole(directory: int) -> None:
    refused = FailedPreconditionError("there is no 'x y'", reason="COMMAND_NOT_FOUND", command="x y")
    killed = Result(ended=End.KILLED, signal=9, message="it was sent \u20ac", end_ns=2)
    with Journal.open(directory) as journal:
        journal.begin(past("one"))
        journal.begin(past("refused-late"))
        journal.started("one", 55, 1_234)
        journal.output("one", Chunk(0, 1, b"out\0\n"))
        journal.output("one", Chunk(5, 2, b"\xff"))
        journal.end(ended("one", size=6, pid=55, start_ns=1_234))
        journal.output("one", Chunk(6, 2, b"late"))
        journal.end(ended("refused", error=refused, begun=False))
        journal.end(ended("refused-late", error=refused))
        journal.begin(past("killed"))
        journal.end(past("killed", result=killed))
        journal.end(past("buried", "", result=killed, begun=False))
    found = history(directory)
    assert list(found.ended) == ["one", "refused", "refused-late", "killed"]
    output = [Chunk(0, 1, b"out\0\n"), Chunk(5, 2, b"\xfflate")]
    assert found.ended["one"] == past("one", pid=55, start_ns=1_234, result=RESULT, output=output, end=10)
    for exec_id in ("refused", "refused-late"):
        error = found.ended[exec_id].error
        assert isinstance(error, FailedPreconditionError)
        assert error.to_status() == refused.to_status()
    assert found.ended["killed"].result == killed
    assert list(found.tombstones) == ["buried"]
    assert found.tombstones["buried"].spec_hash == ""


def test_output_that_was_not_noted_is_a_gap(directory: int) -> None:
    with Journal.open(directory) as journal:
        for exec_id in ("hole", "short", "lost", "onward"):
            journal.begin(past(exec_id))
            journal.output(exec_id, Chunk(0, 1, b"12345"))
        journal.output("hole", Chunk(8, 1, b"9"))
        journal.end(ended("hole", size=9))
        journal.end(ended("short", size=6))
        journal.lost("lost", 50)
        journal.end(ended("lost", size=50))
        journal.lost("onward", 50)
        journal.output("onward", Chunk(50, 1, b"x"))
    found = history(directory)
    extents = {past.exec_id: (past.start, past.output, past.end) for past in found.ended.values()}
    assert extents == {
        "hole": (8, [Chunk(8, 1, b"9")], 9),
        "short": (6, [], 6),
        "lost": (50, [], 50),
    }
    assert found.begun["onward"].output == [Chunk(50, 1, b"x")]


def test_only_the_last_ends_are_kept(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(directory) as journal:
        for number in range(10):
            journal.begin(past(f"id-{number}"))
            journal.end(ended(f"id-{number}"))
            journal.end(past(f"buried-{number}", "", result=RESULT, begun=False))
    monkeypatch.setattr(journals, "KEPT_COUNT", 3)
    monkeypatch.setattr(journals, "BURIED_COUNT", 2)
    with Journal.open(directory) as journal:
        found = journal.take_history()
        assert list(found.ended) == ["id-7", "id-8", "id-9"]
        assert list(found.tombstones) == ["buried-8", "buried-9"]
        assert all(journal.ended(f"id-{number}") and journal.ended(f"buried-{number}") for number in range(10))


def test_a_line_that_was_cut_is_passed_over(directory: int, tmp_path: Path) -> None:
    with Journal.open(directory) as journal:
        journal.begin(past("one", "hash1"))
    for rest in (b"B tw", b"E one", b"B", b"\xff\xfe", b"B two 7 1000 hash", b'B two 7 1000 hash "x" 0'):
        with (tmp_path / "journal").open("ab") as file:
            file.write(rest)
        assert list(history(directory).begun) == ["one"]
        with Journal.open(directory) as journal:
            journal.output("one", Chunk(journal.take_history().begun["one"].end, 1, b"x"))
    assert history(directory).begun["one"].output == [Chunk(0, 1, b"xxxxxx")]


commands = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["output", "start", "end", "lost", "bury"]),
        st.binary(min_size=1, max_size=5000),
    ),
    max_size=12,
)


@given(commands, st.integers(0, 1 << 20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_journal_that_ends_anywhere_holds_what_was_noted_until_then(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, bytes]], cut: int, rewritten: bool
) -> None:
    """The agent is killed at any byte: what comes back is what some moment before was, never anything else."""
    folder = tmp_path_factory.mktemp("journal")
    directory = os.open(folder, os.O_RDONLY)
    states: list[tuple[int, dict[str, Past], set[str]]] = [(0, {}, set())]
    known: dict[str, Past] = {}
    done: set[str] = set()

    def note() -> None:
        copies = {e: past(e, pid=p.pid, start_ns=p.start_ns, result=p.result) for e, p in known.items()}
        for exec_id, copy in copies.items():
            copy.start, copy.output, copy.end = known[exec_id].start, list(known[exec_id].output), known[exec_id].end
        states.append(((folder / "journal").stat().st_size, copies, set(done)))

    with Journal.open(directory) as journal:
        for exec_id, kind, data in steps:
            if kind == "bury":
                buried = f"buried-{len(done)}"
                journal.end(past(buried, "", result=RESULT, begun=False))
                done.add(buried)
            elif exec_id not in known:
                known[exec_id] = past(exec_id)
                journal.begin(known[exec_id])
            elif kind == "output":
                chunk = Chunk(known[exec_id].end, 1 + len(data) % 2, data)
                known[exec_id].add(chunk)
                journal.output(exec_id, chunk)
            elif kind == "start":
                known[exec_id].pid, known[exec_id].start_ns = 5, 6
                journal.started(exec_id, 5, 6)
            elif kind == "lost":
                known[exec_id].lose(known[exec_id].end + len(data))
                journal.lost(exec_id, known[exec_id].end)
            elif exec_id not in done:
                known[exec_id].result = RESULT
                journal.end(known[exec_id])
                done.add(exec_id)
            note()
    whole = (folder / "journal").stat().st_size
    size = min(cut, whole)
    os.truncate(folder / "journal", size)
    if rewritten:
        with Journal.open(directory) as journal:
            first = journal.take_history()
            journal.rewrite([*first.ended.values(), *first.tombstones.values(), *first.begun.values()])
    _, expected, expected_done = next(state for state in reversed(states) if state[0] <= size + 1)
    with Journal.open(directory) as journal:
        found = journal.take_history()
        assert {**found.begun, **found.ended} == expected
        assert set(found.begun) == {e for e, p in expected.items() if p.result is None}
        assert all(journal.ended(exec_id) for exec_id in expected_done)
    os.close(directory)


def test_only_one_at_a_time(directory: int) -> None:
    with Journal.open(directory) as journal:
        with pytest.raises(JournalInUseError):
            Journal.open(directory)
        journal.rewrite([])
        with pytest.raises(JournalInUseError):
            Journal.open(directory)
    Journal.open(directory).close()


def test_it_is_written_anew_before_it_grows_without_end(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_GROWTH_LIMIT", 20_000)
    file = tmp_path / "journal"
    with Journal.open(directory) as journal:
        running = past("running", pid=5, start_ns=6, output=[Chunk(0, 2, b"so far")], end=6)
        journal.begin(running)
        journal.output("running", running.output[0])
        kept: list[Past] = []
        for number in range(2_000):
            done = ended(f"id-{number}", size=4, output=[Chunk(0, 1, b"%04d" % number)])
            journal.begin(done)
            journal.output(done.exec_id, done.output[0])
            journal.end(done)
            kept = [*kept[-2:], done]
            if journal.overgrown:
                journal.rewrite([*kept, running, past("only-waits", begun=False)])
                assert not journal.overgrown
            assert file.stat().st_size < 70_000
        journal.output("running", Chunk(6, 2, b" and on"))
    with Journal.open(directory) as journal:
        found = journal.take_history()
        assert list(found.ended.values())[-3:] == kept
        assert found.begun["running"].output == [Chunk(0, 2, b"so far and on")]
        assert "only-waits" not in found.begun
        assert all(journal.ended(f"id-{number}") for number in range(2_000))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal"]


def test_a_rewriting_that_an_agent_died_in_does_not_count(directory: int, tmp_path: Path) -> None:
    with Journal.open(directory) as journal:
        journal.begin(past("one"))
    (tmp_path / "journal.new").write_bytes(b"half of it")
    assert list(history(directory).begun) == ["one"]
    assert not (tmp_path / "journal.new").exists()


def test_on_a_full_disk_it_stays_as_it_is(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_GROWTH_LIMIT", 50)
    with Journal.open(directory) as journal:
        journal.begin(past("one"))
        journal.begin(past("two"))
        assert journal.overgrown
        (tmp_path / "journal.new").mkdir()
        journal.rewrite([past("one"), past("two")])
        assert not journal.overgrown, "it is tried again only when it has grown again"
        (tmp_path / "journal.new").rmdir()
        journal.begin(past("three"))
    assert list(history(directory).begun) == ["one", "two", "three"]


def test_a_hundred_thousand_ids_are_read_whole(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(directory) as journal:
        for number in range(100_000):
            journal.begin(past(f"id-{number}"))
            journal.end(ended(f"id-{number}"))
        journal.begin(past("last"))
    with Journal.open(directory) as journal:
        found = journal.take_history()
        assert list(found.begun) == ["last"]
        assert len(found.ended) == journals.KEPT_COUNT
        assert all(journal.ended(f"id-{number}") for number in range(0, 100_000, 997))


def test_a_full_disk_stops_a_start_and_no_end(directory: int) -> None:
    with Journal.open(directory) as journal:
        full = os.open("/dev/full", os.O_WRONLY)
        kept, journal._descriptor = journal._descriptor, full
        with pytest.raises(ResourceExhaustedError) as caught:
            journal.begin(past("one"))
        assert caught.value.reason == "NO_SPACE"
        journal.end(ended("two", begun=False))
        assert journal.ended("two")
        journal._descriptor = kept
        os.close(full)


def test_a_short_write_takes_no_later_line_with_it(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ran must be known, whatever the disk did to the line before its own."""
    real = os.write
    room = [10]

    def write(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[: room.pop()] if room else data)

    with Journal.open(directory) as journal:
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(ResourceExhaustedError):
            journal.begin(past("one"))
        journal.begin(past("two"))
        monkeypatch.undo()
    assert list(history(directory).begun) == ["two"]
