"""What commands wrote outlives the agent, out of reach of everything inside, and goes with the sandbox."""

import hashlib
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import duration_pb2
from orchard.exec.v1 import exec_pb2, exec_service_pb2, exec_service_pb2_grpc

from services.common.tokens import AGENT_TOKEN_KEY
from tests.integration.local_node.harness import PATIENCE, Box, NodeProcess, gone

LARGE = 3 << 20
# The same bytes on every run, no part like another.
NUMBERS = "i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i+1)); done"
EXPECTED = b"".join(b"%d\n" % number for number in range(2000))


class Execs:
    """Commands of one sandbox by their ids."""

    def __init__(self, box: Box) -> None:
        self.sandbox_id = box.sandbox.sandbox_id
        self.stub = exec_service_pb2_grpc.ExecServiceStub(box.channel)
        self.metadata = ((AGENT_TOKEN_KEY, box.node.signer.agent_token(box.uid)),)

    async def start(self, exec_id: str, shell: str, *, wait: int = 30, **fields: object) -> exec_pb2.Exec:
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=self.sandbox_id,
            exec_id=exec_id,
            spec=exec_pb2.ExecSpec(shell=shell, **fields),  # type: ignore[arg-type]
            wait=duration_pb2.Duration(seconds=wait),
        )
        return (await self.stub.StartExec(request, metadata=self.metadata, timeout=PATIENCE)).exec

    async def cancel(self, exec_id: str) -> exec_pb2.ExecResult:
        """End it; returns how it ended."""
        request = exec_service_pb2.SignalExecRequest(sandbox_id=self.sandbox_id, exec_id=exec_id, cancel=True)
        await self.stub.SignalExec(request, metadata=self.metadata, timeout=PATIENCE)
        return (await self.read(exec_id))[1]

    async def events(self, exec_id: str) -> AsyncIterator[exec_service_pb2.ReadOutputResponse]:
        request = exec_service_pb2.ReadOutputRequest(sandbox_id=self.sandbox_id, exec_id=exec_id)
        call = self.stub.ReadOutput(request, metadata=self.metadata, timeout=PATIENCE, wait_for_ready=True)
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()

    async def read(self, exec_id: str) -> tuple[bytes, exec_pb2.ExecResult]:
        output = b""
        async for event in self.events(exec_id):
            output += event.chunk.data
            if event.HasField("result"):
                return output, event.result
        raise AssertionError("no result")

    async def until(self, exec_id: str, wanted: bytes) -> None:
        output = b""
        async for event in self.events(exec_id):
            output += event.chunk.data
            if wanted in output:
                return
        raise AssertionError(f"{exec_id} ended without {wanted!r}")


async def test_kill_everything_inside_loses_no_output(leveled: NodeProcess) -> None:
    box = await leveled.box()
    execs = Execs(box)
    large = f"{NUMBERS}; head -c {LARGE} /dev/zero"
    await execs.start("small", "printf small; printf err >&2; exit 5")
    await execs.start("large", large)
    before = {exec_id: await execs.read(exec_id) for exec_id in ("small", "large")}
    await execs.start("running", f"{NUMBERS}; printf END; exec sleep 1000", wait=0, concurrent=True)
    await execs.until("running", b"END")
    first = box.agent_pid
    with pytest.raises(grpc.aio.AioRpcError):
        await execs.start("killer", "kill -9 -1; sleep 30", concurrent=True)
    await gone(first)
    await box.healthy()
    for exec_id, seen in before.items():
        assert await execs.read(exec_id) == seen
    assert before["small"][1].exit_code == 5
    assert hashlib.sha256(before["large"][0]).digest() == hashlib.sha256(EXPECTED + bytes(LARGE)).digest()
    output, result = await execs.read("running")
    assert (output, result.ended) == (EXPECTED + b"END", exec_pb2.EXEC_END_AGENT_RESTARTED)
    assert (await execs.read("killer"))[1].ended == exec_pb2.EXEC_END_AGENT_RESTARTED
    # A repeat still starts nothing.
    assert (await execs.start("large", large)).result == before["large"][1]


LOOK = """
import glob, os, sys
wanted = {int(number) for number in sys.argv[1:]}
found = []
def look(path):
    try:
        status = os.stat(path)
    except OSError:
        return
    if status.st_ino in wanted:
        found.append(path)
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/usr")]
    for name in (*folders, *files):
        look(os.path.join(folder, name))
processes = glob.glob("/proc/[0-9]*")
for process in processes:
    for link in ("cwd", "root", "exe"):
        look(os.path.join(process, link))
    for number in range(256):
        look(os.path.join(process, "fd", str(number)))
print(len(processes) > 2, found)
"""


async def test_nothing_inside_reaches_the_files_and_they_go_with_the_sandbox(leveled: NodeProcess) -> None:
    box = await leveled.box()
    await Execs(box).start("large", f"head -c {LARGE} /dev/zero")
    state = box.folder / "state"
    (file,) = state.glob("output-*")
    assert file.stat().st_size > LARGE
    inodes = " ".join(str(path.stat().st_ino) for path in (state, *state.iterdir()))
    assert (await box.ok(f"/usr/bin/python3 -c '{LOOK}' {inodes}")).strip() == "True []"
    await leveled.delete(box.uid)
    assert not box.folder.exists()
