"""Handles of a sandbox whose id belongs to another sandbox by now: each is of its own sandbox and of no other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import orchard
import pytest
from orchard import AsyncSandbox, AsyncSandboxClient, SandboxClient, SandboxState

from tests.support.platform import PlatformProcess

Act: TypeAlias = Callable[[AsyncSandbox], Awaitable[object]]


async def delete(old: AsyncSandbox) -> None:
    await old.delete()


async def leave(old: AsyncSandbox) -> None:
    async with old:
        pass


async def detach(old: AsyncSandbox) -> None:
    old.detach()


async def refresh(old: AsyncSandbox) -> None:
    await old.refresh()


async def wait_ended(old: AsyncSandbox) -> None:
    await old.wait_ended(110)


async def wait_ready(old: AsyncSandbox) -> None:
    await old.wait_ready(110)


async def extend(old: AsyncSandbox) -> None:
    await old.extend(7200)


@pytest.fixture
async def own(platform: PlatformProcess) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as own:
        yield own


async def end_elsewhere(client: AsyncSandboxClient, sandbox_id: str) -> None:
    await client.delete(sandbox_id)
    await client.attach(sandbox_id).wait_ended(110)


@pytest.mark.parametrize("act", [delete, leave, detach])
@pytest.mark.parametrize("queued", [False, True])
async def test_an_old_handle_ends_nothing_of_its_successor(
    platform: PlatformProcess, aclient: AsyncSandboxClient, act: Act, queued: bool
) -> None:
    name = f"again-{act.__name__}-{queued}".lower()
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as own:
        # Queued, its uid is not known to its handle.
        old = await own.create(sandbox_id=name, wait=not queued)
        await end_elsewhere(aclient, name)
        new = await own.create(sandbox_id=name, secret_env={"TOKEN": "of the new"})
        await act(old)
        assert (await new.exec('printf %s "$TOKEN"')).stdout == "of the new"
        assert own._session.transport.secret_creates[name].request_id == new.info.request_id
    # It is deleted with its client all the same.
    assert (await aclient.attach(name).wait_ended(110)).reason == "REQUESTED"


@pytest.mark.parametrize("act", [refresh, wait_ended, wait_ready, extend])
@pytest.mark.parametrize("made_here", [True, False])
async def test_an_old_handle_says_that_its_sandbox_has_ended(
    own: AsyncSandboxClient, aclient: AsyncSandboxClient, act: Act, made_here: bool
) -> None:
    name = f"told-{act.__name__}-{made_here}".lower().replace("_", "-")
    made = await own.create(sandbox_id=name)
    old = made if made_here else await own.get(name)
    before = old.info
    await end_elsewhere(aclient, name)
    new = await aclient.create(sandbox_id=name)
    with pytest.raises(orchard.SandboxNotFound, match="another one has its id") as caught:
        await act(old)
    assert caught.value.reason == "SANDBOX_REPLACED"
    assert old.info == before
    await old.delete()
    assert (await new.refresh()).state is SandboxState.READY


async def test_a_refused_create_leaves_the_one_that_has_the_id(own: AsyncSandboxClient) -> None:
    made = await own.create(sandbox_id="refused-again", secret_env={"A": "1"})
    with pytest.raises(orchard.AlreadyExists):
        await own.create(sandbox_id="refused-again", secret_env={"A": "2"})
    assert own._session.tracks(made.made)
    assert own._session.transport.secret_creates["refused-again"].request_id == made.info.request_id


async def test_a_create_that_is_given_up_is_undone_under_an_id_that_was_used(
    platform: PlatformProcess, aclient: AsyncSandboxClient
) -> None:
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as own:
        await own.create(sandbox_id="given-up")
        await end_elsewhere(aclient, "given-up")
        creating = asyncio.ensure_future(_create(own, "given-up"))
        while not creating.done():
            with contextlib.suppress(orchard.SandboxNotFound):
                if (await aclient.get("given-up")).info.labels:
                    break
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await creating
    info = await aclient.attach("given-up").wait_ended(110)
    assert (info.labels, info.reason) == ({"number": "2"}, "REQUESTED")


async def _create(client: AsyncSandboxClient, sandbox_id: str) -> AsyncSandbox:
    return await client.create(sandbox_id=sandbox_id, labels={"number": "2"})


def test_handles_of_the_synchronous_client(platform: PlatformProcess, client: SandboxClient) -> None:
    with SandboxClient(platform.endpoint, api_key=platform.api_key) as own:
        with own.create(sandbox_id="sync-again") as old:
            client.delete("sync-again")
            client.attach("sync-again").wait_ended(110)
            new = own.create(sandbox_id="sync-again")
            with pytest.raises(orchard.SandboxNotFound):
                old.refresh()
            old.delete()
        assert new.exec("echo alive").stdout == "alive\n"
    assert client.attach("sync-again").wait_ended(110).reason == "REQUESTED"
