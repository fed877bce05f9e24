"""Commands inside a real memory limit, the agent outside of it; the agent runs in this process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from orchard.exec.v1 import exec_pb2

from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import Signer, generate_key, public_pem
from services.exec_agent.app import serve
from services.exec_agent.launcher import open_launcher
from services.exec_agent.settings import AgentConfig
from tests.integration.exec_agent.conftest import PATH, SANDBOX, UID, Client, spec

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
    key = generate_key()
    folder = Path(tempfile.mkdtemp(prefix="orchard-agent-"))
    state, launcher_fd = os.open(folder, os.O_RDONLY), open_launcher()
    procs, counter = os.open(cgroup.procs, os.O_WRONLY), os.open(cgroup.counter, os.O_RDONLY)
    config = AgentConfig(
        uid=UID,
        sandbox_id=SANDBOX,
        listen=f"unix:{folder}/s",
        public_keys_pem=public_pem(key).decode(),
        state_fd=state,
        launcher_fd=launcher_fd,
        env={"PATH": PATH},
        cgroup_procs_fds=(procs,),
        oom_counter_fd=counter,
    )
    try:
        async with (
            serve(config),
            grpc.aio.insecure_channel(f"unix:{folder}/s", options=CHANNEL_OPTIONS) as channel,
        ):
            yield Client(channel, Signer(key).agent_token(UID))
    finally:
        for descriptor in (state, launcher_fd, procs, counter):
            os.close(descriptor)
        shutil.rmtree(folder)


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
