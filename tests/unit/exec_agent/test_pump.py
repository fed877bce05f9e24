from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.exec_agent import pump as subject
from services.exec_agent.model import Chunk
from services.exec_agent.pump import OutputPump
from services.exec_agent.spool import CAPACITY_FLOOR, Spool
from services.exec_agent.spools import SpoolStore
from services.exec_agent.waits import Waits

BACKSTOP = 110.0


class Log:
    """Notes nothing."""

    def output(self, exec_id: str, chunk: Chunk) -> None:
        pass

    def lost(self, exec_id: str, end: int) -> None:
        pass


class Follower:
    """Reads nothing, and knows when it is given up."""

    def __init__(self) -> None:
        self.offset = 0
        self.given_up = asyncio.Event()

    @property
    def lagging(self) -> bool:
        return self.given_up.is_set()

    @lagging.setter
    def lagging(self, lagging: bool) -> None:
        if lagging:
            self.given_up.set()


async def test_a_dead_follower_holds_nothing_up_for_ever_where_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has ended, its pipe is empty, and a child of it holds that open."""
    monkeypatch.setattr(subject, "STALL_SECONDS", 0.01)
    waits, folder = Waits(), os.open(tmp_path, os.O_RDONLY)
    spool = Spool(SpoolStore(folder, 1 << 20, Log()), "e-1", CAPACITY_FLOOR)
    read, write = os.pipe2(os.O_CLOEXEC)
    pump = OutputPump(waits, spool, {read: 1}, 0, lambda: None)
    follower = Follower()
    pump.followers.add(follower)
    os.write(write, b"unread")
    while spool.end == 0:
        pump._read(read)
    assert not pump.drain(), "the next bytes may be as many as are kept"
    await asyncio.wait_for(follower.given_up.wait(), BACKSTOP)
    assert pump.drain()
    os.write(write, b" and more")
    os.close(write)
    pump.on_eof = (ended := asyncio.Event()).set
    await asyncio.wait_for(ended.wait(), BACKSTOP)
    assert spool.end == len(b"unread and more")
    waits.close()
    spool.remove()
    os.close(folder)
