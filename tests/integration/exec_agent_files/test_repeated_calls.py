"""Calls that are repeated while the agent is still at work on the first: its client may have lost the connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.errors import UnavailableError
from services.exec_agent.files import moving, placing
from services.exec_agent.files.patch import Change
from services.exec_agent.files.turns import Turns
from tests.integration.exec_agent_files.calls import S, answer, fails, patch

DIFF = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-old\n+new\n"
NOT_YET_SECONDS = 0.3


class Step:
    """A step of a call, the first of which stands still until it is told to go on."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(110)
        return self._work(*arguments)


async def both(step: Step, first: asyncio.Task[Any], repeat: Callable[[], Any]) -> asyncio.Task[Any]:
    """Ask a second time while the first stands at `step`, and let that go on; both have ended then."""
    assert await asyncio.to_thread(step.reached.wait, 110)
    second = asyncio.ensure_future(repeat())
    try:
        done, _ = await asyncio.wait({second}, timeout=NOT_YET_SECONDS)
        assert not done, "it was answered half way"
    finally:
        step.go_on.set()
        await asyncio.wait({first, second})
    return second


async def test_what_became_of_a_patch_is_told_when_it_is_known(
    stub: FileServiceStub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks so, and applies it again where it seems not to have been: that would be a failure of no patch."""
    (work / "f").write_text("old\n")
    step = Step(placing.Commit.run)

    def run(commit: placing.Commit, changes: Sequence[Change]) -> None:
        step(commit, changes)

    monkeypatch.setattr(placing.Commit, "run", run)
    first = asyncio.create_task(patch(stub, ".", DIFF))
    asked = await both(step, first, lambda: patch(stub, ".", DIFF, dry_run=True))
    assert (first.result().applied, asked.result().applied) == (True, False)
    assert (await patch(stub, ".", DIFF, dry_run=True, reverse=True)).applied


async def test_a_move_that_takes_long_is_repeated_after_it(
    stub: FileServiceStub, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to another device: nothing is at the source any more, which says that it was moved."""
    (work / "source").write_text("x")
    step = Step(moving.copy_entry)
    monkeypatch.setattr(moving, "copy_entry", step)
    monkeypatch.setattr(moving, "_renamed", lambda *_arguments, **_named: False)
    request = pb.MoveRequest(sandbox_id=S, source_path="source", target_path="target")
    first = asyncio.create_task(answer(stub.Move(request)))
    second = await both(step, first, lambda: answer(stub.Move(request)))
    first.result()
    with fails() as failure:
        second.result()
    assert failure.reason == "FILE_NOT_FOUND"
    assert [path.name for path in work.iterdir()] == ["target"]


def test_who_is_stuck_is_waited_for_for_a_while_alone() -> None:
    turns = Turns(patience_seconds=0.01)
    with turns.take("here"), turns.take("there"):
        with pytest.raises(UnavailableError) as caught, turns.take("here"):
            pass
        assert caught.value.reason == "AGENT_BUSY"
    with turns.take("here"):
        pass
