from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
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


@dataclass
class Running:
    """A command's output: what it writes goes through `write`; `wrote` is what was taken of it."""

    pump: OutputPump
    spool: Spool
    write: int

    async def takes(self, size: int) -> bool:
        """Whether so many bytes more are taken, rather than held up."""
        end = self.spool.end + size
        left = size
        while left and not self.pump.is_held_up:
            left -= os.write(self.write, bytes(min(left, 4096)))
            for _ in range(20):
                await asyncio.sleep(0)
            if not self.pump.drain():
                break
        return self.spool.end >= end


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    waits, folder = Waits(), os.open(tmp_path, os.O_RDONLY)
    spool = Spool(SpoolStore(folder, 1 << 20, Log()), "e-1", CAPACITY_FLOOR)
    read, write = os.pipe2(os.O_CLOEXEC)
    pump = OutputPump(waits, spool, {read: 1}, 0, lambda: None)
    # Small enough that a full pipe is no matter.
    pump._read_size = 4096
    yield Running(pump, spool, write)
    os.close(write)
    pump.close()
    waits.close()
    spool.remove()
    os.close(folder)


def at(offset: int) -> Follower:
    follower = Follower()
    follower.offset = offset
    return follower


SENT = 2 * CAPACITY_FLOOR
UNREAD = CAPACITY_FLOOR // 2


async def cut_off(running: Running) -> None:
    """One was sent SENT bytes of as many."""
    follower = at(1 << 40)
    running.pump.follow(follower)
    assert await running.takes(SENT)
    follower.offset = SENT
    running.pump.leave(follower)
    running.pump.leave(follower)


async def test_what_a_follower_was_sent_last_is_still_there_however_far_it_is_behind(running: Running) -> None:
    follower = at(0)
    running.pump.follow(follower)
    for offset in range(0, 4 * CAPACITY_FLOOR, 5000):
        follower.offset = offset
        running.pump.follower_moved()
        await running.takes(CAPACITY_FLOOR)
        assert running.spool.start <= max(0, offset - UNREAD)


async def test_a_follower_that_was_cut_off_finds_what_it_was_sent_last_and_all_since(running: Running) -> None:
    await cut_off(running)
    assert not await running.takes(CAPACITY_FLOOR)
    assert running.spool.start <= SENT - UNREAD
    back = at(running.spool.start)
    running.pump.follow(back)
    assert running.pump.is_held_up, "it has read nothing yet"
    back.offset = running.spool.end
    running.pump.follower_moved()
    assert not running.pump.is_held_up


@pytest.mark.parametrize("offset", [0, SENT - CAPACITY_FLOOR - 1, SENT + 1])
async def test_another_follower_does_not_take_its_place(running: Running, offset: int) -> None:
    await cut_off(running)
    other = at(offset)
    running.pump.follow(other)
    other.offset = 1 << 40
    assert not await running.takes(CAPACITY_FLOOR)


async def test_its_place_is_not_kept_for_ever(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PLACE_SECONDS", 0.01)
    await cut_off(running)
    assert not await running.takes(CAPACITY_FLOOR)
    async with asyncio.timeout(BACKSTOP):
        while running.pump.is_held_up:
            await asyncio.sleep(0.001)
    assert await running.takes(CAPACITY_FLOOR)


async def test_places_are_bounded(running: Running) -> None:
    for number in range(1000):
        follower = at(2 * number * CAPACITY_FLOOR)  # none takes the place of another
        running.pump.follow(follower)
        running.pump.leave(follower)
    assert len(running.pump._places) == 32


async def test_one_that_was_given_up_has_no_place(running: Running) -> None:
    follower = at(0)
    running.pump.follow(follower)
    follower.lagging = True
    running.pump.leave(follower)
    assert await running.takes(2 * CAPACITY_FLOOR)


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
    unread = bytes(UNREAD + 1)
    os.write(write, unread)
    while spool.end < len(unread):
        pump._read(read)
    assert not pump.drain(), "the next bytes may be more than there is room for"
    await asyncio.wait_for(follower.given_up.wait(), BACKSTOP)
    assert pump.drain()
    os.write(write, b" and more")
    os.close(write)
    pump.on_eof = (ended := asyncio.Event()).set
    await asyncio.wait_for(ended.wait(), BACKSTOP)
    assert spool.end == len(unread + b" and more")
    waits.close()
    spool.remove()
    os.close(folder)
