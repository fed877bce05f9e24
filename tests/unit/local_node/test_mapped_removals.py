"""Folders that are removed together: what one caller does is not what another gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from services.local.runtime.plan import Ids
from services.local.runtime.removal import RemovalError
from services.local.runtime.removals import MappedRemovals
from services.local.runtime.zygote_client import Zygote, ZygoteDiedError


class SlowZygote:
    """Removes folders when it is told to go on."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[list[str]] = asyncio.Queue()
        self.go: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def remove(self, ids: Any, folders: Sequence[str]) -> None:
        """See Zygote.remove."""
        self.asked.put_nowait(list(folders))
        error = await self.go.get()
        if error is not None:
            raise error
        for folder in folders:
            Path(folder).rmdir()


def _removals(zygote: SlowZygote) -> MappedRemovals:
    return MappedRemovals(cast("Ids", None), cast("Zygote", zygote))


def _folders(tmp_path: Path) -> list[str]:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_a_caller_that_leaves_takes_no_other_with_it(tmp_path: Path, leaver: int) -> None:
    zygote = SlowZygote()
    removals = _removals(zygote)
    folders = _folders(tmp_path)
    async with asyncio.timeout(110):
        calls = [asyncio.create_task(removals.remove(folders[0]))]
        assert await zygote.asked.get() == folders[:1]
        calls += [asyncio.create_task(removals.remove(folder)) for folder in folders[1:]]
        if leaver:  # the first is done: the others are at work, together
            await asyncio.sleep(0)
            zygote.go.put_nowait(None)
            assert await zygote.asked.get() == folders[1:]
        calls[leaver].cancel()
        for _ in range(3):
            zygote.go.put_nowait(None)
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results].count(asyncio.CancelledError) == 1
    assert [result for result in results if result is not None] == [results[leaver]]
    assert not list(tmp_path.iterdir())


async def test_what_could_not_be_removed_is_told_to_those_who_wanted_it(tmp_path: Path) -> None:
    zygote = SlowZygote()
    removals = _removals(zygote)
    first, second, third = _folders(tmp_path)
    async with asyncio.timeout(110):
        calls = [asyncio.create_task(removals.remove(first))]
        await zygote.asked.get()
        calls += [asyncio.create_task(removals.remove(folder)) for folder in (second, third)]
        await asyncio.sleep(0)
        zygote.go.put_nowait(None)
        await zygote.asked.get()
        Path(third).rmdir()  # it got that far
        zygote.go.put_nowait(ZygoteDiedError("it died"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert (results[0], results[2]) == (None, None)
        assert isinstance(results[1], RemovalError)
        zygote.go.put_nowait(None)
        await removals.remove(second)
    assert not Path(second).exists()
