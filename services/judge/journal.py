"""What judges answered: the texts in the object store, by hash; which of them belong to a question in the database."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from services.common.backoff import Backoff
from services.common.errors import NotFoundError, UnavailableError
from services.common.objects import ObjectNotFoundError, ObjectStore
from services.judge.asking import Kept, Place
from services.judge.backends.base import Reply
from services.judge.model import Image, Usage
from services.judge.prompting.prompts import Prompt
from services.judge.store.calls import CallStore, Owner

_TRIES: Final = 4
"""To keep an answer: it was paid for, and a store may be away for a moment."""


class Answers:
    """Raw answers and images that judges were shown, by hash."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def put(self, tenant: str, text: str) -> str:
        """Store an answer; returns its hash."""
        body = text.encode(errors="replace")
        sha256 = hashlib.sha256(body).hexdigest()
        await self._objects.put(f"answers/{tenant}/{sha256}", body)
        return sha256

    async def chunks(self, tenant: str, sha256: str) -> AsyncIterator[bytes]:
        """An answer.

        Raises:
            NotFoundError: there is none.
        """
        try:
            async for chunk in self._objects.chunks(f"answers/{tenant}/{sha256}"):
                yield chunk
        except ObjectNotFoundError:
            raise NotFoundError(f"there is no answer {sha256}", reason="ANSWER_NOT_FOUND", sha256=sha256) from None

    async def put_image(self, tenant: str, image: Image) -> None:
        """Store an image that a judge is shown."""
        name = f"images/{tenant}/{image.sha256}"
        if not await self._objects.exists(name):
            await self._objects.put(name, image.data)


class QuestionJournal:
    """The journal of one question; see asking.Journal. `kept`: what it has already."""

    def __init__(  # noqa: PLR0917
        self,
        kept: Sequence[Kept],
        store: CallStore,
        answers: Answers,
        owner: Owner,
        models: Mapping[str, str],
        clock: Callable[[], datetime],
    ) -> None:
        self._kept = kept
        self._store = store
        self._answers = answers
        self._owner = owner
        self._models = models
        self._clock = clock

    async def kept(self) -> Sequence[Kept]:
        """See Journal."""
        return self._kept

    async def text(self, kept: Kept) -> str:
        """See Journal."""
        return b"".join([chunk async for chunk in self._answers.chunks(self._owner.tenant, kept.sha256)]).decode()

    async def answered(self, place: Place, prompt: Prompt, reply: Reply, usage: Usage, latency: float) -> Kept:
        """See Journal."""
        backoff: Backoff | None = None
        for left in range(_TRIES - 1, -1, -1):
            try:
                return await self._answered(place, prompt, reply, usage, latency)
            except UnavailableError:
                if not left:
                    raise
            backoff = backoff or Backoff(0.2, 2.0)
            await asyncio.sleep(backoff.next())
        raise AssertionError  # for the type checker

    async def _answered(self, place: Place, prompt: Prompt, reply: Reply, usage: Usage, latency: float) -> Kept:
        sha256 = await self._answers.put(self._owner.tenant, reply.text)
        kept = Kept(place, prompt.ticket, sha256, reply.finish, reply.words[:1000], reply.model, usage, latency)
        await self._store.called(self._of(place), usage, self._clock().date(), kept)
        return kept

    async def failed(self, place: Place, usage: Usage) -> None:
        """See Journal."""
        if usage.calls:
            await self._store.called(self._of(place), usage, self._clock().date())

    def _of(self, place: Place) -> Owner:
        return replace(self._owner, judge=place.judge, model=self._models[place.judge])
