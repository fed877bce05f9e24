"""Whatever is wrong with an object store is UNAVAILABLE, and never looks like something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import UnavailableError
from services.common.objects import ObjectNotFoundError, ObjectStore
from tests.support.object_server import BUCKET, FAILURES, ObjectServer, running_object_server


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with running_object_server() as server:
        yield server


@pytest.fixture
def store(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.failure = ""
    yield ObjectStore(f"s3://{BUCKET}")
    server.failure = ""


async def test_objects_come_back(store: ObjectStore) -> None:
    await store.put("a/b", b"body")
    assert await store.exists("a/b")
    assert b"".join([chunk async for chunk in store.chunks("a/b")]) == b"body"
    await store.delete(["a/b", "a/none"])
    assert not await store.exists("a/b")
    with pytest.raises(ObjectNotFoundError):
        _ = [chunk async for chunk in store.chunks("a/b")]


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_put_that_fails_is_told_as_unavailable(store: ObjectStore, server: ObjectServer, failure: str) -> None:
    server.failure = failure
    with pytest.raises(UnavailableError) as caught:
        await store.put("a", b"body")
    assert caught.value.reason == "OBJECT_STORE_UNAVAILABLE"


@pytest.mark.parametrize("where", ["bucket", "folder"])
async def test_many_objects_come_back(store: ObjectStore, tmp_path: Path, where: str) -> None:
    chosen = store if where == "bucket" else ObjectStore(tmp_path.as_uri())
    bodies = {"a/b": b"one", "a/c/d": b"two", "e": b"", "a/b%2Fc": b"odd"}
    assert await chosen.put_all(bodies) == {}
    assert await chosen.small(list(bodies), 10) == list(bodies.values())


async def test_of_many_those_are_told_that_were_not_taken(
    store: ObjectStore, server: ObjectServer, tmp_path: Path
) -> None:
    (tmp_path / "way").write_text("in the way")
    failed = await ObjectStore(tmp_path.as_uri()).put_all({"a": b"1", "way/b": b"2", "c/d": b"3"})
    assert {name: error.reason for name, error in failed.items()} == {"way/b": "OBJECT_STORE_UNAVAILABLE"}
    assert (tmp_path / "c" / "d").read_bytes() == b"3"
    server.failure = next(iter(FAILURES))
    assert set(await store.put_all({"a": b"1", "b": b"2"})) == {"a", "b"}


@pytest.mark.parametrize("failure", [name for name in FAILURES if name != "no bucket"])
async def test_what_cannot_be_read_is_not_called_missing(
    store: ObjectStore, server: ObjectServer, failure: str
) -> None:
    await store.put("here", b"body")
    server.failure = failure
    with pytest.raises(UnavailableError):
        _ = [chunk async for chunk in store.chunks("here")]
    with pytest.raises(UnavailableError):
        await store.exists("here")
    with pytest.raises(UnavailableError):
        await store.delete(["here"])


async def test_a_folder_that_is_gone_or_no_folder(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path / 'objects'}")
    (tmp_path / "objects").rmdir()
    (tmp_path / "objects").write_bytes(b"")
    with pytest.raises(UnavailableError):
        await store.put("a", b"body")


@pytest.mark.parametrize("where", ["folder", "bucket"])
async def test_small_objects_come_whole_and_others_not_at_all(store: ObjectStore, tmp_path: Path, where: str) -> None:
    store = store if where == "bucket" else ObjectStore(f"file://{tmp_path}")
    await store.put("a/small", b"1234")
    await store.put("a/large", b"12345")
    assert await store.small(["a/none", "a/small", "a/large"], 4) == [None, b"1234", None]
    assert await store.small([], 4) == []


async def test_small_objects_that_cannot_be_read_are_not_called_missing(
    store: ObjectStore, server: ObjectServer
) -> None:
    await store.put("here", b"body")
    server.failure = "forbidden"
    with pytest.raises(UnavailableError):
        await store.small(["here"], 4)
