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
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from orchard._client import portal as subject
from orchard._client.portal import Portal

WATCHED = {Path(subject.__file__).name, Path(threading.__file__).name}


def interrupted(line: int, call: Callable[[], object]) -> bool:
    """Call it with Ctrl-C before the line-th line that runs in this thread; False: it had fewer lines."""
    lines = itertools.count()
    sent = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal sent
        if Path(frame.f_code.co_filename).name not in WATCHED:
            return None
        # Tracing stops between the body of `with` and its end, and at `try`: Python looks for signals at neither.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith(("with ", "try:")) and next(lines) == line:
            sent = True
            signal.raise_signal(signal.SIGINT)
        return trace

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(trace)
        call()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
    return sent


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
