"""One judge as the service uses it: its API within its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from services.common.backoff import Backoff
from services.judge.backends.base import Ask, Backend, CallError, Reply
from services.judge.backends.limits import Amount, Breaker, Meter, Pace
from services.judge.backends.scripted import Scripted
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason, Usage

_MOST_PATIENCE_SECONDS: Final = 120.0
"""How long a call may wait for an endpoint that rests or has a limit of calls."""
_SLACK_SECONDS: Final = 5.0
_CHARACTERS_A_TOKEN: Final = 3
_TOKENS_AN_IMAGE: Final = 2000
_MOST_DELAY_SECONDS: Final = 60.0
_ILL: Final = frozenset({Reason.UNAVAILABLE, Reason.TIMEOUT, Reason.RATE_LIMITED})


class Endpoint:
    """Calls one judge: so many at once, so many a minute, none while it is ill."""

    def __init__(self, settings: JudgeSettings, backend: Backend) -> None:
        self.settings = settings
        self._backend = backend
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._pace = Pace(settings.requests_per_minute)
        self._breaker = Breaker()
        self._quiet_until = 0.0

    def backoff(self) -> Backoff:
        """Delays between tries of one call."""
        return Backoff(self.settings.first_delay_seconds, _MOST_DELAY_SECONDS)

    def most(self, ask: Ask) -> Amount:
        """What a call may take: a guess of its prompt on the safe side, and the longest answer."""
        prompt = ask.prompt.characters // _CHARACTERS_A_TOKEN + _TOKENS_AN_IMAGE * len(ask.prompt.images)
        return Amount(prompt + ask.max_output_tokens, self.settings.cost_usd(prompt, ask.max_output_tokens, 0))

    def usage(self, reply: Reply | None) -> Usage:
        """What one call took."""
        if reply is None:
            return Usage(calls=1, failed_calls=1)
        tokens = (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens)
        return Usage(1, 0, *tokens, self.settings.cost_usd(*tokens))

    async def ask(self, ask: Ask, meters: Sequence[Meter]) -> Reply:
        """One call.

        Raises:
            CallError: it gave no answer.
            BudgetExhaustedError: it does not fit into a budget, and was not made.
        """
        async with AsyncExitStack() as stack:
            spend = [await stack.enter_async_context(meter.call(self.most(ask))) for meter in meters]
            await stack.enter_async_context(self._slots)
            await self._wait()
            reply = await self._call(ask)
            used = self.usage(reply)
            for told in spend:
                told(Amount(used.tokens, used.cost_usd))
            return reply

    async def close(self) -> None:
        """Close connections."""
        await self._backend.close()

    async def _wait(self) -> None:
        """Until the endpoint may be called."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + _MOST_PATIENCE_SECONDS
        delay = self._pace.delay(loop.time())
        while delay := max(delay, self._quiet_until - loop.time(), 0.0) or self._breaker.wait_seconds(loop.time()):
            if delay > patience - loop.time():
                raise CallError(Reason.UNAVAILABLE, "the judge rests after failures", again=False, made=False)
            await asyncio.sleep(max(delay, 0.001))
            delay = 0.0

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
                pause = min(error.retry_after_seconds, _MOST_DELAY_SECONDS)
                self._quiet_until = max(self._quiet_until, loop.time() + pause)
            raise
        except BaseException:
            self._breaker.given_up()
            raise
        self._breaker.succeeded()
        return reply


def make_endpoint(settings: JudgeSettings) -> Endpoint:
    """An endpoint of a configured judge.

    Raises:
        SettingsError: its key is not there.
    """
    # Only what is configured is imported: the clients are an extra, and take a second to load.
    if settings.kind == "openai":
        from services.judge.backends.openai_compatible import OpenAICompatible

        return Endpoint(settings, OpenAICompatible(settings))
    if settings.kind == "anthropic":
        from services.judge.backends.anthropic_messages import AnthropicMessages

        return Endpoint(settings, AnthropicMessages(settings))
    return Endpoint(settings, Scripted(settings))
