"""Lists that come in pages: the next page is on its way while the one before is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from orchard._client.pool import Connection
from orchard._client.transport import Transport

Page = TypeVar("Page")
Message = TypeVar("Message")
Value = TypeVar("Value")

_SEEN_SHARE: Final = 0.1
"""Of a page, before the next one is fetched: whoever looks for one of the first asks for no more."""
_TURN: Final = 8
"""After so many values others on the event loop have their turn, the next page among them."""


async def paged(
    transport: Transport,
    method: Callable[[Connection], Callable[..., Awaitable[Page]]],
    request: Any,
    messages: Callable[[Page], Sequence[Message]],
    value_of: Callable[[Message], Value],
) -> AsyncGenerator[Value, None]:
    """The values of all pages in order.

    Args:
        transport: makes the calls.
        method: a call whose request has a `page_token` and whose response has a `next_page_token`.
        request: the first page's; it is changed.
        messages: those of a page.
        value_of: makes a value of one.

    Raises:
        OrchardError: the typed error of a call's status, behind the values of the pages before.
    """

    def fetch(token: str) -> asyncio.Future[Page]:
        request.page_token = token
        return asyncio.ensure_future(transport.unary(method, request))

    coming = fetch("")
    try:
        while True:
            page: Any = await coming
            found, token = messages(page), page.next_page_token
            ahead = int(len(found) * _SEEN_SHARE)
            for place, message in enumerate(found):
                if place == ahead and token:
                    coming = fetch(token)
                if place % _TURN == 0:
                    await asyncio.sleep(0)
                yield value_of(message)
            if not token:
                return
            if not found:
                coming = fetch(token)
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
