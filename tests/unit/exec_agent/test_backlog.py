"""What is kept of commands that wait, for the agent after this one."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ResourceExhaustedError
from services.exec_agent.backlog import Backlog, Waiting
from services.exec_agent.model import Command

COMMAND = Command(
    spec_hash="0f",
    argv=("a", "", "\u00fc \n\"'"),
    shell="",
    login_shell=False,
    env={"A": "\u00e9\r\n", "B": ""},
    cwd="below",
    user="nobody:nogroup",
    timeout=1.5,
    queue_timeout=None,
    merge_stderr=True,
    output_limit=70_001,
    retained_limit=1 << 20,
    orphan_timeout=60.0,
    kill_grace=0.25,
    stdin=bytes(range(256)),
    stdin_open=False,
)
FED = Command(
    spec_hash="1f", shell="cat", login_shell=True, env={}, timeout=None, queue_timeout=2.0, retained_limit=0,
    kill_grace=5.0, stdin_open=True,
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_the_next_agent_finds_them_as_they_were_in_their_order(directory: int) -> None:
    backlog = Backlog(directory)
    backlog.add("fed", 7, 70, FED)
    backlog.add("gone", 5, 50, COMMAND)
    backlog.add("whole", 6, 60, COMMAND)
    backlog.input_of("fed").took(0, memoryview(b"a\n\0"))
    backlog.input_of("fed").took(3, memoryview(b"\xff" * 300_000))
    backlog.input_of("fed").ended(300_003)
    backlog.remove("gone")
    backlog.remove("gone")
    backlog.remove("never there")
    stdin = b"a\n\0" + b"\xff" * 300_000
    assert Backlog(directory).read() == [
        Waiting("whole", 6, 60, COMMAND),
        Waiting("fed", 7, 70, FED, stdin, stdin_ended=True),
    ]


def test_what_was_cut_short_was_told_to_nobody(directory: int, tmp_path: Path) -> None:
    backlog = Backlog(directory)
    backlog.add("fed", 1, 10, FED)
    backlog.input_of("fed").took(0, memoryview(b"first"))
    whole = (tmp_path / "queued-fed").read_bytes()
    backlog.input_of("fed").took(5, memoryview(b"second"))
    with_second = (tmp_path / "queued-fed").read_bytes()
    for end in range(len(whole), len(with_second)):
        (tmp_path / "queued-fed").write_bytes(with_second[:end])
        (tmp_path / "queued-other.new").write_bytes(whole[: end // 2])
        after = Backlog(directory)
        assert after.read() == [Waiting("fed", 1, 10, FED, b"first")]
        assert os.listdir(directory) == ["queued-fed"]
        after.input_of("fed").took(5, memoryview(b"once more"))
        assert Backlog(directory).read() == [Waiting("fed", 1, 10, FED, b"firstonce more")]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_what_cannot_be_read_will_never_start(directory: int, tmp_path: Path, damaged: int) -> None:
    backlog = Backlog(directory)
    backlog.add("fed", 1, 10, FED)
    backlog.input_of("fed").took(0, memoryview(b"first"))
    backlog.input_of("fed").ended(5)
    lines = (tmp_path / "queued-fed").read_bytes().splitlines(keepends=True)
    lines[damaged] = lines[damaged].replace(b" ", b"  ", 1)
    (tmp_path / "queued-fed").write_bytes(b"".join(lines))
    assert Backlog(directory).read() == [Waiting("fed")]
    lines.pop(damaged)
    (tmp_path / "queued-fed").write_bytes(b"".join(lines))
    assert Backlog(directory).read() == [Waiting("fed", 1, 10, FED, b"first")] if damaged == 2 else [Waiting("fed")]


def test_a_hole_in_the_input_and_a_command_of_another_version_cannot_be_read(directory: int, tmp_path: Path) -> None:
    backlog = Backlog(directory)
    backlog.add("hole", 1, 10, FED)
    backlog.input_of("hole").took(3, memoryview(b"later"))
    backlog.add("other", 2, 20, FED)
    path = tmp_path / "queued-other"
    body = path.read_bytes().rpartition(b" ")[0].replace(b'"cwd"', b'"folder"')
    path.write_bytes(b"%b %08x\n" % (body, zlib.crc32(body)))
    assert sorted(one.exec_id for one in Backlog(directory).read() if one.command is None) == ["hole", "other"]


def test_on_a_full_disk_nothing_half_is_left(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "no space left")
        return real(descriptor, data[: len(data) // 2])

    backlog = Backlog(directory)
    backlog.add("fed", 1, 10, FED)
    before = (tmp_path / "queued-fed").read_bytes()
    monkeypatch.setattr(os, "write", full)
    for call in (
        lambda: backlog.add("other", 2, 20, FED),
        lambda: backlog.input_of("fed").took(0, memoryview(b"x" * 100)),
        lambda: backlog.input_of("fed").ended(0),
    ):
        with pytest.raises(ResourceExhaustedError) as caught:
            call()
        assert (caught.value.reason, "no space left" in caught.value.message) == ("NO_SPACE", True)
    assert os.listdir(directory) == ["queued-fed"]
    assert (tmp_path / "queued-fed").read_bytes() == before
    # Whatever became of it could not be noted elsewhere: it must not look as if it still waited.
    backlog.remove("fed", noted=False)
    assert Backlog(directory).read() == [Waiting("fed")]
