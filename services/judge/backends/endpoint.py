"""One judge as the service uses it: its API within its bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from services.common.backoff import Backoff
from services.common.errors import ResourceExhaustedError
from services.judge.backends.base import MOST_DELAY_SECONDS, Ask, Backend, CallError, Reply
from services.judge.backends.limits import Amount, Breaker, Meter, Pace
from services.judge.backends.scripted import Scripted
from services.judge.backends.settings import JudgeSettings
from services.judge.endings import whole
from services.judge.model import Reason, Usage
from services.judge.texts import plain

_MOST_PATIENCE_SECONDS: Final = 120.0
"""How long a call may wait for an endpoint that rests; not for its own turn, which is no outage."""
_SLACK_SECONDS: Final = 5.0
_CHARACTERS_A_TOKEN: Final = 3
_TOKENS_AN_IMAGE: Final = 2000
_ILL: Final = frozenset({Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.RATE_LIMITED})

T_co = TypeVar("T_co", covariant=True)


class Keeper(Protocol[T_co]):
    """Keeps what comes of a call."""

    async def ready(self) -> None:
        """Raise where it could not be kept: the call is not made then."""

    async def answered(self, reply: Reply, seconds: float) -> T_co:
        """It was answered, after so many seconds."""

    async def failed(self) -> None:
        """It was made and gave no answer."""


class Endpoint:
    """Calls one judge: so many at once, so many a minute, none while it is ill.

    Args:
        stopping: once this is set, a call whose caller has left is given up; before, it comes to its end.
    """

    def __init__(self, settings: JudgeSettings, backend: Backend, stopping: asyncio.Event | None = None) -> None:
        self.settings = settings
        # Both go over all of the settings, and do not change.
        self.identity, self.described = settings.identity(), settings.described()
        self._backend = backend
        self._stopping = stopping
        self._waiting = 0
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._pace = Pace(settings.requests_per_minute)
        self._breaker = Breaker()
        self._quiet_until = 0.0

    def backoff(self) -> Backoff:
        """Delays between tries of one call."""
        return Backoff(self.settings.first_delay_seconds, MOST_DELAY_SECONDS)

    def most(self, ask: Ask) -> Amount:
        """What a call may take: a guess of its prompt on the safe side, and the longest answer."""
        prompt = _prompt_tokens(ask)
        return Amount(prompt + ask.max_output_tokens, self.settings.cost_usd(prompt, ask.max_output_tokens, 0))

    def usage(self, reply: Reply | None) -> Usage:
        """What one call took."""
        if reply is None:
            return Usage(calls=1, failed_calls=1)
        tokens = (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens)
        return Usage(1, 0, *tokens, self.settings.cost_usd(*tokens))

    async def ask(self, ask: Ask, meters: Sequence[Meter], keeper: Keeper[T_co]) -> T_co:
        """One call, and what `keeper` makes of its reply.

        A caller that leaves while it waits for its turn leaves the line. Once the call is made it is paid for, so it
        comes to its end, and its reply is kept, whoever has left meanwhile.

        Raises:
            CallError: it gave no answer.
            BudgetExhaustedError: it does not fit into a budget, and was not made.
            ResourceExhaustedError: too many calls wait already, and it was not made.
            UnavailableError: its reply could not be kept, and it was not made.
        """
        async with AsyncExitStack() as stack:
            spend = [await stack.enter_async_context(meter.call(self.most(ask))) for meter in meters]
            if self._waiting >= self.settings.queue:
                raise ResourceExhaustedError(
                    f"{self._waiting:,} calls wait for judge {self.settings.name!r}; retry later, or ask another judge",
                    reason="JUDGE_QUEUE_FULL",
                    judge=self.settings.name,
                    limit=self.settings.queue,
                )
            self._waiting += 1
            try:
                await stack.enter_async_context(self._slots)
                await self._wait()
            finally:
                self._waiting -= 1
            try:
                await keeper.ready()
            except BaseException:
                self._breaker.given_up()
                raise
            return await whole(self._made(ask, spend, keeper), self._stopping)

    async def _made(self, ask: Ask, spend: Sequence[Callable[[Amount], None]], keeper: Keeper[T_co]) -> T_co:
        started = time.monotonic()
        try:
            reply = await self._call(ask)
        except (CallError, asyncio.CancelledError):
            await whole(keeper.failed())
            raise
        reply = _told(ask, replace(reply, model=plain(reply.model), words=plain(reply.words)))
        used = self.usage(reply)
        for told in spend:
            told(Amount(used.tokens, used.cost_usd))
        return await whole(keeper.answered(reply, time.monotonic() - started))

    async def close(self) -> None:
        """Close connections."""
        await self._backend.close()

    async def _wait(self) -> None:
        """Until it is this call's turn and the endpoint may be called."""
        patience = _MOST_PATIENCE_SECONDS
        await self._pace.turn()
        now = asyncio.get_running_loop().time
        while delay := max(self._quiet_until - now(), 0.0) or self._breaker.wait_seconds(now()):
            patience -= delay
            if patience < 0:
                raise CallError(Reason.UNAVAILABLE, "the judge rests after failures", again=False, made=False)
            await asyncio.sleep(delay)
            # Those who rested together do not go on together.
            await self._pace.turn()

    async def _call(self, ask: Ask) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            # The client's own limit is on the pauses between bytes; a server that drips is ended here.
            async with asyncio.timeout(self.settings.timeout_seconds + _SLACK_SECONDS):
                reply = await self._backend.ask(ask)
        except TimeoutError:
            self._breaker.failed(loop.time())
            raise CallError(Reason.TIMEOUT, "the judge did not answer in time", again=True) from None
        except CallError as error:
            if error.reason in _ILL:
                self._breaker.failed(loop.time())
            else:
                self._breaker.succeeded()
            if error.retry_after_seconds:
                self._quiet_until = max(self._quiet_until, loop.time() + error.retry_after_seconds)
            raise
        except BaseException:
            self._breaker.given_up()
            raise
        self._breaker.succeeded()
        return reply


def _prompt_tokens(ask: Ask) -> int:
    return ask.prompt.characters // _CHARACTERS_A_TOKEN + _TOKENS_AN_IMAGE * len(ask.prompt.images)


def _told(ask: Ask, reply: Reply) -> Reply:
    """The reply with a guess of its tokens where its server does not tell: nothing else would ever end a budget."""
    if reply.prompt_tokens or reply.completion_tokens:
        return reply
    return replace(reply, prompt_tokens=_prompt_tokens(ask), completion_tokens=len(reply.text) // _CHARACTERS_A_TOKEN)


def make_endpoint(settings: JudgeSettings, stopping: asyncio.Event | None = None) -> Endpoint:
    """An endpoint of a configured judge; see Endpoint.

    Raises:
        SettingsError: its key is not there.
    """
    # Only what is configured is imported: the clients are an extra, and take a second to load.
    if settings.kind == "openai":
        from services.judge.backends.openai_compatible import OpenAICompatible

        return Endpoint(settings, OpenAICompatible(settings), stopping)
    if settings.kind == "anthropic":
        from services.judge.backends.anthropic_messages import AnthropicMessages

        return Endpoint(settings, AnthropicMessages(settings), stopping)
    return Endpoint(settings, Scripted(settings), stopping)
