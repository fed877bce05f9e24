from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ResourceExhaustedError
from services.exec_agent.journal import Journal, JournalInUseError


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_what_was_begun_and_not_ended_was_interrupted(directory: int) -> None:
    with Journal.open(directory) as journal:
        assert journal.interrupted == {}
        journal.begin("one", "hash1")
        journal.begin("two", "hash2")
        journal.end("one", "EXITED")
        journal.end("never", "NOT_STARTED")
        assert journal.ended("one")
        assert not journal.ended("two")
    with Journal.open(directory) as journal:
        assert journal.interrupted == {"two": "hash2"}
        assert journal.ended("one")
        assert journal.ended("never")
        assert not journal.ended("two")
        journal.end("two", "AGENT_RESTARTED")
    with Journal.open(directory) as journal:
        assert journal.interrupted == {}
        assert journal.ended("two")


def test_a_line_that_was_cut_is_passed_over(directory: int, tmp_path: Path) -> None:
    with Journal.open(directory) as journal:
        journal.begin("one", "hash1")
    for rest in (b"B tw", b"E one", b"B", b"\xff\xfe"):
        with (tmp_path / "journal").open("ab") as file:
            file.write(rest)
        with Journal.open(directory) as journal:
            assert journal.interrupted == {"one": "hash1"}
    with Journal.open(directory) as journal:
        journal.begin("three", "hash3")
    with Journal.open(directory) as journal:
        assert journal.interrupted == {"one": "hash1", "three": "hash3"}


def test_only_one_at_a_time(directory: int) -> None:
    with Journal.open(directory), pytest.raises(JournalInUseError):
        Journal.open(directory)
    Journal.open(directory).close()


def test_a_hundred_thousand_ids_are_read_whole(directory: int, tmp_path: Path) -> None:
    lines = "".join(f"B id-{n} h{n}\nE id-{n} EXITED\n" for n in range(100_000)) + "B last h\n"
    (tmp_path / "journal").write_text(lines)
    with Journal.open(directory) as journal:
        assert journal.interrupted == {"last": "h"}
        assert all(journal.ended(f"id-{n}") for n in range(0, 100_000, 997))


def test_a_full_disk_stops_a_start_and_no_end(directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(directory) as journal:
        full = os.open("/dev/full", os.O_WRONLY)
        kept, journal._descriptor = journal._descriptor, full
        with pytest.raises(ResourceExhaustedError) as caught:
            journal.begin("one", "hash")
        assert caught.value.reason == "NO_SPACE"
        journal.end("two", "EXITED")
        assert journal.ended("two")
        journal._descriptor = kept
        os.close(full)
