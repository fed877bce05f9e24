"""How an agent that was started before its sandbox was asked for is told what it is.

A memory file with the fields of AgentConfig travels over a socket: however large they are, the daemon never waits.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any


def channel() -> tuple[socket.socket, socket.socket]:
    """The daemon's end and the agent's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def tell(channel: socket.socket, fields: Mapping[str, Any]) -> None:
    """Tell the agent its fields and close the channel.

    Raises:
        OSError: the agent has ended.
    """
    with channel:
        memory = os.memfd_create("fields")
        try:
            os.write(memory, json.dumps(fields).encode())
            os.lseek(memory, 0, os.SEEK_SET)
            socket.send_fds(channel, [b"1"], [memory])
        finally:
            os.close(memory)


def wait(channel: socket.socket) -> dict[str, Any] | None:
    """Wait for the fields; None: the daemon has ended or wants none of it."""
    with channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return None
    with open(descriptors[0], "rb") as file:  # noqa: PTH123 (a descriptor)
        fields: dict[str, Any] = json.loads(file.read())
    return fields
