"""What an agent of one build leaves in its directory, found by one of another: a node daemon is replaced meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from orchard.exec.v1 import exec_pb2

from tests.integration.exec_agent.conftest import AgentProcess, Client, Output, problem, short_folder, spec
from tests.integration.skew.conftest import PREVIOUS_AGENT, ROOT, only

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
        environment = {**self.environment, "PYTHONPATH": f"{self.tree}:{self.tree}/clients/python/src"}
        self.process = subprocess.Popen([sys.executable, "-m", "services.exec_agent"], env=environment, cwd=self.tree)
        self.await_ready()


async def seen(client: Client, exec_id: str) -> tuple[exec_pb2.ExecResult, Output]:
    return (await client.wait(exec_id)).result, await client.read(exec_id)


@pytest.mark.parametrize("newer_first", [False, True])
async def test_commands_of_the_other_build_are_as_they_were(old_tree: Path, newer_first: bool) -> None:
    first, second = (ROOT, old_tree) if newer_first else (old_tree, ROOT)
    subprocess.run([ROOT / "scripts" / "build-launcher"], check=True)
    with short_folder() as folder:
        agent = AgentOf(folder, first)
        try:
            async with agent.client() as client:
                for exec_id, command in COMMANDS.items():
                    await client.start(command, exec_id=exec_id)
                before = {exec_id: await seen(client, exec_id) for exec_id in COMMANDS}
                await client.signal("cancelled", cancel=True)
                await client.start(spec(shell="echo up; exec sleep 1000"), wait=0, exec_id="running")
                await client.until_output("running", b"up")
                await client.start(spec(shell="echo ran >> ran"), wait=0, exec_id="queued")
            agent.kill()
            agent.tree = second
            agent.start()
            async with agent.client() as client:
                await _check(client, before)
            assert (agent.work / "ran").read_text() == "ran\n"
        finally:
            agent.kill()


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
    # Of builds one of which keeps nothing of what waits, whoever asked for it asks again, as the SDK does.
    await client.run(spec(shell="echo ran >> ran"), "queued")
