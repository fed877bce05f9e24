"""Commands with a terminal, and attaching to them."""

from __future__ import annotations

from typing import Any

from orchard.exec.v1 import exec_pb2, exec_service_pb2

from tests.integration.exec_agent.conftest import (
    BACKSTOP,
    SANDBOX,
    Client,
    spec,
)
from tests.support.attached import Attached

SIZE = exec_pb2.WindowSize(rows=33, columns=101)
READY = b"ready> "
SHELL = ("sh", "-c", "PS1='ready> ' exec sh -i")
BASH = ("env", "PS1=ready> ", "bash", "--norc", "--noprofile", "-i")


def tty(*argv: str, term: str = "", **fields: Any) -> exec_pb2.ExecSpec:
    return spec(*argv, tty=exec_pb2.Tty(size=SIZE, term=term), **fields)


def attach(client: Client, exec_id: str, command: exec_pb2.ExecSpec | None = None, *, offset: int = 0) -> Attached:
    return Attached(client.stub, client.metadata, SANDBOX, exec_id, command, offset=offset)


async def resize(client: Client, exec_id: str, rows: int, columns: int) -> exec_pb2.Exec:
    size = exec_pb2.WindowSize(rows=rows, columns=columns)
    request = exec_service_pb2.ResizePtyRequest(sandbox_id=SANDBOX, exec_id=exec_id, size=size)
    return (await client.stub.ResizePty(request, metadata=client.metadata, timeout=BACKSTOP)).exec


async def failing(attached: Attached) -> None:
    while await attached.step():
        pass
    async for _ in attached.call:
        pass
