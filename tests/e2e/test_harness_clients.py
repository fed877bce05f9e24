"""The clients that sandboxes of a harness share."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref

import pytest
from orchard import ClientClosed, SandboxClient, SandboxState
from orchard.harness._clients import LoopClients, delete_soon

from tests.support.platform import PlatformProcess


@pytest.fixture(autouse=True)
def key(platform: PlatformProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHARD_API_KEY", platform.api_key)


async def test_last_user_closes_the_client(platform: PlatformProcess) -> None:
    clients = LoopClients()
    first = clients.acquire(platform.endpoint)
    assert clients.acquire(platform.endpoint) is first
    sandbox = await first.create()
    await clients.release(platform.endpoint)
    assert (await sandbox.exec("echo still here")).stdout == "still here\n"
    await clients.release(platform.endpoint)
    with pytest.raises(ClientClosed):
        await sandbox.exec("true")

    # The next user gets another one, and finds that nothing was left.
    second = clients.acquire(platform.endpoint)
    assert second is not first
    assert (await (await second.get(sandbox.sandbox_id)).wait_ended(110)).state is SandboxState.DELETED
    await clients.release(platform.endpoint)


def test_each_event_loop_has_its_own(platform: PlatformProcess) -> None:
    clients = LoopClients()

    async def use(*, release: bool = True) -> str:
        client = clients.acquire(platform.endpoint)
        said = (await client.version()).tenant
        if release:
            await clients.release(platform.endpoint)
        else:
            await client.close()
        return said

    # One of them ends without a release.
    assert asyncio.run(use()) == asyncio.run(use(release=False)) == asyncio.run(use())


def test_what_nobody_refers_to_is_deleted_without_a_wait(platform: PlatformProcess) -> None:
    class Environment:
        pass

    with SandboxClient(platform.endpoint) as client:
        sandbox = client.create()
        environment = Environment()
        weakref.finalize(environment, delete_soon, sandbox, os.getpid())
        del environment
        gc.collect()
        assert sandbox.wait_ended(110).state is SandboxState.DELETED

        # In a forked child it is the parent's.
        kept = client.create()
        delete_soon(kept, os.getpid() + 1)
        assert kept.exec("echo still here").stdout == "still here\n"
