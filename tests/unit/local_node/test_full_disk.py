"""Deleting is what frees a full disk, so it must work on one."""

import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.common.errors import ResourceExhaustedError
from services.common.tasks import TaskGroup
from services.local.node.journal import Journal
from services.local.node.model import Phase, Record
from services.local.node.service import Creation, Node
from services.local.runtime.model import Ended, Image, Request, new_uid


class Runtime:
    """Sandboxes that take no room."""

    def __init__(self) -> None:
        self.reserved: list[str] = []
        self.deleted: list[str] = []

    def endpoint(self, uid: str) -> str:
        return f"unix:/{uid}"

    def reserve(self, request: Request) -> str:
        self.reserved.append(new_uid())
        return self.reserved[-1]

    async def create(self, request: Request, image: Image | None) -> dict[str, float]:
        return {}

    async def adopt(self, known) -> list[Ended]:
        return []

    async def delete(self, uid: str) -> None:
        self.deleted.append(uid)

    async def watch(self) -> AsyncIterator[Ended]:
        return
        yield


@contextmanager
def no_room(more_than: Path, by: int) -> Iterator[None]:
    """No file of this process may grow beyond `by` bytes more than the size of one of them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (more_than.stat().st_size + by, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def running(tmp_path: Path, tasks: TaskGroup) -> tuple[Node, Runtime, Record, Path]:
    runtime = Runtime()
    node = Node(runtime, None, Journal(tmp_path), tasks, concurrent_starts=1)
    request = Request("", "alpha")
    record = await node.create(Creation("t", "r", "h", b"", request, 0.0))
    async for told in node.watch():
        if told.records and told.records[-1].phase is Phase.RUNNING:
            break
    return node, runtime, record, tmp_path / f"{record.uid}.jsonl"


@pytest.mark.parametrize("room", [0, 10])
async def test_a_sandbox_is_deleted_though_nothing_can_be_written(tmp_path: Path, room: int) -> None:
    async with TaskGroup() as tasks:
        node, runtime, record, path = await running(tmp_path, tasks)
        with no_room(path, room):
            await node.delete(record.uid)
        assert runtime.deleted == [record.uid]
        assert not path.exists()
        assert not tasks.failed.done()


async def test_a_write_that_did_not_fit_spoils_no_later_one(tmp_path: Path) -> None:
    async with TaskGroup() as tasks:
        node, _runtime, record, path = await running(tmp_path, tasks)
        with no_room(path, 10):
            assert node.update(record.uid, 5.0).expire_time == 5.0
        node.update(record.uid, 6.0)
        (read,) = Journal(tmp_path).read_all()
        assert (read.expire_time, read.phase) == (6.0, Phase.RUNNING)


async def test_a_sandbox_that_cannot_be_written_down_leaves_nothing_of_the_runtimes(tmp_path: Path) -> None:
    async with TaskGroup() as tasks:
        node, runtime, record, path = await running(tmp_path, tasks)
        with no_room(path, -path.stat().st_size), pytest.raises(ResourceExhaustedError):
            await node.create(Creation("t", "another", "h", b"", Request("", "beta"), 0.0))
        assert runtime.deleted == [runtime.reserved[1]] != [record.uid]
