"""Deletes sandboxes whose owner forgot them: at the end of the program and on SIGTERM.

SIGINT needs nothing here: Python turns it into KeyboardInterrupt, which context managers and the end of the program
take care of. SIGTERM ends Python without running either, so as long as sandboxes are tracked a handler stands in for
the default action alone. A handler of the program's own is never replaced: whoever has one decides how the program
ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Collection
from types import FrameType
from typing import Any, Final, Protocol

_log: Final = logging.getLogger("orchard")
_SECONDS: Final = 15.0


class Closable(Protocol):
    """A client with a thread of its own."""

    def close(self) -> None:
        """Close it."""


class Owner(Protocol):
    """A session, which has sandboxes to delete."""

    @property
    def tracked(self) -> Collection[Any]:
        """Them."""

    def after_fork(self) -> None:
        """In a forked child: they are the parent's."""

    async def delete_tracked_elsewhere(self, seconds: float) -> None:
        """Delete them on this event loop, whichever the session belongs to; calls are repeated so long."""


class Registry:
    """Every session of this process. One per process, as signal handlers and atexit are."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._held: dict[int, Owner] = {}
        self._clients: weakref.WeakSet[Closable] = weakref.WeakSet()
        atexit.register(self.at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def add(self, session: Owner) -> None:
        """Know a session."""
        self._sessions.add(session)

    def add_client(self, client: Closable) -> None:
        """Close this client at the end of the program, if it still lives."""
        self._clients.add(client)

    def hold(self, session: Owner) -> None:
        """Keep a session alive, since it has sandboxes to delete."""
        self._held[id(session)] = session
        self.handle_sigterm()

    def release(self, session: Owner) -> None:
        """It has none left."""
        self._held.pop(id(session), None)

    def handle_sigterm(self) -> None:
        """Take SIGTERM, if it is still Python's default and this is the main thread."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # ValueError: a subinterpreter.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        del frame
        # A second one ends the program at once.
        signal.signal(number, signal.SIG_DFL)
        self._delete_held()
        os.kill(os.getpid(), number)

    def at_exit(self) -> None:
        """Close clients that have a thread, then delete what others have left."""
        for client in list(self._clients):
            try:
                client.close()
            except Exception as error:  # noqa: BLE001 (the program ends; nobody can handle it)
                _log.warning("%s", error)
        self._delete_held()

    def _delete_held(self) -> None:
        # A copy: other threads go on with their clients meanwhile.
        sessions = [session for session in list(self._held.values()) if session.tracked]
        if not sessions:
            return
        # A thread, since this one may run an event loop, or be in the middle of a call.
        thread = threading.Thread(target=_delete, args=(sessions,), name="orchard-cleanup", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Python 3.12 and later start no threads at the end of the program; no loop runs here then.
            _delete(sessions)
            return
        thread.join(_SECONDS)

    def _after_fork(self) -> None:
        self._held = {}
        self._clients = weakref.WeakSet()
        for session in list(self._sessions):
            session.after_fork()


def _delete(sessions: list[Owner]) -> None:
    async def delete() -> None:
        asyncio.get_running_loop().set_exception_handler(_ignore_dead_loop)
        for session in sessions:
            try:
                await session.delete_tracked_elsewhere(_SECONDS / 2)
            except Exception as error:  # noqa: BLE001 (the next session's sandboxes count as much)
                _log.warning("%s", error)

    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(delete(), _SECONDS))


def _ignore_dead_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For gRPC, which polls for every loop of the process and cannot hand events to one that has ended."""
    if isinstance(context.get("exception"), RuntimeError) and "_handle_events" in str(context.get("message", "")):
        return
    loop.default_exception_handler(context)


REGISTRY: Final = Registry()
