"""Connections through a forwarded port."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import Final

import orchard

from tests.bench.measure import Figures, p50_p99, rss_bytes, timed
from tests.bench.processors import Processors
from tests.support.platform import PlatformProcess

MEGABYTE: Final = 1_000_000
SERVER: Final = Path(__file__).parents[1] / "support" / "port_server.py"
_PORTS: Final = {"zeros": 8000, "count": 8001, "echo": 8002}

_PROGRAM: Final = """
import socket, sys
host, port, direction, size = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
with socket.create_connection((host, port)) as connection:
    if direction == "out":
        connection.sendall(b"%d\\n" % size)
        connection.shutdown(socket.SHUT_WR)
        buffer, received = bytearray(1 << 20), 0
        while count := connection.recv_into(buffer):
            received += count
    else:
        block = bytes(1_000_000)
        for _ in range(size // len(block)):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        received = int(connection.recv(1024))
sys.exit(received != size)
"""


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
            sandbox.forward(_PORTS["count"]) as count,
            sandbox.forward(_PORTS["echo"]) as echo,
        ):
            await _transfer(zeros, "out", 100 * MEGABYTE)
            before, processors = rss_bytes(gateway), Processors(platform)
            out = await timed(lambda: _transfer(zeros, "out", size))
            cpu, growth = processors.each(size // (1000 * MEGABYTE)), rss_bytes(gateway) - before
            into = await timed(lambda: _transfer(count, "into", size))
            opens, trips = await asyncio.to_thread(_exchanges, echo, 500 if full else 200)
        return {
            "megabytes_per_second": round(size / MEGABYTE / out * 1e3, 1),
            "into_megabytes_per_second": round(size / MEGABYTE / into * 1e3, 1),
            "cpu_each_gigabyte": cpu,
            "gateway_rss_growth": growth,
            "open": p50_p99(opens),
            "round_trip": p50_p99(trips),
        }


async def _transfer(address: orchard.Address, direction: str, size: int) -> None:
    """By a program of its own: in this process it would stand in the way of the client."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, address.host, str(address.port), direction, str(size)
    )
    if await program.wait() != 0:
        raise RuntimeError(f"{size} bytes did not arrive ({direction})")


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
