"""Turns what the runtime says into sandbox states: the one place that probes agents and declares READY."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.hub import Hub, Subscription
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import now_ms

_log = get_logger(__name__)

DEPENDENCY: Final = "runtime"
_SILENCE_SECONDS: Final = 15.0  # three bookmark intervals of the runtime's stream
_FIRST_PROBE_SECONDS: Final = 0.002
_PROBES_AT_ONCE: Final = 32  # after a restart every agent is asked anew
# A runtime revision is multiplied so that the watcher's own findings about it have room below the next one. Each
# finding has a fixed number: two replicas that find the same thing give it the same revision.
_STEPS: Final = 4
_STEP_READY: Final = 1
_STEP_START_FAILED: Final = 2
_STEP_VANISHED: Final = 3


@dataclass(frozen=True, slots=True)
class Synced:
    """The runtime has sent everything that existed when its stream began."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A sign of life of the runtime's stream."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A sandbox as the runtime has it. The revision is the runtime's own; STARTING with an endpoint means running."""

    observed: Observed
    start_timeout_seconds: float


class Runtime(Protocol):
    """What the watcher needs of a runtime."""

    def watch(self) -> AsyncIterator[Seen | Synced | Bookmark]:
        """One stream: all sandboxes, Synced, then changes, with a Bookmark at least every 5 s.

        Raises:
            UnavailableError: the stream cannot be had or broke.
        """


class Prober(Protocol):
    """Asks an agent whether it is there."""

    async def answers(self, endpoint: str, uid: str) -> bool:
        """Whether the agent at `endpoint` answers as sandbox `uid`. Ends within a second."""


class Watcher:
    """The cache of one replica."""

    def __init__(self, runtime: Runtime, prober: Prober, health: Health, *, probe_interval_seconds: float) -> None:
        self._runtime = runtime
        self._prober = prober
        self._health = health
        self._interval = probe_interval_seconds
        self._sandboxes: dict[str, Observed] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._probe_slots = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._hub: Hub[str, Observed] = Hub()
        self._synced = False

    def subscribe(self) -> tuple[list[Observed], Subscription[str, Observed]]:
        """Everything known now, and a subscription to what changes from here on.

        Raises:
            UnavailableError: this replica has not synced, or its own source is silent.
        """
        if not self._synced:
            raise UnavailableError("this watcher has not seen the runtime yet; retry", reason="WATCHER_NOT_SYNCED")
        return list(self._sandboxes.values()), self._hub.subscribe()

    @property
    def synced(self) -> bool:
        """Whether what this replica knows is what the runtime has: its stream is open and has told everything."""
        return self._synced

    def wake(self) -> None:
        """Wake every subscriber, since the server stops."""
        self._hub.wake()

    def counts(self) -> dict[str, int]:
        """Sandboxes by state; a state without one counts 0, so that a gauge of it never keeps an old value."""
        counts = {state.name: 0 for state in (State.STARTING, State.READY, State.DELETING, State.FAILED)}
        for sandbox in self._sandboxes.values():
            counts[sandbox.state.name] += 1
        return counts

    async def run(self) -> None:
        """Follow the runtime for ever."""
        backoff = Backoff(0.05, 2.0)
        try:
            while True:
                try:
                    await self._follow(backoff)
                except UnavailableError as error:
                    await self._health.unwell(DEPENDENCY, error.message)
                except TimeoutError:
                    await self._health.unwell(DEPENDENCY, f"silent for {_SILENCE_SECONDS:g} s")
                await asyncio.sleep(backoff.next())
        finally:
            for task in self._probes.values():
                task.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _follow(self, backoff: Backoff) -> None:
        present: set[str] | None = set()
        events = self._runtime.watch()
        try:
            while True:
                async with asyncio.timeout(_SILENCE_SECONDS):
                    event = await anext(events, None)
                if event is None:
                    raise UnavailableError("the runtime's stream ended")
                if isinstance(event, Seen):
                    if present is not None:
                        present.add(event.observed.uid)
                    self._see(event)
                elif isinstance(event, Synced):
                    self._drop_absent(present or set())
                    present = None
                    self._synced = True
                    backoff.reset()
                    await self._health.well(DEPENDENCY)
        finally:
            # From here on the cache is frozen. Subscribers hear that their stream ends and keep what they have.
            self._synced = False
            self._hub.wake()
            await events.aclose()  # type: ignore[attr-defined]  # runtimes are async generators

    def _see(self, seen: Seen) -> None:
        new = replace(seen.observed, revision=seen.observed.revision * _STEPS)
        known = self._sandboxes.get(new.uid)
        if known is not None and new.revision <= known.revision:
            return
        if known is not None:
            # The runtime does not know it; whoever adds up use needs it also with the end.
            new = replace(new, ready_ms=known.ready_ms)
        if new.state is State.STARTING and new.endpoint:
            if known is not None and known.state is State.READY and known.endpoint == new.endpoint:
                self._put(replace(new, state=State.READY, revision=new.revision + _STEP_READY))
                return
            if new.uid not in self._probes:
                task = asyncio.get_running_loop().create_task(
                    self._probe(new.uid, seen.start_timeout_seconds), name=f"probe {new.uid}"
                )
                self._probes[new.uid] = task
                task.add_done_callback(lambda done: self._probed(new.uid, done))
            if known is not None and known.state is State.STARTING:
                # That its processes run is for the probe alone to know.
                self._sandboxes[new.uid] = new
                return
        self._put(new)

    def _probed(self, uid: str, task: asyncio.Task[None]) -> None:
        self._probes.pop(uid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("probe died", uid=uid, exc_info=error)

    async def _probe(self, uid: str, timeout_seconds: float) -> None:
        """Ask until the agent answers, the sandbox leaves STARTING, or the start timeout is over.

        The time counts from here: a watcher that was restarted meets sandboxes of any age in STARTING.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        delay = _FIRST_PROBE_SECONDS
        while (sandbox := self._sandboxes.get(uid)) is not None and sandbox.state is State.STARTING:
            async with self._probe_slots:
                answers = await self._prober.answers(sandbox.endpoint, uid)
            if answers:
                self._conclude(uid, _STEP_READY, lambda now: replace(now, state=State.READY, ready_ms=now_ms()))
                return
            if loop.time() - began > timeout_seconds:
                message = f"its agent did not answer within the start timeout of {timeout_seconds:g} s"
                self._conclude(
                    uid,
                    _STEP_START_FAILED,
                    lambda now, text=message: replace(  # type: ignore[misc]
                        now, state=State.FAILED, reason=Reason.AGENT_START, message=text
                    ),
                )
                return
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, self._interval)

    def _conclude(self, uid: str, step: int, change: Callable[[Observed], Observed]) -> None:
        now = self._sandboxes.get(uid)
        if now is not None and now.state is State.STARTING:
            base = now.revision - now.revision % _STEPS
            self._put(replace(change(now), revision=base + step))

    def _drop_absent(self, present: set[str]) -> None:
        for uid, known in list(self._sandboxes.items()):
            if uid not in present:
                base = known.revision - known.revision % _STEPS
                self._put(replace(known, state=State.DELETED, revision=base + _STEP_VANISHED, endpoint=""))

    def _put(self, new: Observed) -> None:
        if new.state is State.DELETED:
            self._sandboxes.pop(new.uid, None)
        else:
            self._sandboxes[new.uid] = new
        self._hub.publish(new.uid, new)
