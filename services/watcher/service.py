"""Turns what the runtime says into sandbox states: the one place that probes agents and declares READY."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.hub import Hub, Subscription
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import now_ms
from services.watcher.model import Bookmark, GiveUp, Interrupted, Prober, Restarted, Runtime, Seen, Synced

_log = get_logger(__name__)

DEPENDENCY: Final = "runtime"
SILENCE_SECONDS: Final = 15.0
"""Three bookmark intervals of the node daemon's stream."""
_FIRST_PROBE_SECONDS: Final = 0.002
_EAGER_SECONDS: Final = 5.0
_SLOW_PROBE_SECONDS: Final = 0.5  # of what is not known to run for longer than that, as while an image is pulled
_PROBES_PER_SECOND: Final = 2500.0  # of all together, so that a thousand starts leave time for their events
_PROBES_AT_ONCE: Final = 32  # after a restart every agent is asked anew
# A runtime revision is multiplied so that the watcher's own findings about it have room below the next one. Each
# finding has a fixed number: two replicas that find the same thing give it the same revision.
_STEPS: Final = 4
_STEP_READY: Final = 1
_STEP_START_FAILED: Final = 2
_STEP_VANISHED: Final = 3


_PLACES: Final = {field.name: place for place, field in enumerate(fields(Observed))}
_VALUES: Final = attrgetter(*_PLACES)


@dataclass(slots=True)
class _Probe:
    """The asking of one agent."""

    task: asyncio.Task[None]
    timeout_seconds: float
    running_since: float | None
    """By the loop's clock."""


class Watcher:
    """The cache of one replica.

    Not SERVING once the runtime's stream shows no sign of life for `silence_seconds`, three of its bookmark intervals.
    """

    def __init__(
        self,
        runtime: Runtime,
        prober: Prober,
        health: Health,
        *,
        probe_interval_seconds: float,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._runtime = runtime
        self._prober = prober
        self._health = health
        self._interval = probe_interval_seconds
        self._silence = silence_seconds
        self._sandboxes: dict[str, Observed] = {}
        self._probes: dict[str, _Probe] = {}
        self._probe_slots = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._give_ups: dict[str, tuple[GiveUp, asyncio.TimerHandle]] = {}
        self._hub: Hub[str, Observed] = Hub()
        self._synced = False
        self._complete = 0
        self._heard: float | None = None
        self._why = ""

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

    @property
    def complete_revision(self) -> int:
        """Everything up to this revision, as those of sandboxes, is known here and has been published."""
        return self._complete * _STEPS + _STEPS - 1 if self._complete else 0

    def wake(self) -> None:
        """Wake every subscriber, since the server stops."""
        self._hub.wake()

    def counts(self) -> dict[str, int]:
        """Sandboxes by state; a state without one counts 0, so that a gauge of it never keeps an old value."""
        counts = {state.name: 0 for state in (State.STARTING, State.READY, State.DELETING, State.FAILED)}
        for sandbox in list(self._sandboxes.values()):  # metrics are read in another thread
            counts[sandbox.state.name] += 1
        return counts

    def lag(self) -> dict[str, int]:
        """Milliseconds since the runtime's stream last showed a sign of life; nothing before the first."""
        if self._heard is None:
            return {}
        return {"runtime": int((time.monotonic() - self._heard) * 1000)}

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
                    why = f": {self._why}" if self._why else ""
                    await self._health.unwell(DEPENDENCY, f"silent for {self._silence:g} s{why}")
                await asyncio.sleep(backoff.next())
        finally:
            for uid in list(self._give_ups):
                self._forget_timer(uid)
            tasks = [probe.task for probe in self._probes.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, backoff: Backoff) -> None:
        present: set[str] | None = set()
        loop = asyncio.get_running_loop()
        events = self._runtime.watch()
        try:
            async with asyncio.timeout(self._silence) as limit:
                set_at = time.monotonic()
                async for event in events:
                    now = time.monotonic()
                    if not isinstance(event, (Interrupted, Restarted)):
                        self._heard, self._why = now, ""
                        if now - set_at > self._silence / 16:
                            limit.reschedule(loop.time() + self._silence)
                            set_at = now
                    if isinstance(event, Seen):
                        if present is not None:
                            present.add(event.observed.uid)
                        self._see(event)
                    elif isinstance(event, Restarted):
                        present = set()
                    elif isinstance(event, Interrupted):
                        await self._interrupted(event)
                    elif isinstance(event, Synced):
                        self._drop_absent(present or set())
                        present = None
                        self._synced = True
                        backoff.reset()
                        await self._health.well(DEPENDENCY)
                    if isinstance(event, (Seen, Synced, Bookmark)) and present is None:
                        self._complete = max(self._complete, event.complete_revision)
            raise UnavailableError("the runtime's stream ended")
        finally:
            # From here on the cache is frozen. Subscribers hear that their stream ends and keep what they have.
            self._synced = False
            self._hub.wake()
            await events.aclose()  # type: ignore[attr-defined]  # runtimes are async generators

    async def _interrupted(self, event: Interrupted) -> None:
        self._why = event.why
        if not self._synced:
            await self._health.unwell(DEPENDENCY, event.why)

    def _see(self, seen: Seen) -> None:
        new = seen.observed
        uid, revision = new.uid, new.revision * _STEPS
        known = self._sandboxes.get(uid)
        if known is None:
            if not new.sandbox_id:
                return  # the end of what was never known
            new = _changed(new, revision=revision)
        elif revision <= known.revision:
            return
        else:
            new = _carried_on(known, new, revision)
        self._set_timer(uid, seen.give_up if new.state is State.STARTING else None)
        if new.state is State.STARTING:
            if new.endpoint:
                self._ask(seen)
            if (
                known is not None
                and new.endpoint
                and (known.state, known.reason, known.message) == (new.state, new.reason, new.message)
            ):
                # That its processes run is for the probe alone to know.
                self._sandboxes[uid] = new
                return
        self._put(new)

    def _set_timer(self, uid: str, give_up: GiveUp | None) -> None:
        known = self._give_ups.get(uid)
        if (known[0] if known is not None else None) == give_up:
            return
        self._forget_timer(uid)
        if give_up is not None:
            seconds = max(0.0, (give_up.at_ms - now_ms()) / 1000)
            timer = asyncio.get_running_loop().call_later(seconds, self._give_up, uid, give_up)
            self._give_ups[uid] = (give_up, timer)

    def _give_up(self, uid: str, give_up: GiveUp) -> None:
        self._give_ups.pop(uid, None)
        self._fail(uid, give_up.reason, give_up.message)

    def _fail(self, uid: str, reason: Reason, message: str) -> None:
        self._conclude(
            uid, _STEP_START_FAILED, lambda now: replace(now, state=State.FAILED, reason=reason, message=message)
        )

    def _ask(self, seen: Seen) -> None:
        """See to it that the agent is asked."""
        uid = seen.observed.uid
        loop = asyncio.get_running_loop()
        probe = self._probes.get(uid)
        if probe is None or probe.task.done():
            task = loop.create_task(self._probe(uid), name=f"probe {uid}")
            probe = self._probes[uid] = _Probe(task, seen.start_timeout_seconds, None)
            task.add_done_callback(lambda done: self._probed(uid, done))
        if seen.running and probe.running_since is None:
            # The time counts from here: a watcher that was restarted meets sandboxes of any age in STARTING.
            probe.running_since = loop.time()

    def _probed(self, uid: str, task: asyncio.Task[None]) -> None:
        if (probe := self._probes.get(uid)) is not None and probe.task is task:
            del self._probes[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("probe died", uid=uid, exc_info=error)

    async def _probe(self, uid: str) -> None:
        """Ask until the agent answers, there is none to ask any more, or the start timeout is over."""
        loop = asyncio.get_running_loop()
        probe = self._probes[uid]
        began = loop.time()
        delay = _FIRST_PROBE_SECONDS
        while (
            (sandbox := self._sandboxes.get(uid)) is not None and sandbox.state is State.STARTING and sandbox.endpoint
        ):
            async with self._probe_slots:
                version = await self._prober.answers(sandbox.endpoint, uid)
            if version is not None:
                self._conclude(
                    uid,
                    _STEP_READY,
                    lambda now, version=version: replace(  # type: ignore[misc]
                        now,
                        state=State.READY,
                        ready_ms=now_ms(),
                        reason=Reason.UNSPECIFIED,
                        message="",
                        agent_version=version,
                    ),
                )
                return
            if probe.running_since is not None and loop.time() - probe.running_since > probe.timeout_seconds:
                waited = f"{probe.timeout_seconds:g} s"
                self._fail(uid, Reason.AGENT_START, f"its agent did not answer within the start timeout of {waited}")
                return
            await asyncio.sleep(max(delay, len(self._probes) / _PROBES_PER_SECOND))
            eager = probe.running_since is not None or loop.time() - began < _EAGER_SECONDS
            delay = min(delay * 1.5, self._interval if eager else _SLOW_PROBE_SECONDS)

    def _conclude(self, uid: str, step: int, change: Callable[[Observed], Observed]) -> None:
        now = self._sandboxes.get(uid)
        if now is not None and now.state is State.STARTING:
            self._forget_timer(uid)
            base = now.revision - now.revision % _STEPS
            self._put(replace(change(now), revision=base + step))

    def _drop_absent(self, present: set[str]) -> None:
        for uid, known in list(self._sandboxes.items()):
            if uid not in present:
                self._forget_timer(uid)
                base = known.revision - known.revision % _STEPS
                gone = replace(known, state=State.DELETED, reason=Reason.UNSPECIFIED, message="")
                self._put(_carried_on(known, gone, base + _STEP_VANISHED))

    def _forget_timer(self, uid: str) -> None:
        if (known := self._give_ups.pop(uid, None)) is not None:
            known[1].cancel()

    def _put(self, new: Observed) -> None:
        if new.state is State.DELETED:
            self._sandboxes.pop(new.uid, None)
        else:
            self._sandboxes[new.uid] = new
        self._hub.publish(new.uid, new)


def _carried_on(known: Observed, new: Observed, revision: int) -> Observed:
    """What the runtime says now, with what it does not know or does not say again."""
    if not new.sandbox_id:
        new = replace(known, state=new.state, reason=new.reason, message=new.message)
    # Whoever adds up use needs the time of READY also with the end.
    changes: dict[str, Any] = {"revision": revision, "ready_ms": known.ready_ms}
    if new.state is State.STARTING and known.state is State.FAILED:
        # It was given up on: an end is an end, also where the runtime goes on trying.
        changes.update(state=State.FAILED, revision=revision + _STEP_START_FAILED)
        changes.update(reason=known.reason, message=known.message, endpoint="")
    elif new.state is State.STARTING and known.state is State.READY and new.endpoint in ("", known.endpoint):
        changes.update(state=State.READY, revision=revision + _STEP_READY)
        changes.update(reason=Reason.UNSPECIFIED, message="", endpoint=known.endpoint)
    elif new.state in (State.DELETING, State.DELETED):
        changes.update(endpoint="")
        if new.reason is Reason.UNSPECIFIED and known.state in (State.FAILED, State.DELETING):
            # A consumer may be told of the last change alone.
            changes.update(reason=known.reason, message=known.message)
    return _changed(new, **changes)


def _changed(seen: Observed, **changes: Any) -> Observed:
    """As dataclasses.replace, in half the time: every event of a runtime passes here."""
    values = list(_VALUES(seen))
    for name, value in changes.items():
        values[_PLACES[name]] = value
    return Observed(*values)
