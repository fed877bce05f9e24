"""A client that dies or gives up looks, to the agent, just like one that has sent all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.tokens import AGENT_TOKEN_KEY, Signer
from services.exec_agent.files.workers import Workers
from tests.integration.exec_agent_files.calls import S, answer, fails, write
from tests.integration.exec_agent_files.conftest import AgentProcess
from tests.integration.exec_agent_files.serving import UID
from tests.integration.exec_agent_files.uploader import BEFORE, FOLDERS, PATCHED, uploader

ROUNDS = 6


@pytest.mark.parametrize("how", ["kill", "cancel"])
async def test_a_client_that_goes_away_leaves_nothing(
    agent: AgentProcess, agent_stub: FileServiceStub, key: Ed25519PrivateKey, work: Path, how: str
) -> None:
    files = [f"{name}.{line}" for name in PATCHED for line in range(2)]
    for name in files:
        (work / name).write_text(BEFORE)
    await write(agent_stub, "first", b"x")  # the threads and descriptors that stay are there now
    metadata = {AGENT_TOKEN_KEY: Signer(key).agent_token(UID)}
    for _ in range(ROUNDS):
        async with uploader(agent.address, metadata, S, work) as program, asyncio.timeout(110):
            while not all((work / name).exists() for name in FOLDERS):
                await asyncio.sleep(0.01)
            await getattr(program, how)()
            # A folder made for a file goes with the upload that is dropped, and stays with one that is not.
            while any((work / name).exists() for name in FOLDERS):
                assert not list(work.glob("*/file"))
                await asyncio.sleep(0.01)
    assert sorted(path.name for path in work.iterdir()) == sorted([*files, "first"])
    assert {(work / name).read_text() for name in files} == {BEFORE}


DIFF = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-old\n+new\n"


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        (
            "WriteFile",
            [
                pb.WriteFileRequest(sandbox_id=S, start=pb.WriteFileStart(path="f")),
                pb.WriteFileRequest(data=b"new"),
            ],
        ),
        ("WriteFile", [pb.WriteFileRequest(sandbox_id=S, start=pb.WriteFileStart(path="a/b", make_parents=True))]),
        (
            "ApplyPatch",
            [
                pb.ApplyPatchRequest(sandbox_id=S, start=pb.ApplyPatchStart(path=".")),
                pb.ApplyPatchRequest(data=DIFF),
            ],
        ),
        ("UploadArchive", [pb.UploadArchiveRequest(sandbox_id=S, start=pb.UploadArchiveStart(path="."))]),
        (
            "UploadArchive",
            [
                pb.UploadArchiveRequest(sandbox_id=S, start=pb.UploadArchiveStart(path=".")),
                pb.UploadArchiveRequest(data=bytes(1024)),
            ],
        ),
    ],
)
async def test_without_its_end_an_upload_is_unavailable(
    stub: FileServiceStub, work: Path, method: str, messages: list[Any]
) -> None:
    (work / "f").write_text("old\n")

    async def stream():
        for message in messages:
            yield message

    with fails() as failure:
        await answer(getattr(stub, method)(stream()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "UPLOAD_CUT")
    assert failure.retry_seconds > 0
    assert [path.name for path in work.iterdir()] == ["f"]
    assert (work / "f").read_text() == "old\n"


class LastStep:
    """Takes a while to finish, and notes what is done to it meanwhile."""

    def __init__(self) -> None:
        self.finishing = threading.Event()
        self.told: list[str] = []
        self._busy = False
        self._disturbed = threading.Event()

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        self.told.append(f"{name} within another step" if self._busy else name)
        if self._busy:
            self._disturbed.set()
        self._busy = True
        yield
        self._busy = False

    def open(self) -> None:
        """Nothing to do."""

    def write(self, pieces: Sequence[bytes]) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        with self._alone("finish"):
            self.finishing.set()
            self._disturbed.wait(0.3)  # nobody comes

    def abort(self) -> None:
        with self._alone("abort"):
            pass


async def test_an_upload_that_is_cancelled_in_its_last_step_is_dropped_after_that_and_not_under_it() -> None:
    """What it has open would be closed while it is used, and its numbers be others' at once."""
    workers, sink = Workers(), LastStep()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"all of it"

    pouring = asyncio.create_task(workers.pour(pieces(), sink))
    assert await asyncio.to_thread(sink.finishing.wait, 110)
    pouring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pouring
    assert sink.told == ["finish", "abort"]
    workers.close()
