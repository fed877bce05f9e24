"""Blocking work on local files, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `function(*args, **kwargs)`, called in a thread.

    Unlike asyncio.to_thread, a cancelled caller goes on only when the thread has let go of what it works on: its
    `finally` then closes files and iterators, and removes names, that nobody still uses. Meant for work on local files,
    which ends by itself.
    """
    call = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # seen, so that nobody reports it as forgotten
        raise
