"""Endpoints of the platform inside sandboxes without a network: `sandbox.expose`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import orchard
import pytest

from tests.support.platform import PlatformProcess, running_platform
from tests.support.streams import serving

BACKSTOP = 110.0
# Sends standard input to a port, ends its side, and prints what comes back: size and hash, or the error.
ASK = """
import hashlib, socket, sys
data = sys.stdin.buffer.read()
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as s:
        s.sendall(data * int(sys.argv[2]))
        s.shutdown(socket.SHUT_WR)
        found, size = hashlib.sha256(), 0
        while part := s.recv(1 << 18):
            found.update(part)
            size += len(part)
    print(size, found.hexdigest())
except OSError as error:
    print(type(error).__name__)
"""
BLOCK = secrets.token_bytes(100_000)


@dataclass(frozen=True)
class Offered:
    """A platform that offers two endpoints: `echo`, which a test serves at this socket, and `dead`, where nobody is."""

    platform: PlatformProcess
    echo: socket.socket


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offered]:
    with socket.socket() as echo, socket.socket() as dead:
        echo.bind(("127.0.0.1", 0))
        dead.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in (echo, dead)]
        environment = {"ORCHARD_GATEWAY_ENDPOINTS": "echo=127.0.0.1:{},dead=127.0.0.1:{}".format(*ports)}
        with running_platform(tmp_path_factory.mktemp("endpoints"), environment=environment) as platform:
            yield Offered(platform, echo)


@pytest.fixture
async def sandbox(offered: Offered) -> AsyncIterator[orchard.AsyncSandbox]:
    platform = offered.platform
    async with (
        orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client,
        await client.create(network="none") as sandbox,
    ):
        yield sandbox


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 18):
        writer.write(data)
        await writer.drain()


async def ask(sandbox: orchard.AsyncSandbox, port: int, *, times: int = 1) -> str:
    command = ["python3", "-c", ASK, str(port), str(times)]
    return (await sandbox.exec(command, input=BLOCK, concurrent=True, timeout=BACKSTOP)).check().stdout.strip()


def right(times: int = 1) -> str:
    return f"{len(BLOCK) * times} {hashlib.sha256(BLOCK * times).hexdigest()}"


async def test_an_endpoint_is_a_port_inside_a_sandbox_without_a_network(
    offered: Offered, sandbox: orchard.AsyncSandbox
) -> None:
    async with serving(echo, sock=offered.echo), sandbox.expose("echo", 8080) as address:
        assert (address.host, address.port, address.url) == ("127.0.0.1", 8080, "http://127.0.0.1:8080")
        assert await ask(sandbox, 8080) == right()
        assert await ask(sandbox, 8080, times=300) == right(300)
        assert await asyncio.gather(*(ask(sandbox, 8080) for _ in range(20))) == [right()] * 20
    async with asyncio.timeout(BACKSTOP):
        while (found := await ask(sandbox, 8080)) != "ConnectionRefusedError":
            # The agent hears of the end a moment later.
            assert found in {"ConnectionResetError", "BrokenPipeError"}


async def test_free_ports_and_taken_ones(offered: Offered, sandbox: orchard.AsyncSandbox) -> None:
    async with serving(echo, sock=offered.echo), sandbox.expose("echo") as one, sandbox.expose("echo") as other:
        assert one.port != other.port
        assert await ask(sandbox, one.port) == await ask(sandbox, other.port) == right()
        with pytest.raises(orchard.PortInUse, match=str(one.port)):
            async with sandbox.expose("echo", one.port):
                pass


async def test_only_what_the_operator_named(sandbox: orchard.AsyncSandbox) -> None:
    for name in ("llm", "127.0.0.1:22", "echo=127.0.0.1:22"):
        with pytest.raises(orchard.NotFound, match="there are dead, echo") as caught:
            async with sandbox.expose(name):
                pass
        assert caught.value.reason == "ENDPOINT_NOT_FOUND"


async def test_an_endpoint_that_does_not_answer_is_a_reset(sandbox: orchard.AsyncSandbox) -> None:
    async with sandbox.expose("dead") as address:
        assert await ask(sandbox, address.port) in {"ConnectionResetError", "BrokenPipeError"}


async def test_a_break_reaches_the_other_side(offered: Offered, sandbox: orchard.AsyncSandbox) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait("open")
        try:
            await reader.read()
            seen.put_nowait("ended")
        except ConnectionError:
            seen.put_nowait("broken")
            raise

    hold = "import socket, time; s = socket.create_connection(('127.0.0.1', 8080)); time.sleep(1000)"
    async with serving(listen, sock=offered.echo):
        async with sandbox.expose("echo", 8080):
            await sandbox.start(["python3", "-c", hold])
            assert await asyncio.wait_for(seen.get(), BACKSTOP) == "open"
        # Its connections end with the endpoint, and an end that nobody meant looks like none.
        assert await asyncio.wait_for(seen.get(), BACKSTOP) == "broken"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_outlives_gateways(offered: Offered, sandbox: orchard.AsyncSandbox, how: signal.Signals) -> None:
    platform = offered.platform
    async with serving(echo, sock=offered.echo), sandbox.expose("echo", 8080):
        assert await ask(sandbox, 8080) == right()
        stopped = platform.kill_service("gateway", how)
        await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=stopped)
        async with asyncio.timeout(BACKSTOP):
            while (found := await ask(sandbox, 8080)) != right():
                # Until the next gateway has been asked, nobody takes the connections.
                assert found in {"ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError"}


async def test_another_tenants_key_opens_nothing(offered: Offered, sandbox: orchard.AsyncSandbox) -> None:
    platform = offered.platform
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as admin:
        reader = await admin.keys.create("default", roles=(), scopes=["sandboxes:read"])
        stranger = await admin.keys.create("other", roles=["user"])
        for key, error in ((reader.secret, orchard.PermissionDenied), (stranger.secret, orchard.SandboxNotFound)):
            async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=key) as client:
                with pytest.raises(error):
                    async with client.attach(sandbox.sandbox_id).expose("echo"):
                        pass


def test_the_synchronous_client(offered: Offered) -> None:
    platform = offered.platform
    with (
        orchard.SandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client,
        client.create(network="none") as sandbox,
        sandbox.expose("echo") as address,
    ):
        listening = sandbox.exec("cat /proc/net/tcp").stdout
        assert f"0100007F:{address.port:04X}" in listening
