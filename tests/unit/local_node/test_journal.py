import dataclasses
from pathlib import Path

import pytest

from services.local.node.journal import Journal
from services.local.node.model import Phase, Record
from services.local.runtime.model import Reason, Request, Resources


def record(uid: str, revision: int = 1, phase: Phase = Phase.STARTING) -> Record:
    request = Request(uid, "alpha", env={"A": "\u00e9"}, start_argv=("x", "y"), resources=Resources(cpu=0.5, pids=7))
    return Record(
        tenant="t",
        request_id="r",
        spec_hash="h",
        spec=b"\0\xff",
        request=request,
        phase=phase,
        reason=None,
        message="",
        endpoint="unix:/x/s",
        create_time=1.5,
        expire_time=0.0,
        revision=revision,
    )


def changed(old: Record, **fields: object) -> Record:
    return dataclasses.replace(old, **fields)


def test_a_journal_gives_back_what_it_got(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    one, two = record("one"), record("two")
    journal.add(one)
    journal.add(two)
    failed = changed(one, phase=Phase.FAILED, reason=Reason.OOM, message="m", revision=9, expire_time=3.5)
    journal.change(changed(one, phase=Phase.RUNNING, revision=5))
    journal.change(failed)
    assert Journal(tmp_path / "j").read_all() == [failed, two]
    journal.remove("one")
    journal.remove("never")
    assert journal.read_all() == [two]


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_torn_line_is_as_if_it_had_not_been(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    one = record("one")
    journal.add(one)
    path = tmp_path / "one.jsonl"
    whole = path.stat().st_size
    journal.change(changed(one, phase=Phase.RUNNING, revision=2))
    data = path.read_bytes()
    path.write_bytes(data[: whole + min(cut, len(data) - whole - 1)])
    assert journal.read_all() == [one]
    later = changed(one, phase=Phase.STOPPING, revision=3)
    journal.change(later)
    assert journal.read_all() == [later]


def test_a_torn_create_was_never_answered(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(record("one"))
    path = tmp_path / "one.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert journal.read_all() == []
    assert not path.exists()


def test_a_damaged_entry_is_put_aside(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(record("two"))
    (tmp_path / "one.jsonl").write_text("{}\n")
    assert [r.uid for r in journal.read_all()] == ["two"]
    assert (tmp_path / "one.damaged").exists()


def test_revisions_grow_whatever_the_clock_says(tmp_path: Path) -> None:
    first = Journal(tmp_path).first_revision(5_000_000)
    assert first >= 5_000_000
    set_back = Journal(tmp_path).first_revision(1_000)
    assert set_back > first + 1_000_000  # above all changes of the daemon before
    assert Journal(tmp_path).first_revision(10**18) == 10**18
    (tmp_path / "revision").write_text("torn")
    assert Journal(tmp_path).first_revision(7) == 7
    assert Journal(tmp_path).read_all() == []
