"""What breaks on the way must not change what the caller sees."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import orchard
import pytest
from orchard import AsyncSandbox, AsyncSandboxClient, ExecEnd, Sandbox, SandboxClient
from orchard._client.transport import Retry

from tests.integration.client.proxy import Proxy
from tests.support.platform import PlatformProcess

COUNTED = "echo run >> /tmp/{name}; for i in $(seq 1 40); do seq $i 20000; sleep 0.02; done"


def counted_output() -> bytes:
    return b"".join(f"{n}\n".encode() for i in range(1, 41) for n in range(i, 20001))


async def test_output_is_byte_exact_though_every_megabyte_cuts_the_connection(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    proxy.cut_after(500_000)
    result = await sandbox.exec(COUNTED.format(name="cut-1"), concurrent=True)
    proxy.cut_after(None)
    assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(counted_output()).digest()
    assert proxy.cuts >= 5
    assert await asandbox.read_text("/tmp/cut-1") == "run\n"


async def test_a_stream_goes_on_where_it_was(shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    proxy.cut_after(400_000)
    data = b""
    stream = sandbox.exec_stream(COUNTED.format(name="cut-2"), concurrent=True)
    async for chunk in stream:
        assert chunk.offset == len(data)
        data += chunk.data
    proxy.cut_after(None)
    assert data == counted_output()
    assert stream.result.ok
    assert await asandbox.read_text("/tmp/cut-2") == "run\n"


async def test_a_file_comes_whole_though_no_connection_carries_a_whole_message(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    content = os.urandom(3_000_000)
    await asandbox.write_file("/tmp/cut-file", content)
    proxy.cut_after(300_000)
    assert await shaky.attach(asandbox.sandbox_id).read_file("/tmp/cut-file") == content
    proxy.cut_after(None)
    assert proxy.cuts >= 5


async def test_a_lost_first_answer_does_not_run_the_command_again(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    await sandbox.exec("true")
    proxy.drop_next_answer()
    result = await sandbox.exec("echo run >> /tmp/cut-3; echo done", concurrent=True)
    assert result.stdout == "done\n"
    assert proxy.cuts == 1
    assert await asandbox.read_text("/tmp/cut-3") == "run\n"


async def test_an_outage_within_the_budget_is_waited_out(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    await sandbox.exec("true")
    task = asyncio.create_task(sandbox.exec("touch /tmp/cut-4; until test -e /tmp/go-4; do sleep 0.02; done; echo ok"))
    while not await asandbox.exists("/tmp/cut-4"):
        await asyncio.sleep(0.02)
    proxy.refuse(True)
    await asandbox.write_file("/tmp/go-4", "")
    await asyncio.sleep(1.0)  # the outage itself, not a wait for something
    assert not task.done()
    proxy.refuse(False)
    assert (await task).stdout == "ok\n"


async def test_a_long_outage_ends_as_unavailable(
    platform: PlatformProcess, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    async with AsyncSandboxClient(proxy.endpoint, api_key=platform.api_key, retry_timeout=5.0) as client:
        sandbox = client.attach(asandbox.sandbox_id)
        await sandbox.exec("true")
        proxy.refuse(True)
        with pytest.raises(orchard.SandboxUnavailable) as caught:
            await asyncio.wait_for(sandbox.stat("/"), 110)
        assert caught.value.attempts > 1
        assert caught.value.message.startswith(f"Orchard at {proxy.endpoint} answers no more (")


async def test_calls_go_by_connections_that_work(
    proxy: Proxy, platform: PlatformProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot connect again is idle all the time, and gets nothing to do for it."""
    monkeypatch.setattr("orchard._client.pool.STREAMS_PER_CONNECTION", 1)
    async with AsyncSandboxClient(proxy.endpoint, api_key=platform.api_key, retry_timeout=0) as client:
        await asyncio.gather(*(client.version() for _ in range(3)))
        connections = client._session.transport._pool._connections
        assert len(connections) == 3
        proxy.cut_first()
        async with asyncio.timeout(110):
            while not any(connection.is_broken for connection in connections):
                for connection in connections:
                    connection.channel.get_state(try_to_connect=True)
                await asyncio.sleep(0.01)  # gRPC tells of it by a thread of its own
        # Of those that are idle the first in line is taken.
        connections.sort(key=lambda connection: not connection.is_broken)
        for _ in range(50):
            await client.version()


async def test_nobody_there_fails_soon_and_says_what_to_do() -> None:
    async with AsyncSandboxClient("127.0.0.1:1", api_key="none", retry_timeout=3600) as client:
        with pytest.raises(orchard.Unavailable, match="orchard up") as caught:
            await asyncio.wait_for(client.version(), 110)
    assert caught.value.reason == "UNREACHABLE"


async def test_a_create_that_was_never_sent_leaves_nothing_to_delete(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncSandboxClient("127.0.0.1:1", api_key="none") as client:
        with pytest.raises(orchard.Unavailable) as caught:
            await client.create()
        assert caught.value.reason == "UNREACHABLE"
        assert not client._session.tracked
    assert "could not be deleted" not in caplog.text


async def test_a_create_whose_answer_never_came_is_deleted_all_the_same(
    shaky: AsyncSandboxClient, aclient: AsyncSandboxClient, proxy: Proxy
) -> None:
    await shaky.version()
    shaky._session.transport.retry = lambda: Retry(0.0)  # type: ignore[method-assign]
    proxy.drop_next_answer()
    with pytest.raises(orchard.Unavailable):
        await shaky.create(labels={"test": "unanswered"})
    async with asyncio.timeout(110):
        while [info async for info in aclient.list(labels={"test": "unanswered"})]:
            await asyncio.sleep(0.05)


async def test_a_lost_answer_to_create_makes_one_sandbox(
    shaky: AsyncSandboxClient, aclient: AsyncSandboxClient, proxy: Proxy
) -> None:
    await shaky.version()
    proxy.drop_next_answer()
    async with shaky.create(labels={"test": "lost-create"}) as sandbox:
        assert proxy.cuts >= 1
        found = [info.sandbox_id async for info in aclient.list(labels={"test": "lost-create"})]
        assert found == [sandbox.sandbox_id]


async def test_uploads_and_downloads_go_through(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy, tmp_path: Path
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    content = os.urandom(6_000_000)
    (tmp_path / "in").write_bytes(content)
    await sandbox.stat("/")
    proxy.drop_next_answer()
    await sandbox.upload(tmp_path / "in", "/tmp/up.bin")
    assert proxy.cuts == 1
    proxy.cut_after(1_500_000)
    await sandbox.download("/tmp/up.bin", tmp_path / "out")
    proxy.cut_after(None)
    assert proxy.cuts >= 3
    assert (tmp_path / "out").read_bytes() == content


PATCH = "--- a/f.txt\n+++ b/f.txt\n@@ -1 +1 @@\n-old\n+new\n"


async def test_a_patch_whose_answer_was_lost_counts_as_applied(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    await sandbox.write_file("/tmp/patched/f.txt", "old\n")
    proxy.drop_next_answer()
    result = await sandbox.apply_patch(PATCH, path="/tmp/patched")
    assert proxy.cuts == 1
    assert result.applied
    assert await sandbox.read_text("/tmp/patched/f.txt") == "new\n"


async def test_removing_and_moving_survive_a_lost_answer(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    await sandbox.write_file("/tmp/moved/a", "x")
    proxy.drop_next_answer()
    await sandbox.move("/tmp/moved/a", "/tmp/moved/b")
    proxy.drop_next_answer()
    await sandbox.remove("/tmp/moved/b")
    assert proxy.cuts == 2
    assert await sandbox.list_directory("/tmp/moved") == []


async def test_cancelling_during_an_outage_still_ends_the_command(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    task = asyncio.create_task(sandbox.exec("touch /tmp/cut-5; sleep 300", exec_id="outage-1", concurrent=True))
    while not await asandbox.exists("/tmp/cut-5"):
        await asyncio.sleep(0.02)
    proxy.refuse(True)
    task.cancel()
    asyncio.get_running_loop().call_later(0.5, lambda: setattr(proxy, "_refusing", False))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asandbox.process("outage-1").wait(110)).ended is ExecEnd.KILLED


def test_a_gateway_killed_in_the_middle_of_a_command(platform: PlatformProcess, client: SandboxClient) -> None:
    with client.create() as sandbox:
        killed = False
        data = b""
        for chunk in sandbox.exec_stream(COUNTED.format(name="killed")):
            data += chunk.data
            if not killed and len(data) > 1_000_000:
                killed = True
                pid = platform.kill_service("gateway")
        assert killed
        assert hashlib.sha256(data).digest() == hashlib.sha256(counted_output()).digest()
        platform.wait_ready("gateway", not_pid=pid)
        assert sandbox.read_text("/tmp/killed") == "run\n"


def test_a_gateway_killed_before_the_result(platform: PlatformProcess, sandbox: Sandbox) -> None:
    command = "echo first; until test -e /tmp/go-killed; do sleep 0.02; done; echo second"
    stream = sandbox.exec_stream(command, concurrent=True)
    seen = ""
    for chunk in stream:
        seen += chunk.text
        if seen == "first\n":
            platform.wait_ready("gateway", not_pid=platform.kill_service("gateway"))
            sandbox.write_file("/tmp/go-killed", "")
    assert seen == "first\nsecond\n"


@pytest.mark.parametrize("source", ["bytes", "file"])
async def test_an_upload_goes_on_where_a_connection_broke(
    proxy: Proxy, shaky: AsyncSandboxClient, sandbox: Sandbox, tmp_path: Path, source: str
) -> None:
    """What was sent before is not sent again, so that a file of any size gets through a connection that never lasts."""
    content = os.urandom(40 << 20)
    name = f"/tmp/resumed-{source}"
    proxy.cut_after_sent(16 << 20)
    box = shaky.attach(sandbox.sandbox_id)
    if source == "bytes":
        assert await box.write_file(name, content) == len(content)
    else:
        (tmp_path / "large").write_bytes(content)
        told: list[int] = []
        await box.upload(tmp_path / "large", name, progress=lambda done, _all: told.append(done))
        assert told[-1] == len(content)
    proxy.cut_after_sent(None)
    assert proxy.cuts >= 2
    # Each cut loses what was under way, a few MiB.
    assert proxy.sent < 3 * len(content), "it began again each time"
    assert sandbox.read_file(name) == content
    sandbox.remove(name)


@pytest.mark.parametrize("way", ["exec", "exec_stream"])
async def test_a_command_that_was_quiet_for_longer_than_outages_are_waited_for(
    proxy: Proxy, platform: PlatformProcess, sandbox: Sandbox, way: str
) -> None:
    """Its connection breaks after a silence that is longer than the client's patience; the outage itself is short."""
    async with AsyncSandboxClient(proxy.endpoint, api_key=platform.api_key, retry_timeout=6) as client:
        box = client.attach(sandbox.sandbox_id)
        quiet = "sleep 10; echo at last"

        async def run() -> str:
            if way == "exec":
                return (await box.exec(quiet, concurrent=True)).stdout
            return "".join([chunk.text async for chunk in box.exec_stream(quiet, concurrent=True)])

        running = asyncio.ensure_future(run())
        await asyncio.sleep(8)
        proxy.cut()
        assert await running == "at last\n"
