"""Ctrl-C in the synchronous client, wherever the program is at that moment."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import linecache
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from orchard._client import portal as subject
from orchard._client.portal import Portal

WATCHED = {Path(subject.__file__).name, Path(threading.__file__).name}


def happened(line: int, what: Callable[[], object], call: Callable[[], object]) -> bool:
    """Call it with something happening before the line-th line that runs in this thread; False: it had fewer lines."""
    lines = itertools.count()
    has_happened = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal has_happened
        if Path(frame.f_code.co_filename).name not in WATCHED:
            return None
        # Tracing stops between the body of `with` and its end, and at `try`: Python looks for signals at neither.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith(("with ", "try:")) and next(lines) == line:
            has_happened = True
            what()
        return trace

    try:
        sys.settrace(trace)
        call()
    finally:
        sys.settrace(None)
    return has_happened


def interrupted(line: int, call: Callable[[], object]) -> bool:
    """Call it with Ctrl-C before the line-th line."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return happened(line, functools.partial(signal.raise_signal, signal.SIGINT), call)
    finally:
        signal.signal(signal.SIGINT, before)


# Interrupted before its thread starts, a loop is left to the collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("first", [False, True], ids=["a call", "the first call"])
def test_ctrl_c_at_any_line_is_a_keyboard_interrupt_and_the_next_call_works(*, first: bool) -> None:
    under_way = 0

    async def work() -> None:
        nonlocal under_way
        under_way += 1
        try:
            await asyncio.sleep(0.005)
        finally:
            under_way -= 1

    portal = Portal()
    for line in itertools.count():
        if first:
            portal.stop()
            portal = Portal()
        else:
            portal.run(asyncio.sleep(0))
        # Closed: before it was taken over nothing else does it.
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(work()) as coroutine:
            if not interrupted(line, functools.partial(portal.run, coroutine)):
                break
        assert portal.run(asyncio.sleep(0, 7)) == 7
        assert under_way == 0, f"it goes on after Ctrl-C at line {line}"
    assert line > 10
    portal.stop()
    gc.collect()


def test_what_a_coroutine_returns_and_raises_is_passed_on() -> None:
    async def fail() -> None:
        raise LookupError("no such thing")

    portal = Portal()
    assert portal.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(LookupError, match="no such thing"):
        portal.run(fail())
    portal.stop()


def test_threads_that_stop_it_and_threads_that_go_on() -> None:
    """Whoever stops it ends one loop, the one that there is; whoever calls then has another."""
    portal = Portal()
    failures: list[BaseException] = []

    def use(stops: bool) -> None:
        try:
            for number in range(60):
                with contextlib.suppress(concurrent.futures.CancelledError):
                    assert portal.run(asyncio.sleep(0, number)) == number
                if stops:
                    portal.stop()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number < 2,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    portal.stop()


@pytest.mark.parametrize("first", [False, True], ids=["a call", "the first call"])
def test_a_loop_that_is_stopped_at_any_line_of_a_call_ends_the_call(*, first: bool) -> None:
    """As by another thread, which can stop nothing while the lock is held."""
    portal = Portal()

    def stop() -> None:
        if not portal._start_lock.locked():
            portal.stop()

    ended: list[object] = []
    goes_on: list[bool] = []

    def call() -> None:
        try:
            ended.append(portal.run(asyncio.sleep(0, "done")))
        except concurrent.futures.CancelledError as error:
            ended.append(error)

    def call_and_stop(line: int) -> None:
        goes_on.append(happened(line, stop, call))

    for line in itertools.count():
        if first:
            portal.stop()
        else:
            portal.run(asyncio.sleep(0))
        # A thread of its own: one that waits for ever is not to hold the test.
        thread = threading.Thread(target=call_and_stop, args=(line,), daemon=True)
        thread.start()
        thread.join(60)
        assert len(ended) == line + 1, f"it waits for ever when stopped at line {line}"
        if not goes_on[-1]:
            break
    assert line > 10
    portal.stop()


async def numbers(closed: threading.Event) -> AsyncIterator[int]:
    try:
        for number in itertools.count():
            yield number
    finally:
        closed.set()


def test_an_iteration_that_is_left_after_the_end_starts_nothing() -> None:
    portal, closed = Portal(), threading.Event()
    items = portal.iterate(numbers(closed))
    assert next(items) == 0
    portal.stop()
    assert closed.is_set()
    del items
    assert portal._loop is None


def test_iterations_that_are_open_at_the_end_are_closed_from_the_outside_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where an exception leaves `with SandboxClient()`, whose traceback holds on to them."""
    portal, ends = Portal(), list[str]()

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[AsyncIterator[int]]:
        try:
            yield numbers(threading.Event())
        finally:
            await asyncio.sleep(0.01)
            ends.append("connection")

    async def outer() -> AsyncIterator[int]:
        try:
            async with opened() as items:
                async for item in items:
                    yield item
        finally:
            await asyncio.sleep(0.01)
            ends.append("reader")

    held = [portal.iterate(outer()) for _ in range(3)]
    assert [next(items) for items in held] == [0, 0, 0]
    portal.stop()
    assert ends == ["connection", "reader"] * 3
    gc.collect()
    assert not caplog.records


def test_an_iteration_that_the_loops_own_thread_throws_away_is_closed() -> None:
    """As where the collector runs there."""
    portal, closed = Portal(), threading.Event()
    held = [portal.iterate(numbers(closed))]
    assert next(held[0]) == 0

    async def throw_away() -> None:
        held.clear()

    portal.run(throw_away())
    assert closed.wait(110)
    portal.stop()


def test_the_loops_thread_is_named_and_seen_by_profilers() -> None:
    seen: list[str] = []
    threading.setprofile(lambda frame, event, argument: seen.append(threading.current_thread().name))
    try:
        portal = Portal()
        portal.run(asyncio.sleep(0))
        portal.stop()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert "orchard-client" in seen
