"""The event loop behind the synchronous client: one background thread, whatever the number of sandboxes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from typing import Any, Final, TypeVar, cast

from orchard._client.runtime import leak

T = TypeVar("T")

_CLEANUP_SECONDS: Final = 20.0
# A signal that comes just before the main thread blocks is seen only when it wakes up again.
_SIGNAL_SECONDS: Final = 0.5
_END: Final = object()


class Portal:
    """Runs coroutines on its own event loop for callers in any thread, also within notebooks' running loops, and
    after a fork.
    """

    def __init__(self) -> None:
        self._start_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            # The thread did not come along into the child; the lock may have been held by it. The loop is leaked, since
            # destroying its calls would run gRPC's inherited core.
            leak(self._loop)
            self._start_lock, self._loop, self._thread, self._pid = threading.Lock(), None, None, os.getpid()
        with self._start_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="orchard-client", daemon=True)
                self._thread.start()
                weakref.finalize(self, _stop, self._loop, os.getpid()).atexit = False
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. If the wait is interrupted (Ctrl-C), it is cancelled and has finished its
        clean-up on return.

        Raises:
            RuntimeError: called from the loop's own thread, where it would wait for itself.
        """
        loop = self._running()
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the synchronous client cannot be used from its own callbacks")
        job = _Job(work)
        slice_seconds = _SIGNAL_SECONDS if threading.current_thread() is threading.main_thread() else None
        try:
            # Within the try: Ctrl-C may come as soon as the job is on its way.
            loop.call_soon_threadsafe(job.start)
            while not job.finished.wait(slice_seconds):
                pass
        except BaseException:
            loop.call_soon_threadsafe(job.cancel)
            job.finished.wait(_CLEANUP_SECONDS)
            raise
        return cast("T", job.future.result())

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an async iterator, which is closed when the iteration is left."""
        try:
            while (item := self.run(_step(items))) is not _END:
                yield cast("T", item)
        finally:
            if isinstance(items, AsyncGenerator):
                self.run(items.aclose())

    def stop(self) -> None:
        """End the loop and its thread."""
        if self._pid != os.getpid() or self._loop is None or self._thread is None:
            return
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        loop.call_soon_threadsafe(loop.stop)
        if threading.current_thread() is not thread:
            thread.join(_CLEANUP_SECONDS)


class _Job:
    """One coroutine on the loop and the future that its caller waits for."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.finished = threading.Event()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.finished.is_set():
            self._work.close()
            self.future.set_exception(concurrent.futures.CancelledError())
            self.finished.set()

    def _done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())
        self.finished.set()


async def _step(items: AsyncIterator[Any]) -> Any:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return _END


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """End the loop of a client that was never closed and is gone."""
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
