"""What an agent of one build leaves in its directory, found by one of another: a node daemon is replaced meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest
from orchard.exec.v1 import exec_pb2

from tests.integration.exec_agent.conftest import AgentProcess, Client, Output, problem, short_folder, spec
from tests.integration.exec_agent.test_patch_kills import NEW, OLD, contents, patch
from tests.integration.exec_agent.test_stdin import PIPE, stdin, write
from tests.integration.skew.conftest import PREVIOUS_AGENT, only
from tests.support.history import ROOT, import_path

pytestmark = only(PREVIOUS_AGENT)  # the oldest kept nothing

COMMANDS = {
    "small": spec(shell="printf 'a\\0\\377'; printf err >&2; exit 7"),
    "large": spec("head", "-c", "300000", "/dev/zero"),
    "wrapped": spec("head", "-c", "300000", "/dev/zero", retained_limit_bytes=64 << 10),
    "signalled": spec(shell="kill -SEGV $$"),
}


class AgentOf(AgentProcess):
    """An agent of a build, which may become one of another."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.tree = tree
        super().__init__(folder)

    def start(self) -> None:
        (self.folder / "s").unlink(missing_ok=True)
        environment = {**self.environment, **import_path(self.tree)}
        self.process = subprocess.Popen([sys.executable, "-m", "services.exec_agent"], env=environment, cwd=self.tree)
        self.await_ready()


async def seen(client: Client, exec_id: str) -> tuple[exec_pb2.ExecResult, Output]:
    return (await client.wait(exec_id)).result, await client.read(exec_id)


@pytest.fixture(params=[False, True], ids=["older-first", "newer-first"])
def builds(request: pytest.FixtureRequest, old_tree: Path) -> tuple[Path, Path]:
    """Whose state, and who finds it."""
    subprocess.run([ROOT / "scripts" / "build-launcher"], check=True)
    return (ROOT, old_tree) if request.param else (old_tree, ROOT)


@contextmanager
def agent_of(tree: Path) -> Iterator[AgentOf]:
    with short_folder() as folder:
        agent = AgentOf(folder, tree)
        try:
            yield agent
        finally:
            agent.kill()


async def test_commands_of_the_other_build_are_as_they_were(builds: tuple[Path, Path]) -> None:
    with agent_of(builds[0]) as agent:
        async with agent.client() as client:
            for exec_id, command in COMMANDS.items():
                await client.start(command, exec_id=exec_id)
            before = {exec_id: await seen(client, exec_id) for exec_id in COMMANDS}
            await client.signal("cancelled", cancel=True)
            await client.start(spec(shell="echo up; exec sleep 1000"), wait=0, exec_id="running")
            await client.until_output("running", b"up")
            await client.start(spec(shell="echo ran >> ran"), wait=0, exec_id="queued")
            await client.start(spec(shell="echo fed >> ran; cat", stdin_mode=PIPE), wait=0, exec_id="fed")
            await write(client, "fed", b"one, \0\377, ")
        agent.kill()
        agent.tree = builds[1]
        agent.start()
        async with agent.client() as client:
            await _check(client, before)
        # Nobody asked for them again: in their order, once.
        assert (agent.work / "ran").read_text() == "ran\nfed\n"


async def _check(client: Client, before: dict[str, tuple[exec_pb2.ExecResult, Output]]) -> None:
    for exec_id, command in COMMANDS.items():
        assert await seen(client, exec_id) == before[exec_id], exec_id
        assert (await client.start(command, exec_id=exec_id)).exec.result == before[exec_id][0]
    with problem() as found:
        await client.start(spec("true"), exec_id="small")
    assert found[0].reason == "EXEC_ID_REUSED"
    result, output = await seen(client, "running")
    assert (result.ended, output.stdout) == (exec_pb2.EXEC_END_AGENT_RESTARTED, b"up\n")
    assert (await client.wait("cancelled")).result.ended == exec_pb2.EXEC_END_NOT_STARTED
    assert (await client.wait("queued")).result.exit_code == 0
    taken = (await stdin(client, "fed")).offset
    await write(client, "fed", b"two", offset=taken, end=True)
    result, output = await seen(client, "fed")
    assert (result.exit_code, output.stdout) == (0, b"one, \0\377, two")


async def test_a_patch_that_the_other_build_was_killed_in_is_whole_or_undone(builds: tuple[Path, Path]) -> None:
    with agent_of(builds[0]) as agent:
        tree = agent.work / "tree"
        for name, text in OLD.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(f"{text}\n")
        while not await _killed_in_a_patch(agent, reverse=contents(tree) == NEW):
            agent.start()
        agent.tree = builds[1]
        agent.start()
        found = contents(tree)
        assert found in (OLD, NEW)
        assert not _notes(agent)
        async with agent.client() as client:
            assert await patch(client, reverse=found == NEW)


async def _killed_in_a_patch(agent: AgentOf, *, reverse: bool) -> bool:
    """Whether it had noted that it places files, and not yet that it had placed them all."""
    async with agent.client() as client:
        call = asyncio.ensure_future(patch(client, reverse=reverse))
        while not call.done() and b'["P"' not in _notes(agent):
            await asyncio.sleep(0)
        agent.kill()
        with suppress(grpc.aio.AioRpcError):
            await call
    return contents(agent.work / "tree") not in (OLD, NEW) and b'["C"' not in _notes(agent)


def _notes(agent: AgentOf) -> bytes:
    """What the agent noted of a patch that is under way."""
    with suppress(FileNotFoundError):
        return b"".join(path.read_bytes() for path in (agent.folder / "state").glob("change-*"))
    return b""
