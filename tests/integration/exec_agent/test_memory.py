"""Commands inside a real memory limit, the agent outside of it; the agent runs in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from orchard.exec.v1 import exec_pb2

from tests.integration.exec_agent.conftest import Client, agent_here, spec

LIMIT = 64 << 20
_HOG = "x = bytearray(200 << 20)"


@dataclass(frozen=True)
class Cgroup:
    procs: Path
    counter: Path


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    one = Path("/sys/fs/cgroup/memory")
    folder = (one if one.is_dir() else Path("/sys/fs/cgroup")) / f"orchard-test-{os.getpid()}"
    folder.mkdir()
    try:
        if one.is_dir():
            (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
            yield Cgroup(folder / "cgroup.procs", folder / "memory.oom_control")
        else:
            (folder / "memory.max").write_text(str(LIMIT))
            (folder / "memory.swap.max").write_text("0")
            yield Cgroup(folder / "cgroup.procs", folder / "memory.events")
    finally:
        while (folder / "cgroup.procs").read_text():
            pass
        folder.rmdir()


@pytest.fixture
async def limited(launcher: None, cgroup: Cgroup) -> AsyncIterator[Client]:
    procs, counter = os.open(cgroup.procs, os.O_WRONLY), os.open(cgroup.counter, os.O_RDONLY)
    try:
        async with agent_here(cgroup_procs_fds=(procs,), oom_counter_fd=counter) as client:
            yield client
    finally:
        os.close(procs)
        os.close(counter)


@pytest.mark.root
async def test_a_command_above_the_limit_ends_out_of_memory(limited: Client, cgroup: Cgroup) -> None:
    response = await limited.start(spec("/usr/bin/python3", "-c", _HOG))
    assert response.exec.result.ended == exec_pb2.EXEC_END_OUT_OF_MEMORY
    assert response.exec.result.signal == 9
    assert str(os.getpid()) not in cgroup.procs.read_text().split(), "the agent is outside"
    below = await limited.start(spec(shell=f"/usr/bin/python3 -c '{_HOG}'; exit $?"))
    assert below.exec.result.ended == exec_pb2.EXEC_END_OUT_OF_MEMORY
    assert (await limited.run(spec("echo", "on"))).stdout == b"on\n"


@pytest.mark.root
async def test_other_kills_are_not_out_of_memory(limited: Client) -> None:
    await limited.start(spec("/usr/bin/python3", "-c", _HOG))
    for shell in ("kill -9 $$", "exit 137"):
        response = await limited.start(spec(shell=shell))
        assert response.exec.result.ended in (exec_pb2.EXEC_END_SIGNALLED, exec_pb2.EXEC_END_EXITED)
    survived = await limited.start(spec(shell=f"/usr/bin/python3 -c '{_HOG}' || echo survived"))
    assert survived.exec.result.ended == exec_pb2.EXEC_END_EXITED
    assert survived.output[-1].data == b"survived\n"
