from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest
from orchard._client.paging import paged
from orchard._client.transport import Transport


class Pages:
    """Answers calls with pages, each behind the token that is its number; None never comes."""

    def __init__(self, *pages: Sequence[int] | Exception | None) -> None:
        self.asked: list[str] = []
        self.cancelled = False
        self._pages = pages

    async def unary(self, _method: object, request: Any) -> Any:
        self.asked.append(request.page_token)
        number = int(request.page_token or 0)
        page = self._pages[number]
        if page is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        if isinstance(page, Exception):
            raise page
        await asyncio.sleep(0)
        return SimpleNamespace(rows=page, next_page_token=str(number + 1) if number + 1 < len(self._pages) else "")

    def all(self) -> Any:
        request = SimpleNamespace(page_token="")
        return paged(cast("Transport", self), lambda c: c.file.Stat, request, lambda page: page.rows, str)  # type: ignore[attr-defined]


async def taken(values: Any, count: int) -> list[str]:
    return [await anext(values) for _ in range(count)]


@pytest.mark.parametrize(
    "pages", [[[]], [[1]], [[1, 2], [3]], [[1], [], [2]], [[], [], [1]], [[1], []], [list(range(50)), [50]]]
)
async def test_every_value_comes_once_and_in_order(pages: list[list[int]]) -> None:
    calls = Pages(*pages)
    assert [value async for value in calls.all()] == [str(one) for page in pages for one in page]
    assert calls.asked == ["", *(str(number) for number in range(1, len(pages)))]


async def test_the_next_page_comes_while_one_is_used() -> None:
    calls = Pages(list(range(100)), list(range(100, 200)))
    async with aclosing(calls.all()) as values:
        await taken(values, 10)
        assert calls.asked == [""], "whoever wants one of the first has asked for no more"
        await taken(values, 20)
        assert calls.asked == ["", "1"], "also where whoever uses them waits for nothing else"
        assert await taken(values, 170) == [str(number) for number in range(30, 200)]
        assert await anext(values, None) is None


async def test_a_list_that_is_left_asks_for_nothing_more() -> None:
    calls = Pages(list(range(20)), None)
    async with aclosing(calls.all()) as values:
        await taken(values, 20)
        assert calls.asked == ["", "1"]
    assert calls.cancelled


async def test_whoever_waits_for_a_page_can_be_cancelled() -> None:
    calls = Pages([1], None)

    async def use() -> None:
        async for _ in calls.all():
            pass

    using = asyncio.ensure_future(use())
    while len(calls.asked) < 2:
        await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert calls.cancelled


async def test_what_is_wrong_with_a_page_is_told_behind_the_one_before() -> None:
    values = Pages(list(range(20)), ValueError("wrong")).all()
    assert len(await taken(values, 20)) == 20
    with pytest.raises(ValueError, match="wrong"):
        await anext(values)


async def test_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    async for _ in Pages(list(range(1000))).all():
        pass
    task.cancel()
    assert turns > 100
