"""The event loop behind the synchronous client: one background thread, whatever the number of sandboxes."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Generator
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from orchard._client.runtime import leak

T = TypeVar("T")

_CLEANUP_SECONDS: Final = 20.0
# A signal that comes just before the main thread blocks is seen only when it wakes up again.
_SIGNAL_SECONDS: Final = 0.5
_END: Final = object()
# In a forked child two threads may be the first to call.
_FORKED: Final = threading.Lock()


class Portal:
    """Runs coroutines on its own event loop for callers in any thread, also within notebooks' running loops, and
    after a fork.
    """

    def __init__(self) -> None:
        self._start_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of the loop's thread: its id, and a lock that opens at its end.
        self._thread_id = 0
        self._alive = threading.Lock()
        self._open: set[AsyncGenerator[Any, Any]] = set()
        """Of this loop those that are iterated."""
        self._pid = os.getpid()

    def _hand_over(self, job: _Job) -> None:
        """Put a job on the loop, which is started if there is none."""
        self._leave_the_parents_loop()
        # Within the lock: behind the `stop` of another thread the loop would end without the job.
        with self._start_lock:
            if self._loop is None:
                self._start()
            if self._loop is not None:
                job.loop = self._loop
                self._loop.call_soon_threadsafe(job.start)

    def _leave_the_parents_loop(self) -> None:
        if self._pid == os.getpid():
            return
        with _FORKED:
            if self._pid != os.getpid():
                # The thread did not come along into the child; the lock may have been held by it. The loop is leaked,
                # since destroying its calls would run gRPC's inherited core.
                leak(self._loop)
                self._start_lock, self._loop, self._thread_id, self._open = threading.Lock(), None, 0, set()
                self._pid = os.getpid()

    def _start(self) -> None:
        loop, alive, self._open = asyncio.new_event_loop(), threading.Lock(), set()
        alive.acquire()
        try:
            # Not threading.Thread, whose start waits for an event: see _Job.
            self._thread_id = _thread.start_new_thread(_run, (loop, alive, self._open))
            self._loop, self._alive = loop, alive
        except BaseException:
            # Ctrl-C, perhaps after it was started.
            loop.call_soon_threadsafe(loop.stop)
            raise
        weakref.finalize(self, _stop, loop, os.getpid()).atexit = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. If the wait is interrupted (Ctrl-C), it is cancelled and has finished its
        clean-up on return.

        Raises:
            RuntimeError: called from the loop's own thread, where it would wait for itself.
            concurrent.futures.CancelledError: another thread has stopped the loop.
        """
        if self._is_own_thread():
            work.close()
            raise RuntimeError("the synchronous client cannot be used from its own callbacks")
        job = _Job(work)
        slice_seconds = _SIGNAL_SECONDS if threading.current_thread() is threading.main_thread() else None
        try:
            # Within the try: Ctrl-C may come as soon as the job is on its way.
            self._hand_over(job)
            while not job.wait(slice_seconds):
                pass
        except BaseException:
            if job.loop is not None:
                with suppress(RuntimeError):  # it is closed, and the job has ended with it
                    job.loop.call_soon_threadsafe(job.cancel)
                job.wait(_CLEANUP_SECONDS)
            raise
        return cast("T", job.result())

    def _is_own_thread(self) -> bool:
        return self._pid == os.getpid() and threading.get_ident() == self._thread_id

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """The items of an async iterator, which is closed when the iteration is left."""
        loop: asyncio.AbstractEventLoop | None = None
        try:
            while (item := self.run(_step(items))) is not _END:
                loop = self._loop
                if isinstance(items, AsyncGenerator):
                    self._open.add(items)
                yield cast("T", item)
        finally:
            if isinstance(items, AsyncGenerator):
                self._open.discard(items)
            # A loop that has ended has closed it, and one whose own thread throws it away does so now.
            is_there = self._loop is not None and loop in (None, self._loop) and self._pid == os.getpid()
            if isinstance(items, AsyncGenerator) and is_there and not self._is_own_thread():
                self.run(items.aclose())

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._pid != os.getpid():
            return
        with self._start_lock:
            loop, alive, thread_id = self._loop, self._alive, self._thread_id
            self._loop, self._thread_id = None, 0
        if loop is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if threading.get_ident() != thread_id and alive.acquire(timeout=_CLEANUP_SECONDS):
            alive.release()


class _Job:
    """One coroutine on the loop, and how it ended.

    Its end is a lock that opens, which is waited for in one step. Ctrl-C in the middle of `threading.Event.wait` can
    become "release unlocked lock", or leave the event locked for ever.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self.loop: asyncio.AbstractEventLoop | None = None
        """Which has it, or is about to get it."""
        self._task: asyncio.Task[Any] | None = None
        self._closed = threading.Lock()
        self._closed.acquire()
        self._has_ended = False
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self) -> None:
        if not self._has_ended:
            self._task = asyncio.get_running_loop().create_task(self._work)
            self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._has_ended:
            self._work.close()
            self._error = concurrent.futures.CancelledError()
            self._end()

    def wait(self, seconds: float | None) -> bool:
        """Wait for its end, in one thread; whether it came."""
        return self._has_ended or self._closed.acquire(timeout=-1 if seconds is None else seconds)

    def result(self) -> Any:
        """What it returned, once it has ended; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def _done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._error = concurrent.futures.CancelledError()
        elif (error := task.exception()) is not None:
            self._error = error
        else:
            self._result = task.result()
        self._end()

    def _end(self) -> None:
        # In this order: a waiter that was interrupted after it had the lock looks at the other.
        self._has_ended = True
        self._closed.release()


async def _step(items: AsyncIterator[Any]) -> Any:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END


async def _close(opened: Collection[AsyncGenerator[Any, Any]]) -> None:
    """Close what is still iterated, and with each whatever it iterates itself.

    The loop would close all of them at once, so that some are closed under those that are at work with them.
    """
    for items in list(opened):
        with suppress(Exception):  # whoever iterated it is gone
            await items.aclose()


def _run(loop: asyncio.AbstractEventLoop, alive: threading.Lock, opened: Collection[AsyncGenerator[Any, Any]]) -> None:
    try:
        # What threading.Thread does for debuggers, profilers and logs.
        if trace := threading.gettrace():
            sys.settrace(trace)
        if profile := threading.getprofile():
            sys.setprofile(profile)
        threading.current_thread().name = "orchard-client"
        asyncio.set_event_loop(loop)
        loop.run_forever()
    finally:
        try:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(_close(opened))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        finally:
            alive.release()


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End the loop of a client that was never closed and is gone."""
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
