"""A TCP proxy that can fall silent: connections stay open and nothing passes, as when a peer's machine has gone."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from tests.support.streams import Accepted


class SilentProxy:
    """Passes bytes both ways until `fall_silent`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._accepted = Accepted(self._serve)
        self._silent = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted.accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._accepted.end(self._server)

    def fall_silent(self) -> None:
        """From now on whatever comes is thrown away."""
        self._silent = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if not self._silent:
                    sink.write(data)
                    await sink.drain()
        sink.close()
