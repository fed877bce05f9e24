"""Ctrl-C and its like, noted instead of raised wherever the program happens to be, so that what runs is stopped."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A person who asks that often wants out, whatever is left behind.
_PATIENCE: Final = 3
# For the clean-up of what was hurried away: it may well find nobody any more who would answer it.
_LEAVE_SECONDS: Final = 5.0


class Interrupts:
    """While it is entered, the first signal ends what runs at its next safe point, and a later one hurries the end."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._former: dict[signal.Signals, Any] = {}
        self._cancel: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None
        self.hurry: Callable[[], None] | None = None
        """What a signal calls when everything has been cancelled: it takes away what the rest would still clean up."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Started with nohup, it is to outlive its terminal.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What the shell gives a program that such a signal ended; 0 before there was one."""
        return 128 + self._received[0] if self._received else 0

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self._received:
            raise KeyboardInterrupt

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Like asyncio.run; a signal cancels `work`, which becomes KeyboardInterrupt once it has cleaned up."""

        async def cancellable() -> T:
            loop = asyncio.get_running_loop()
            task, left = asyncio.ensure_future(work), asyncio.Event()
            leaving = asyncio.ensure_future(left.wait())

            def cancel() -> None:
                self._cancel = None
                loop.call_soon_threadsafe(task.cancel)

            def leave() -> None:
                loop.call_soon_threadsafe(loop.call_later, _LEAVE_SECONDS, left.set)

            self._cancel, self._leave = cancel, leave
            try:
                self.check()
                await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise KeyboardInterrupt
                return await task
            except asyncio.CancelledError:
                self.check()
                raise
            finally:
                self._cancel = self._leave = None
                leaving.cancel()
                task.cancel()

        return asyncio.run(cancellable())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received.append(number)
        if len(self._received) > _PATIENCE:
            raise KeyboardInterrupt
        if self._cancel is not None:
            self._cancel()
        elif self.hurry is not None:
            self.hurry()
            if self._leave is not None:
                self._leave()
