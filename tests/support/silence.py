"""A TCP proxy that can fall silent: connections stay open and nothing passes, as when a peer's machine has gone."""

from __future__ import annotations

import asyncio
from typing import Self


class SilentProxy:
    """Passes bytes both ways until `fall_silent`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """From now on whatever comes is thrown away."""
        self._silent = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_target = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, to_target[1]), (to_target[0], writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if not self._silent:
                    sink.write(data)
                    await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
