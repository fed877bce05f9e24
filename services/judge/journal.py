"""What judges answered: the texts by hash, in the object store in the end; which are of a question in the database."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from services.common.backoff import Backoff
from services.common.errors import NotFoundError, UnavailableError
from services.common.logs import get_logger
from services.common.objects import ObjectNotFoundError, ObjectStore
from services.judge.asking import Kept, Place
from services.judge.backends.base import Reply
from services.judge.model import Image, Usage, Verdict
from services.judge.prompting.prompts import Prompt
from services.judge.store.calls import Call, CallStore, Owner
from services.judge.store.endings import Ending, EndingStore
from services.judge.store.texts import TextStore, WaitingText
from services.judge.texts import plain

_log = get_logger(__name__)


async def _always() -> None:
    """Nothing is to be made sure of."""


_MOST_WAITING: Final = 20_000
"""Texts: a judge that answers at once fills more in a minute than are moved. Beyond it each is put there at once, for a
quarter more of the processor than a verdict takes otherwise."""
_MOST_WAITING_BYTES: Final = 256 << 20
_LONG_BYTES: Final = 64 << 10
_TOGETHER: Final = 200
_GATHERING_SECONDS: Final = 1.0
_MANY: Final = 50
"""Texts in that time: while as many come, they wait on, until half of those wait that may. To move one takes an eighth
of the processor that a verdict takes, and nobody waits for it."""
_LOOK_SECONDS: Final = 30.0
_KEEP_SECONDS: Final = 120.0
"""How long an answer is tried to be kept: it was paid for, and a store that fails over is away for a while."""
_STOPPING_SECONDS: Final = 2.0
"""The same, once the service stops."""

T = TypeVar("T")


class Answers:
    """Raw answers and images that judges were shown, by hash.

    Texts wait in the database, where they are journalled, for their way to the object store: a verdict need not. Where
    many wait they are put there at once, as long ones are.

    Args:
        stopping: once this is set, what no store takes is soon given up.
        gathering: waits so many seconds for more texts to come.
    """

    def __init__(
        self,
        objects: ObjectStore,
        texts: TextStore,
        stopping: asyncio.Event | None = None,
        *,
        gathering: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._objects = objects
        self._texts = texts
        self._stopping = stopping or asyncio.Event()
        self._gathering = gathering
        self._waiting = 0
        self._waiting_bytes = 0
        self._unkept = 0
        self._arrived = asyncio.Event()
        self.are_stuck = False
        """Texts could not be moved at the last look."""

    async def put(self, tenant: str, sha256: str, body: bytes) -> None:
        """Store an answer."""
        await self._objects.put(_name(tenant, sha256), body)

    def may_wait(self, text: str, body: bytes) -> bool:
        """Whether it may be journalled with its text, and moved from there."""
        return not self._is_full and len(body) <= _LONG_BYTES and plain(text) == text

    def check(self) -> None:
        """Whether another answer could be kept.

        Raises:
            UnavailableError: it would be paid for and perhaps lost.
        """
        if self._unkept:
            why = "the database does not take the answers of judges"
        elif self.are_stuck and self._is_full:
            why = "the object store does not take the answers of judges, and the database holds as many as it may"
        else:
            return
        raise UnavailableError(f"{why}; no judge is asked until it does; retry", reason="ANSWERS_NOT_KEPT")

    async def kept(self, keep: Callable[[], Awaitable[T]]) -> T:
        """What `keep` gives, which is repeated for minutes while a store is away.

        So are no more answers than there are calls at once: each has the place of its call meanwhile.

        Raises:
            UnavailableError: it still is, or the service stops.
        """
        loop, unkept = asyncio.get_running_loop(), 0
        backoff: Backoff | None = None
        end = loop.time() + _KEEP_SECONDS
        try:
            while True:
                try:
                    return await keep()
                except UnavailableError as error:
                    if loop.time() >= end:
                        raise
                    if not unkept and error.reason == "DATABASE_UNAVAILABLE":
                        unkept = 1
                        self._unkept += 1
                if self._stopping.is_set():
                    end = min(end, loop.time() + _STOPPING_SECONDS)
                backoff = backoff or Backoff(0.2, 2.0)
                await asyncio.sleep(backoff.next())
        finally:
            self._unkept -= unkept

    def waits(self, size: int) -> None:
        """One more was journalled so, of so many bytes."""
        self._waiting += 1
        self._waiting_bytes += size
        self._arrived.set()

    async def move(self) -> None:
        """Move texts for ever; those too that a replica left behind when it died."""
        while True:
            await self._due()
            self._arrived.clear()
            try:
                while texts := await self._texts.some(_TOGETHER):
                    await self._move(texts)
                self._waiting, self._waiting_bytes, self.are_stuck = 0, 0, False
            except UnavailableError as error:
                self.are_stuck = True
                _log.warning("answers wait in the database", why=error.message)

    async def _due(self) -> None:
        """Wait until texts are to be moved: they have come and few come now, or many wait, or it is time to look."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._arrived.wait()
        except TimeoutError:
            return
        while True:
            before = self._waiting
            await self._gathering(_GATHERING_SECONDS)
            if self._waiting - before < _MANY or self._is_filled(0.5):
                return

    def _is_filled(self, share: float) -> bool:
        """Whether so much waits of what may."""
        return self._waiting >= share * _MOST_WAITING or self._waiting_bytes >= share * _MOST_WAITING_BYTES

    @property
    def _is_full(self) -> bool:
        """Whether as many wait as may."""
        return self._is_filled(1.0)

    async def _move(self, texts: Sequence[WaitingText]) -> None:
        bodies = {_name(one.tenant, one.sha256): one.text.encode() for one in texts}
        failed = await self._objects.put_all(bodies)
        if moved := [text for text in texts if _name(text.tenant, text.sha256) not in failed]:
            await self._texts.moved(moved)
        for error in failed.values():
            raise error

    async def chunks(self, tenant: str, sha256: str) -> AsyncIterator[bytes]:
        """An answer.

        Raises:
            NotFoundError: there is none.
        """
        if (text := await self._texts.get(tenant, sha256)) is not None:
            yield text.encode()
            return
        try:
            async for chunk in self._objects.chunks(_name(tenant, sha256)):
                yield chunk
        except ObjectNotFoundError:
            raise NotFoundError(f"there is no answer {sha256}", reason="ANSWER_NOT_FOUND", sha256=sha256) from None

    async def put_image(self, tenant: str, image: Image) -> None:
        """Store an image that a judge is shown."""
        name = f"images/{tenant}/{image.sha256}"
        if not await self._objects.exists(name):
            await self._objects.put(name, image.data)


def _name(tenant: str, sha256: str) -> str:
    return f"answers/{tenant}/{sha256}"


class Closing(NamedTuple):
    """Ends a question with its answer, where that is its only one: both are durable at once, by one write.

    Attributes:
        ending_of: reads an answer with its prompt; None where that does not end the question.
    """

    endings: EndingStore
    ending_of: Callable[[Prompt, Kept, str], Ending | None]


class QuestionJournal:
    """The journal of one question; see asking.Journal.

    Args:
        kept: what it has already.
        sure: raises where nothing more may be asked.
        closing: of a question that one answer may end.
    """

    def __init__(  # noqa: PLR0917
        self,
        kept: Sequence[Kept],
        store: CallStore,
        answers: Answers,
        owner: Owner,
        models: Mapping[str, str],
        clock: Callable[[], datetime],
        sure: Callable[[], Awaitable[None]] = _always,
        closing: Closing | None = None,
    ) -> None:
        self._kept = kept
        self._store = store
        self._answers = answers
        self._owner = owner
        self._models = models
        self._clock = clock
        self._sure = sure
        self._closing = closing
        self.verdict: Verdict | None = None
        """That was stored with the answer that it comes from."""

    async def kept(self) -> Sequence[Kept]:
        """See Journal."""
        return self._kept

    async def text(self, kept: Kept) -> str:
        """See Journal."""
        return b"".join([chunk async for chunk in self._answers.chunks(self._owner.tenant, kept.sha256)]).decode()

    async def ready(self) -> None:
        """See Journal."""
        self._answers.check()
        await self._sure()

    async def answered(self, place: Place, prompt: Prompt, reply: Reply, usage: Usage, latency: float) -> Kept:
        """See Journal."""
        body = reply.text.encode(errors="replace")
        sha256 = hashlib.sha256(body).hexdigest()
        kept = Kept(place, prompt.ticket, sha256, reply.finish, reply.words[:1000], reply.model, usage, latency)
        ending = self._ending(prompt, kept, reply.text)
        return await self._answers.kept(lambda: self._answered(kept, reply.text, body, ending))

    def _ending(self, prompt: Prompt, kept: Kept, text: str) -> Ending | None:
        try:
            return self._closing.ending_of(prompt, kept, text) if self._closing else None
        except Exception as error:  # noqa: BLE001 (first the answer is kept, then whoever reads it again is told)
            _log.error("an answer could not be read before it was kept", exc_info=error)
            return None

    async def _answered(self, kept: Kept, text: str, body: bytes, ending: Ending | None) -> Kept:
        waiting = text if self._answers.may_wait(text, body) else None
        if waiting is None:
            await self._answers.put(self._owner.tenant, kept.sha256, body)
        call = Call(self._of(kept.place), kept.usage, self._clock().date(), kept, waiting)
        if ending is None or not await self._ended(replace(ending, call=call)):
            await self._store.called(call.owner, call.usage, call.day, kept, waiting)
        if waiting is not None:
            self._answers.waits(len(body))
        return kept

    async def _ended(self, ending: Ending) -> bool:
        """Whether answer and verdict are stored together; not, where the database takes no such verdict."""
        assert self._closing is not None  # noqa: S101 (for the type checker)
        try:
            await self._closing.endings.add(ending)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 (the answer was paid for: it is kept alone)
            _log.error("a verdict could not be stored", exc_info=error)
            return False
        self.verdict = ending.verdict
        return True

    async def failed(self, place: Place, usage: Usage) -> None:
        """See Journal."""
        if usage.calls:
            await self._store.called(self._of(place), usage, self._clock().date())

    def _of(self, place: Place) -> Owner:
        return replace(self._owner, judge=place.judge, model=self._models[place.judge])
