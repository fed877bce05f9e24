"""Clients that the sandboxes of a harness share: connections do not grow with samples."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import cache
from typing import Final

from orchard._client.client import AsyncSandboxClient
from orchard._client.errors import OrchardError
from orchard._client.sync import SandboxClient
from orchard._client.sync_sandbox import Sandbox


@cache
def shared_client(endpoint: str) -> SandboxClient:
    """The process's client of an endpoint ("": as SandboxClient finds it), closed at the end of the program."""
    return SandboxClient(endpoint or None)


def delete_soon(sandbox: Sandbox, pid: int) -> None:
    """Delete a sandbox that nobody refers to any more; for finalizers, which may run in any thread and must not wait.

    A forked child leaves it to its parent. What is left at the end of the program is deleted then.
    """
    if pid == os.getpid():
        threading.Thread(target=_delete, args=(sandbox,), name="orchard-harness-delete", daemon=True).start()


def _delete(sandbox: Sandbox) -> None:
    try:
        sandbox.delete()
    except (OrchardError, RuntimeError):
        # It stays tracked, and its lease ends it in the end.
        return


class LoopClients:
    """One asynchronous client for each event loop and endpoint, closed with its last user."""

    def __init__(self) -> None:
        self._clients: dict[tuple[asyncio.AbstractEventLoop, str], tuple[AsyncSandboxClient, int]] = {}

    def acquire(self, endpoint: str) -> AsyncSandboxClient:
        """The client of this event loop; every call is paired with a release()."""
        for loop, name in list(self._clients):
            if loop.is_closed():
                # It ended with users; what they left is deleted at the end of the program.
                self._clients.pop((loop, name), None)
        key = (asyncio.get_running_loop(), endpoint)
        client, users = self._clients.get(key) or (AsyncSandboxClient(endpoint or None), 0)
        self._clients[key] = (client, users + 1)
        return client

    async def release(self, endpoint: str) -> None:
        """One user less; the last one closes the client, which deletes what was left of its sandboxes."""
        key = (asyncio.get_running_loop(), endpoint)
        client, users = self._clients[key]
        if users > 1:
            self._clients[key] = (client, users - 1)
            return
        del self._clients[key]
        await client.close()


LOOP_CLIENTS: Final = LoopClients()
"""One for the process, as the SDK's own registry is: harnesses make environments without an owner above them."""
