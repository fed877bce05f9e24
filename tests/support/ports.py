"""Ports for servers that tests start, where the server cannot be asked for the one that it took."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
_reserved: Final[list[socket.socket]] = []


def free_port() -> int:
    """A port that is free, that the kernel gives to nobody who asks for any, and that is ours as long as we run.

    It stays bound here, and nothing listens: a server that sets SO_REUSEADDR, as all of ours and of others' do, can
    bind beside it. Without, it is refused, and so is another test run that looks for a free port.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    apart = [port for port in range(10_000, 65_536) if not first <= port <= last]
    while True:
        reserved = socket.socket()
        with contextlib.suppress(OSError):
            reserved.bind((HOST, random.choice(apart or [0])))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(reserved)
            return int(reserved.getsockname()[1])
        reserved.close()
