"""Runs the scripts of lua/: those that are asked for while others are under way go together, in one round trip.

Under load a round trip costs the scheduler more than the script itself; alone, a script is sent at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis.asyncio as redis
from redis.exceptions import NoScriptError

_FOLDER: Final = Path(__file__).parent / "lua"
_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 4 << 20  # a spec may have 3 MiB

Argument = str | bytes | int


class _Asked(NamedTuple):
    """One run of a script that somebody waits for."""

    script: str
    arguments: Sequence[Argument]
    answer: asyncio.Future[Any]


class Scripts:
    """The scripts, on one server."""

    def __init__(self, client: redis.Redis, *, limit_seconds: float) -> None:
        """Use `client`; a round trip may take `limit_seconds`."""
        self._redis = client
        self._limit_seconds = limit_seconds
        prelude = (_FOLDER / "prelude.lua").read_text()
        self._texts = {
            path.stem: prelude + path.read_text() for path in _FOLDER.glob("*.lua") if path.stem != "prelude"
        }
        self._names = {
            name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in self._texts.items()
        }
        self._waiting: deque[_Asked] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Give up what is under way, and what waits."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        # Of a task that had not begun nothing runs, its `finally` neither.
        self._give_up(self._waiting)

    async def run(self, script: str, *arguments: Argument) -> Any:
        """What a script returns.

        Raises:
            RedisError, OSError, TimeoutError: what the round trip met; the script may have run.
        """
        asked = _Asked(script, arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="run scripts")
        return await asked.answer

    async def _send_all(self) -> None:
        batch: list[_Asked] = []
        try:
            while batch := self._next_batch():
                await self._send(batch)
        finally:
            self._sending = None
            self._give_up(batch)

    def _give_up(self, asked: Iterable[_Asked]) -> None:
        for one in asked:
            one.answer.cancel()

    def _next_batch(self) -> list[_Asked]:
        """What is asked for and still waited for, as much as one round trip may take."""
        batch: list[_Asked] = []
        size = 0
        while self._waiting and len(batch) < _AT_ONCE and size < _BYTES_AT_ONCE:
            asked = self._waiting.popleft()
            if not asked.answer.done():
                batch.append(asked)
                size += sum(len(part) for part in asked.arguments if not isinstance(part, int))
        return batch

    async def _send(self, batch: Sequence[_Asked]) -> None:
        try:
            async with asyncio.timeout(self._limit_seconds):
                answers = await self._evaluate([("EVALSHA", self._names[one.script], one.arguments) for one in batch])
                unknown = [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
                if unknown:
                    # A server that has just started knows none. What it refused so did not run.
                    asked = [batch[place] for place in unknown]
                    again = await self._evaluate([("EVAL", self._texts[one.script], one.arguments) for one in asked])
                    answers = [*answers]
                    for place, answer in zip(unknown, again, strict=True):
                        answers[place] = answer
        except Exception as error:  # noqa: BLE001 (whoever waits for an answer is told)
            answers = [error] * len(batch)
        for one, answer in zip(batch, answers, strict=True):
            if one.answer.done():
                continue
            if isinstance(answer, Exception):
                one.answer.set_exception(answer)
            else:
                one.answer.set_result(answer)

    async def _evaluate(self, runs: Sequence[tuple[str, str, Sequence[Argument]]]) -> list[Any]:
        """The answer to each, which may be an error of the server's."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command, script, arguments in runs:
                pipeline.execute_command(command, script, 0, *arguments)
            return await pipeline.execute(raise_on_error=False)
