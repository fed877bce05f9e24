"""Connections through a forwarded port."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import orchard

from tests.bench.measure import Figures, p50_p99, rss_bytes, timed
from tests.bench.processors import Processors
from tests.support.platform import PlatformProcess

MEGABYTE: Final = 1_000_000
SERVER: Final = Path(__file__).parents[1] / "support" / "port_server.py"
T = TypeVar("T")
_PORTS: Final = {"zeros": 8000, "digest": 8001, "echo": 8002}


async def measure(platform: PlatformProcess, client: orchard.AsyncSandboxClient, *, full: bool) -> Figures:
    """Bytes each way over one connection, the round trip of one byte, and how long a connection takes to open."""
    size = (10_000 if full else 1_000) * MEGABYTE
    async with await client.create(network="none") as sandbox:
        await sandbox.write_file("/srv/port_server.py", SERVER.read_bytes())
        for kind, port in _PORTS.items():
            server = await sandbox.start(["python3", "/srv/port_server.py", kind, str(port)])
            async for _ in server.output():
                break
        gateway = platform.service_pid("gateway")
        async with (
            sandbox.forward(_PORTS["zeros"]) as zeros,
            sandbox.forward(_PORTS["digest"]) as digest,
            sandbox.forward(_PORTS["echo"]) as echo,
        ):
            await _in_thread(lambda: _out(zeros, 100 * MEGABYTE))
            before, processors = rss_bytes(gateway), Processors(platform)
            out = await timed(lambda: _in_thread(lambda: _out(zeros, size)))
            cpu, growth = processors.each(size // (1000 * MEGABYTE)), rss_bytes(gateway) - before
            into = await timed(lambda: _in_thread(lambda: _into(digest, size)))
            opens, trips = await _in_thread(lambda: _exchanges(echo, 500 if full else 200))
        return {
            "megabytes_per_second": round(size / MEGABYTE / out * 1e3, 1),
            "into_megabytes_per_second": round(size / MEGABYTE / into * 1e3, 1),
            "cpu_each_gigabyte": cpu,
            "gateway_rss_growth": growth,
            "open": p50_p99(opens),
            "round_trip": p50_p99(trips),
        }


async def _in_thread(work: Callable[[], T]) -> T:
    """Local programs are no part of the client's event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _out(address: orchard.Address, size: int) -> None:
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"%d\n" % size)
        connection.shutdown(socket.SHUT_WR)
        buffer, received = bytearray(1 << 20), 0
        while count := connection.recv_into(buffer):
            received += count
    if received != size:
        raise RuntimeError(f"{received} of {size} bytes arrived")


def _into(address: orchard.Address, size: int) -> None:
    with socket.create_connection((address.host, address.port)) as connection:
        block, left = bytes(MEGABYTE), size
        while left:
            connection.sendall(block)
            left -= MEGABYTE
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1024)
    if int(answer.split()[0]) != size:
        raise RuntimeError(f"{answer!r} instead of {size}")


def _exchanges(address: orchard.Address, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of opening a connection and getting one byte back, and of one more byte."""
    opens, trips = [], []
    for _ in range(count):
        started = time.perf_counter()
        with socket.create_connection((address.host, address.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for times in (opens, trips):
                connection.sendall(b"x")
                connection.recv(1)
                times.append((time.perf_counter() - started) * 1e3)
                started = time.perf_counter()
    return opens, trips
