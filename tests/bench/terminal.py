"""Keys that are typed into many shells at once, each by a quick typist."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any, Final

import orchard
from orchard._client.attach import Attachment

from tests.bench.measure import Figures, p50_p99

SHELLS: Final = 64
_KEY_SECONDS: Final = 0.2
"""Between two keys: sixty words a minute."""
_PROMPT: Final = b"$ "


class _Typist:
    """One shell on its terminal, and who types into it."""

    def __init__(self, process: orchard.AsyncProcess) -> None:
        self._attachment = Attachment(process.run)
        self._shown = b""
        self._changed = asyncio.Event()
        self.reading: Coroutine[Any, Any, orchard.ExecResult] = self._attachment.run(self._show)

    async def _show(self, _stream: str, data: bytes) -> None:
        self._shown += data
        self._changed.set()

    async def shows(self, size: int) -> None:
        """Wait until so many bytes were shown."""
        while len(self._shown) < size:
            self._changed.clear()
            await self._changed.wait()

    async def ready(self) -> None:
        """Wait for the prompt."""
        while not self._shown.endswith(_PROMPT):
            self._changed.clear()
            await self._changed.wait()

    async def type(self, keys: int) -> list[float]:
        """Milliseconds from each key to its echo."""
        times = []
        await asyncio.sleep(random.uniform(0, _KEY_SECONDS))
        for _ in range(keys):
            size = len(self._shown)
            started = time.perf_counter()
            await self._attachment.write(b"x")
            await self.shows(size + 1)
            times.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(_KEY_SECONDS)
        return times


async def measure(client: orchard.AsyncSandboxClient, *, keys: int) -> Figures:
    """Echoes through client, gateway, agent and the terminal's line discipline, and back."""
    async with await client.create() as sandbox:
        shell = ["sh", "-c", "PS1='$ ' exec sh -i"]
        typists = [_Typist(await sandbox.start(shell, tty=True)) for _ in range(SHELLS)]
        reading = [asyncio.ensure_future(one.reading) for one in typists]
        try:
            await asyncio.gather(*(one.ready() for one in typists))
            echoes = p50_p99([t for times in await asyncio.gather(*(one.type(keys) for one in typists)) for t in times])
        finally:
            for one in reading:
                one.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    return {"shells": SHELLS, **{f"echo_{name}": value for name, value in echoes.items()}}
