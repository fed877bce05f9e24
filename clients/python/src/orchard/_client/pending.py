"""A sandbox that is being made."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

from orchard._client.sandbox import AsyncSandbox

S = TypeVar("S", bound=AsyncSandbox)


class Pending(Generic[S]):
    """A sandbox that is being made: `await` it, or use it with `async with`."""

    def __init__(self, work: Coroutine[Any, Any, S]) -> None:
        self._work = work
        self._sandbox: S | None = None

    def __await__(self) -> Generator[Any, None, S]:
        return self._work.__await__()

    async def __aenter__(self) -> S:
        self._sandbox = await self._work
        return self._sandbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sandbox is not None:
            await self._sandbox.__aexit__(kind, error, traceback)
