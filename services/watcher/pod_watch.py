"""One LIST and WATCH of Pods that never ends: what to ask for next, from which version, and how long to wait before.

Knows no HTTP client. The rules are those of https://kubernetes.io/docs/reference/using-api/api-concepts/, "Efficient
detection of changes": a stream that ends is taken up again at the last version seen, and only a version that the server
has forgotten costs a new list.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.common.backoff import Backoff
from services.common.logs import get_logger
from services.watcher.model import Bookmark, Event, Interrupted, Restarted, Seen, Synced
from services.watcher.pod_lines import BrokenBodyError, Lines, decode, parse, version_of

_log = get_logger(__name__)

Json = dict[str, Any]

BOOKMARK_SECONDS: Final = 60.0
"""How often an API server sends a bookmark to who asks for them."""
SILENCE_SECONDS: Final = 3 * BOOKMARK_SECONDS
_WATCH_SECONDS: Final = (300, 600)  # apart from one another, so that no server is met by all its watchers at once
_PAGE: Final = 250
_TURN: Final = 64  # events decoded before the loop may do something else
_HEALTHY_SECONDS: Final = 120.0
_TOO_SHORT_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 300.0
_REFUSALS: Final = 3
_SILENCES: Final = 2
_INITIAL_END: Final = "k8s.io/initial-events-end"


class ConnectionLostError(Exception):
    """The server cannot be reached, or the connection broke."""

    def __init__(self, why: str, *, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent
        """Nothing came for the time given."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the watch waits for what, in seconds."""

    answer: float = 10.0
    """For an answer to begin, doubled with each attempt up to `read`: a server or proxy that took a request while it
    started or went may never answer it, and the next one at once.
    """
    read: float = 75.0
    """For bytes, before a connection is given up: above the interval of bookmarks."""
    snapshot: float = 30.0
    """The same, while everything that exists is streamed."""
    first_retry: float = 0.8
    """Before the first attempt after a failure, at most; doubled with each."""
    longest_retry: float = 30.0
    longest_reconnect: float = 5.0
    """The same while the server cannot be reached: to be asked costs it nothing then, and once it is back nothing is
    known of it until it is asked.
    """


DEFAULT_TIMING: Final = Timing()


class Answer(Protocol):
    """An HTTP response."""

    status: int
    retry_after: str
    """The header Retry-After, or empty."""

    async def body(self) -> bytes:
        """All of it. Raises ConnectionLostError where it is not whole."""

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """As it arrives. Raises ConnectionLostError where it does not end in order."""


class PodApi(Protocol):
    """The Pods of one namespace."""

    def get(
        self, query: Mapping[str, str], *, answer_seconds: float, read_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """GET them; the answer must begin within `answer_seconds`, and a wait for more ends after `read_seconds`.

        Raises:
            ConnectionLostError: there is no answer.
        """

    def forget_credentials(self) -> None:
        """Read them again before the next request: the server refused them."""


class _TroubleError(Exception):
    """The stream cannot go on as it is."""

    def __init__(
        self,
        why: str,
        *,
        relist: bool = False,
        at_once: bool = False,
        least_seconds: float = 0.0,
        refused: bool = False,
    ) -> None:
        super().__init__(why)
        self.relist = relist
        """What is known cannot be built on any more."""
        self.at_once = at_once
        """No fault, so there is nothing to wait for, unless it was the same just before."""
        self.least_seconds = least_seconds
        self.refused = refused
        """The server was reached and does not want to go on from this version."""


class PodWatch:
    """The Pods of one namespace that a selector matches."""

    def __init__(
        self,
        api: PodApi,
        project: Callable[..., Seen],
        selector: str,
        timing: Timing,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._project = project
        self._selector = selector
        self._rng = rng or random.Random()  # noqa: S311 (spreads load, guards nothing)
        self._clock = clock
        self._sleep = sleep
        self._timing = timing
        self._backoff = Backoff(timing.first_retry, timing.longest_retry, rng=self._rng)
        # Apart: a server that comes back and has one request wait must not be left alone for what it did not say.
        self._reconnects = Backoff(timing.first_retry, timing.longest_reconnect, rng=self._rng)
        self._streams_snapshots = True
        self._version = self._newest = 0
        self._answer_seconds = timing.answer
        self._hurried = False
        self._refusals = self._silences = self._stale = self._turn = 0
        self._healthy_since: float | None = None
        self.counts = dict.fromkeys(("events", "repeats", "bookmarks", "relists", "resumes", "interruptions"), 0)
        """How often each has happened."""

    async def events(self) -> AsyncGenerator[Event, None]:
        """For ever: Restarted, everything that exists, Synced, changes; and again from Restarted where it must be."""
        self._version = 0
        while True:
            if not self._version:
                yield Restarted()
            try:
                async with aclosing(self._stream()) as events:
                    async for event in events:
                        yield event
            except (_TroubleError, ConnectionLostError, BrokenBodyError) as error:
                delay = self._meet(error)
                _log.warning("the watch of Pods is interrupted", why=str(error), retry_seconds=round(delay, 2))
                yield Interrupted(str(error))
                await self._sleep(delay)

    def _meet(self, error: Exception) -> float:
        """Decide what follows a failure; returns the seconds to wait before."""
        self.counts["interruptions"] += 1
        now = self._clock()
        if self._healthy_since is not None and now - self._healthy_since >= _HEALTHY_SECONDS:
            self._backoff.reset()
            self._reconnects.reset()
            self._hurried = False
        self._healthy_since = None
        trouble = error if isinstance(error, _TroubleError) else _TroubleError(str(error))
        self._refusals = self._refusals + 1 if trouble.refused or isinstance(error, BrokenBodyError) else 0
        self._silences = self._silences + 1 if isinstance(error, ConnectionLostError) and error.silent else 0
        # A version from which nothing ever comes, such as one of before a restored backup, must not be held on to.
        if trouble.relist or self._refusals >= _REFUSALS or self._silences >= _SILENCES:
            self._version = self._refusals = self._silences = 0
        hurries, self._hurried = trouble.at_once and not self._hurried, trouble.at_once
        if hurries:
            return 0.0
        backoff = self._reconnects if isinstance(error, ConnectionLostError) else self._backoff
        return max(backoff.next(), trouble.least_seconds)

    def _stream(self) -> AsyncGenerator[Event, None]:
        """One request, or the pages of one list."""
        if self._version:
            self.counts["resumes"] += 1
            return self._watch({"resourceVersion": str(self._version)}, initial=False)
        self.counts["relists"] += 1
        if not self._streams_snapshots:
            return self._list()
        return self._watch({"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}, initial=True)

    @asynccontextmanager
    async def _get(self, query: Mapping[str, str]) -> AsyncGenerator[Answer, None]:
        """Ask, and wait the longer for an answer the more often none came."""
        patience, self._answer_seconds = self._answer_seconds, min(self._answer_seconds * 2, self._timing.read)
        async with self._api.get(query, answer_seconds=patience, read_seconds=self._timing.read) as answer:
            self._answer_seconds = self._timing.answer
            yield answer

    async def _list(self) -> AsyncGenerator[Event, None]:
        version, token = 0, ""
        while True:
            query = {"labelSelector": self._selector, "limit": str(_PAGE), **({"continue": token} if token else {})}
            async with self._get(query) as answer:
                body = await answer.body()
                if answer.status != 200:
                    raise self._refused(answer, body)
            page = parse(body)
            if page.get("kind") != "PodList" or not isinstance(page.get("items") or [], list):
                raise BrokenBodyError("an answer that is no list of Pods")
            version = version or version_of(page)
            yield Bookmark()
            for pod in page.get("items") or []:
                if self._turn_is_over():
                    await asyncio.sleep(0)
                yield self._seen(pod)
            token = page["metadata"].get("continue") or ""
            if not token:
                self._begin_from(version)
                yield Synced(version)
                return

    async def _watch(self, start: Mapping[str, str], *, initial: bool) -> AsyncGenerator[Event, None]:
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._rng.randint(*_WATCH_SECONDS)),
            **start,
        }
        async with self._get(query) as answer:
            if answer.status != 200:
                raise self._refused(answer, await answer.body(), initial=initial)
            began = self._clock()
            if not initial:
                self._healthy_since = self._healthy_since or began
                yield Bookmark(self._version)  # it was taken up again: nothing is missing
            lines = Lines()
            async with aclosing(answer.chunks()) as chunks:
                while chunk := await (self._chunk_of_snapshot(chunks) if initial else anext(chunks, b"")):
                    for line in lines.feed(chunk):
                        if self._turn_is_over():
                            await asyncio.sleep(0)
                        event = self._read(line, initial=initial)
                        if isinstance(event, Synced):
                            initial = False
                            self._healthy_since = self._clock()
                        if event is not None:
                            yield event
            lines.end()
        if initial:
            raise _TroubleError("the stream ended before everything was sent")
        if self._clock() - began < _TOO_SHORT_SECONDS:
            raise _TroubleError("the server ended the stream at once")

    async def _chunk_of_snapshot(self, chunks: AsyncGenerator[bytes, None]) -> bytes:
        """The next piece of the body, while everything that exists is streamed; none at its end."""
        try:
            async with asyncio.timeout(self._timing.snapshot):
                return await anext(chunks, b"")
        except TimeoutError:
            # A server that does not know sendInitialEvents sends what it has and then waits for changes.
            self._streams_snapshots = False
            why = (
                f"the server does not end its initial events within {self._timing.snapshot:g} s; it is asked for lists"
            )
            raise _TroubleError(why, relist=True, at_once=True) from None

    def _read(self, line: bytes, *, initial: bool) -> Event | None:
        """One event of a watch; None for what is known already."""
        kind, thing = decode(line)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            if thing.get("kind") != "Pod":
                raise BrokenBodyError(f"an event of a {thing.get('kind')!r}, not of a Pod")
            version = version_of(thing)
            if not initial and version <= self._version:
                # Sent again, as after a proxy's retry. Taken for new, it could bring back what is gone.
                self.counts["repeats"] += 1
                return None
            # Events come in the order of versions.
            seen = self._seen(thing, removed=kind == "DELETED", complete_revision=0 if initial else version)
            if not initial:
                self._version = self._newest = version  # only now: what could not be read must be sent again
            self._refusals = self._silences = 0
            self.counts["events"] += 1
            return seen
        if kind == "BOOKMARK":
            return self._bookmark(thing, initial=initial)
        if kind == "ERROR":
            raise _error_event(thing)
        raise BrokenBodyError(f"an event of unknown type {kind!r}")

    def _seen(self, pod: Json, *, removed: bool = False, complete_revision: int = 0) -> Seen:
        try:
            return self._project(pod, removed=removed, complete_revision=complete_revision)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BrokenBodyError(f"a Pod of unknown form: {error!r}") from error

    def _bookmark(self, thing: Json, *, initial: bool) -> Event:
        version = version_of(thing)
        self._refusals = self._silences = 0
        self.counts["bookmarks"] += 1
        if not initial:
            self._version = self._newest = max(self._version, version)
            return Bookmark(self._version)
        if (thing["metadata"].get("annotations") or {}).get(_INITIAL_END) != "true":
            self._streams_snapshots = False
            raise _TroubleError(
                "the server does not send initial events; it is asked for lists", relist=True, at_once=True
            )
        self._begin_from(version)
        return Synced(version)

    def _begin_from(self, version: int) -> None:
        """A snapshot is whole."""
        if version < self._newest:
            # It would undo what came after it. A server that went back for good, as to a backup, is believed at last.
            self._stale += 1
            if self._stale <= _REFUSALS:
                raise _TroubleError(f"a snapshot at version {version}, older than {self._newest}", relist=True)
            _log.error("the API server's versions went back", version=version, before=self._newest)
        self._stale = 0
        self._version = self._newest = version

    def _turn_is_over(self) -> bool:
        """Whether other tasks must run now, however fast events come."""
        self._turn = (self._turn + 1) % _TURN
        return not self._turn

    def _refused(self, answer: Answer, body: bytes, *, initial: bool = False) -> _TroubleError:
        """What an answer other than 200 means."""
        why = f"HTTP {answer.status}{_message_of(body)}"
        if answer.status == 401:
            self._api.forget_credentials()
            return _TroubleError(why)
        if answer.status == 410:
            return _TroubleError(why, relist=True, at_once=True)
        if initial and answer.status in (400, 422):
            self._streams_snapshots = False
            return _TroubleError(f"{why}; the server is asked for lists", relist=True, at_once=True)
        temporary = answer.status == 429 or answer.status >= 500 or answer.status == 403
        return _TroubleError(why, least_seconds=_seconds_of(answer.retry_after), refused=not temporary)


def _error_event(status: Json) -> _TroubleError:
    """What a Status sent as an event means."""
    code, reason = status.get("code"), status.get("reason")
    why = f"ERROR event {code}: {status.get('message', reason)}"
    if code == 410 or reason in ("Expired", "Gone"):
        return _TroubleError(why, relist=True, at_once=True)
    details = status.get("details")
    seconds = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return _TroubleError(why, least_seconds=_seconds_of(str(seconds or "")), refused=code != 429)


def _seconds_of(retry_after: str) -> float:
    """The seconds of a Retry-After, which API servers give as a number; 0 without one."""
    try:
        return min(max(float(retry_after), 0.0), _LONGEST_RETRY_SECONDS)
    except ValueError:
        return 0.0


def _message_of(body: bytes) -> str:
    """The message of a Status, and nothing of an HTML page."""
    try:
        message = parse(body).get("message")
    except BrokenBodyError:
        return ""
    return f": {str(message)[:300]}" if message else ""
