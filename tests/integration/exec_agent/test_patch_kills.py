"""An agent that is killed with patches under way: what the next one serves is wholly the old or wholly the new."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from orchard.exec.v1 import file_service_pb2
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from tests.integration.exec_agent.conftest import BACKSTOP, SANDBOX, AgentProcess, Client

MakeAgent = Callable[..., AgentProcess]
FILES = 150
ROUNDS = 15
SECTION = """\
diff --git a/d{0}/f{0} b/d{0}/f{0}
--- a/d{0}/f{0}
+++ b/d{0}/f{0}
@@ -1 +1 @@
-old
+new
diff --git a/d{0}/gone b/d{0}/gone
deleted file mode 100644
--- a/d{0}/gone
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/made/{0}/new b/made/{0}/new
new file mode 100644
--- /dev/null
+++ b/made/{0}/new
@@ -0,0 +1 @@
+made
"""
PATCH = "".join(SECTION.format(number) for number in range(FILES)).encode()
OLD = {f"d{number}/{name}": text for number in range(FILES) for name, text in ((f"f{number}", "old"), ("gone", "gone"))}
NEW = {name: text for n in range(FILES) for name, text in ((f"d{n}/f{n}", "new"), (f"made/{n}/new", "made"))}


async def patch(client: Client, *, reverse: bool = False, dry_run: bool = False) -> bool:
    async def messages() -> AsyncIterator[file_service_pb2.ApplyPatchRequest]:
        start = file_service_pb2.ApplyPatchStart(path="tree", reverse=reverse, dry_run=dry_run)
        yield file_service_pb2.ApplyPatchRequest(sandbox_id=SANDBOX, start=start)
        yield file_service_pb2.ApplyPatchRequest(data=PATCH)
        yield file_service_pb2.ApplyPatchRequest(end=True)

    call = FileServiceStub(client.channel).ApplyPatch(messages(), metadata=client.metadata, timeout=BACKSTOP)
    return (await call).applied


def contents(tree: Path) -> dict[str, str]:
    files = (path for path in tree.rglob("*") if not path.is_dir())
    return {str(path.relative_to(tree)): path.read_text().strip() for path in files}


async def test_patches_are_whole_or_undone_whenever_their_agent_is_killed(make_agent: MakeAgent) -> None:
    agent, rng = make_agent(), random.Random(1)
    tree = agent.work / "tree"
    for name, text in OLD.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"{text}\n")
    is_new, cut = False, 0
    for _ in range(ROUNDS):
        async with agent.client() as client:
            call = asyncio.ensure_future(patch(client, reverse=is_new))
            await asyncio.sleep(rng.uniform(0.0, 0.15))  # the moment of the kill is what varies
            await asyncio.to_thread(agent.kill)
            try:
                assert await call
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                cut += 1
        left = [path.name for path in (agent.folder / "state").iterdir()]
        await asyncio.to_thread(agent.start)
        found = contents(tree)
        assert found in (OLD, NEW), left
        is_new = found == NEW
        async with agent.client() as client:
            # Whoever asks is told which of them, as the SDK asks after a connection that broke.
            assert await patch(client, reverse=is_new, dry_run=True)
            assert not await patch(client, reverse=not is_new, dry_run=True)
        assert not [path for path in (agent.folder / "state").iterdir() if path.name.startswith("change-")]
    assert cut > 0
