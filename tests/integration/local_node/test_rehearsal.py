"""The zygote rehearses an agent before it serves; what that leaves must not be in the way of sandboxes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.local_node.harness import NodeProcess


async def test_sandboxes_are_made_after_a_rehearsal_of_which_nothing_is_left(leveled: NodeProcess) -> None:
    assert not (leveled.run / "rehearsal").exists()
    assert "Traceback" not in leveled.log()
    box = await leveled.box()
    assert (await box.ok("echo alive")).strip() == "alive"


@pytest.mark.parametrize("kind", ["fails_to_rehearse", "leaves_a_thread"])
async def test_a_rehearsal_that_goes_wrong_costs_no_sandbox(make_node: Callable[..., NodeProcess], kind: str) -> None:
    node = make_node(ORCHARD_AGENT_MODULE=f"tests.integration.local_node.agent_that_{kind}")
    await node.start()
    assert ("no rehearsal in" in node.log()) == (kind == "fails_to_rehearse")
    assert not (node.run / "rehearsal").exists()
    box = await node.box()
    assert (await box.ok("echo alive")).strip() == "alive"
    # Agents are children of one and the same process, the zygote, which then has but one thread.
    (parent,) = {_parent(box.agent_pid), _parent((await node.box()).agent_pid)}
    assert [task.name for task in Path(f"/proc/{parent}/task").iterdir()] == [str(parent)]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
