"""What an agent does not have yet is UNIMPLEMENTED, and a command that needs it does not run without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orchard
import pytest
from orchard import AsyncSandbox, ForwardEvent, Sandbox, Terminal

from tests.integration.skew.conftest import BACKSTOP, OLDEST_AGENT, only

pytestmark = only(OLDEST_AGENT)

MARK = "echo ran >> /tmp/ran-without; cat"


@pytest.mark.parametrize(
    "call",
    [
        lambda sandbox: sandbox.start(MARK, stdin=True),
        lambda sandbox: sandbox.start(MARK, tty=Terminal(rows=30, columns=90)),
        lambda sandbox: sandbox.exec(MARK, input=bytes(3 << 20)),
        lambda sandbox: list(sandbox.exec_stream(MARK, input=bytes(3 << 20))),
    ],
    ids=["stdin", "terminal", "long-input", "streamed-input"],
)
def test_a_command_with_input_does_not_run_without_it(sandbox: Sandbox, call: Callable[[Sandbox], object]) -> None:
    with pytest.raises(orchard.Unimplemented, match="earlier version"):
        call(sandbox)
    assert not sandbox.exists("/tmp/ran-without")


async def test_forwards_say_so(asandbox: AsyncSandbox) -> None:
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    async with asandbox.forward(9, on_event=events.put_nowait) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        async with asyncio.timeout(BACKSTOP):
            while not isinstance((await events.get()).error, orchard.Unimplemented):
                pass
