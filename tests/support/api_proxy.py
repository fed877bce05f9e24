"""A proxy between a watcher and an API server that does harm on demand.

Speaks HTTP/1.1, in the clear to the watcher and with TLS to the API server, one request a connection, and knows the
lines of a watch. Runs on the loop of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.streams import Accepted

END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the proxy's own."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    lines: bool = False
    """The body is a watch's: chunked, and the connection ends in order after it."""


NO_ANSWER: Final = Reply(0)
"""The request is taken, and nothing comes."""


class Connection:
    """A watch that is being passed on."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Bytes of the body."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    def end(self) -> None:
        """End the body in order."""
        self._writer.write(END)
        self._writer.close()

    def abort(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()


Harm = Callable[[Connection, bytes], Awaitable[bool]]
"""Meets the next line of a watch; returns whether the line is still to be passed on."""


class ApiProxy:
    """Passes requests on until it is told otherwise."""

    def __init__(self, kubeconfig: Path) -> None:
        """Pass on to the server of this kubeconfig, with its user's token."""
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        target = urlsplit(cluster["server"])
        self._target = (target.hostname, target.port)
        self._tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._token = user["token"]
        self._open: dict[asyncio.StreamWriter, Connection] = {}
        self._accepted = Accepted(self._handle)
        self._replies: list[tuple[str, Reply]] = []
        self._harms: list[Harm] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._sent: list[bytes] = []
        self._repeat: Callable[[list[bytes]], list[bytes]] | None = None
        self.refusing = False
        self.requests: list[dict[str, str]] = []

    @asynccontextmanager
    async def running(self, kubeconfig: Path) -> AsyncIterator[None]:
        """Serve, and write a kubeconfig that leads here."""
        server = await asyncio.start_server(self._accepted.accept, "127.0.0.1", 0, limit=1 << 24)
        port = server.sockets[0].getsockname()[1]
        kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                    "users": [{"name": "watcher", "user": {"token": self._token}}],
                    "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "watcher"}}],
                    "current-context": "proxy",
                }
            )
        )
        try:
            yield
        finally:
            await self._accepted.end(server)
            await server.wait_closed()

    @property
    def watches(self) -> int:
        """How many are open."""
        return len(self._open)

    def reply(self, *replies: Reply, to: str = "") -> None:
        """Answer the next requests so: all, those of a "watch" or of a "list", or those with this parameter."""
        self._replies += [(to, reply) for reply in replies]

    def harm(self, harm: Harm) -> None:
        """Let this meet the next line of a watch."""
        self._harms.append(harm)

    def repeat(self, choose: Callable[[list[bytes]], list[bytes]]) -> None:
        """Begin the next watch that is taken up again with lines chosen from those sent so far."""
        self._repeat = choose

    def cut(self) -> None:
        """Break every connection."""
        for connection in self._open.values():
            connection.abort()
        self._accepted.cancel()

    def stall(self) -> None:
        """Pass nothing on and close nothing: half-open."""
        self._flowing.clear()

    def flow(self) -> None:
        """End a stall; what was held back goes out, late."""
        self._flowing.set()

    async def inject(self, line: bytes, *, end: bool = False) -> None:
        """Send something of our own on every open watch."""
        for connection in list(self._open.values()):
            with contextlib.suppress(OSError):  # it broke before
                await connection.send(line)
                if end:
                    connection.end()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self.refusing:
                await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        target = head.split(" ", 2)[1]
        query = {key: values[0] for key, values in parse_qs(urlsplit(target).query).items()}
        kind = "watch" if "watch" in query else "list"
        self.requests.append(query)
        await self._flowing.wait()
        for index, (wanted, reply) in enumerate(self._replies):
            if wanted in ("", kind) or wanted in query:
                del self._replies[index]
                if reply is NO_ANSWER:
                    await reader.read()  # until the client has had enough
                    return
                await _send_reply(writer, reply)
                return
        passing = asyncio.ensure_future(self._pass_on(head, kind, writer))
        gone = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            passing.cancel()
            gone.cancel()
            results = await asyncio.gather(passing, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _pass_on(self, head: str, kind: str, writer: asyncio.StreamWriter) -> None:
        lines = [line for line in head.split("\r\n") if line and not line.lower().startswith(("host:", "connection:"))]
        lines[1:1] = [f"Host: {self._target[0]}", "Connection: close"]
        far_reader, far_writer = await asyncio.open_connection(*self._target, ssl=self._tls, limit=1 << 24)
        try:
            far_writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            answer = (await far_reader.readuntil(b"\r\n\r\n")).decode()
            status, headers = _parsed(answer)
            body = _body(far_reader, headers)
            if kind == "watch" and status == 200:
                writer.write(_head(200, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}))
                connection = self._open[writer] = Connection(writer)
                if self._repeat is not None and "sendInitialEvents" not in head:
                    choose, self._repeat = self._repeat, None
                    await connection.send(b"".join(choose(self._sent)) or b"\n")
                await self._pass_lines(body, connection)
            else:
                whole = b"".join([part async for part in body])
                await self._flowing.wait()
                await _send_reply(writer, Reply(status, whole, headers))
        finally:
            far_writer.transport.abort()

    async def _pass_lines(self, body: AsyncIterator[bytes], connection: Connection) -> None:
        rest = b""
        async for part in body:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                await self._flowing.wait()
                if self._harms and not await self._harms.pop(0)(connection, line + b"\n"):
                    return
                self._sent = [*self._sent[-199:], line + b"\n"]
                await connection.send(line + b"\n")
        connection.end()


async def _send_reply(writer: asyncio.StreamWriter, reply: Reply) -> None:
    headers = {
        key: value
        for key, value in dict(reply.headers).items()
        if key.lower() not in ("transfer-encoding", "content-length", "connection")
    }
    if reply.lines:
        writer.write(_head(reply.status, {**headers, "Transfer-Encoding": "chunked"}))
        if reply.body:
            writer.write(b"%x\r\n%b\r\n" % (len(reply.body), reply.body))
        writer.write(END)
    else:
        writer.write(_head(reply.status, {**headers, "Content-Length": str(len(reply.body))}) + reply.body)
    await writer.drain()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Harm", "Connection: close", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _parsed(head: str) -> tuple[int, dict[str, str]]:
    first, *lines = head.rstrip("\r\n").split("\r\n")
    return int(first.split(" ")[1]), dict(line.split(": ", 1) for line in lines)


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    lower = {key.lower(): value for key, value in headers.items()}
    if lower.get("transfer-encoding") != "chunked":
        yield (
            await reader.readexactly(int(lower["content-length"])) if "content-length" in lower else await reader.read()
        )
        return
    while size := int(await reader.readuntil(b"\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
