"""Blocking work in threads ends before the one who asked for it goes on."""

from __future__ import annotations

import asyncio
import threading

import pytest
from orchard._client.threads import in_thread


async def test_a_cancelled_caller_goes_on_only_when_the_thread_is_done() -> None:
    begun, release, order = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        release.wait(110)
        order.append("thread")
        raise OSError("nobody waits for this")

    async def caller() -> None:
        try:
            await in_thread(work)
        finally:
            order.append("caller")

    task = asyncio.create_task(caller())
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert order == []
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["thread", "caller"]


async def test_results_and_errors_are_those_of_the_function() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)
