"""What the node tells its watchers, and up to which revision that is everything."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.tasks import TaskGroup
from services.local.node.journal import Journal
from services.local.node.model import Phase, Record
from services.local.node.service import Creation, Node
from services.local.runtime.model import Request
from tests.unit.local_node.test_full_disk import Runtime

ACTIONS = st.lists(st.tuples(st.sampled_from(["create", "update", "delete", "read"]), st.integers(0, 9)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_with_its_revision_a_watcher_knows_everything(actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_watch_along(Path(folder), actions))


async def _watch_along(folder: Path, actions: list[tuple[str, int]]) -> None:
    async with TaskGroup() as tasks:
        node = Node(Runtime(), None, Journal(folder), tasks, concurrent_starts=4)  # type: ignore[arg-type]
        told, mirror, revision = node.watch(), dict[str, Record](), -1
        for number, (action, which) in enumerate([*actions, ("read", 0)]):
            uids = sorted(node._records)
            if action == "create":
                await node.create(Creation("t", f"r{number}", "h", b"", Request("", f"s{number}"), 0.0))
            elif action == "update" and uids:
                node.update(uids[which % len(uids)], float(number))
            elif action == "delete" and uids:
                await node.delete(uids[which % len(uids)])
            elif action == "read":
                node._hub.wake()
                batch = await anext(told)
                assert batch.revision >= revision
                revision = batch.revision
                if batch.snapshot:
                    mirror.clear()
                mirror.update({record.uid: record for record in batch.records})
                there = {uid: record for uid, record in mirror.items() if record.phase is not Phase.GONE}
                assert there == node._records
                assert all(record.revision <= revision for record in mirror.values())
        await told.aclose()
