"""Starting, collecting and restarting real processes."""

import asyncio
import io
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.local.stores.command import Command
from services.local.supervisor.children import Child, Children
from services.local.supervisor.output import Output
from services.local.supervisor.unit import Report, Unit, UnitSpec
from tests.support.platform import ROOT

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def shell(text: str) -> Command:
    return Command(("/bin/sh", "-c", text), ENVIRONMENT)


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    children = Children()
    yield children
    await children.close()


async def test_output_and_exit_code_arrive(children: Children) -> None:
    lines: list[str] = []
    code, printed = await children.run(shell("echo secret; echo note >&2; exit 3"), lines.append, seconds=20)
    assert (code, printed, lines) == (3, b"secret\n", ["note"])


async def test_a_command_that_takes_too_long_is_killed(children: Children) -> None:
    with pytest.raises(TimeoutError):
        await children.run(Command(("/bin/sleep", "1000"), {}), print, seconds=0.05)
    assert not children._own


async def test_a_program_that_is_not_there_is_an_error(children: Children) -> None:
    with pytest.raises(FileNotFoundError):
        await children.start(Command(("/no/such/program",), {}), print)


async def test_ending_escalates(children: Children) -> None:
    lines: list[str] = []
    child = await children.start(shell("trap '' TERM; echo ready; while :; do sleep 1000; done"), lines.append)
    while not lines:
        await asyncio.sleep(0.005)
    assert not await child.end([(signal.SIGTERM, 0.05)])
    assert await child.end([(signal.SIGTERM, 0.05), (signal.SIGKILL, 20.0)])
    assert child.exited.result() == -signal.SIGKILL
    # Signals to one that has ended do nothing.
    child.signal(signal.SIGKILL)


async def test_a_hurry_cuts_the_patience_short(children: Children) -> None:
    lines: list[str] = []
    child = await children.start(shell("trap '' TERM; echo ready; while :; do sleep 1000; done"), lines.append)
    while not lines:
        await asyncio.sleep(0.005)
    hurry = asyncio.Event()
    ending = asyncio.ensure_future(child.end([(signal.SIGTERM, 1000.0), (signal.SIGKILL, 20.0)], hurry=hurry))
    await asyncio.sleep(0)
    hurry.set()
    assert await asyncio.wait_for(ending, 110)


ADOPTER = """
import asyncio, os, signal
from services.local.stores.command import Command
from services.local.supervisor.children import Children, _children_of
from services.local.runtime.linux import become_subreaper

def shell(text):
    return Command(("/bin/sh", "-c", text), {"PATH": "/usr/bin:/bin"})

async def main():
    become_subreaper()
    children = Children(adopt=True)
    lines = []
    # Forty orphans end while forty children of ours do, each with a code of its own.
    orphans = await children.start(shell("for i in $(seq 40); do (sleep 0.0$i; exit 99) & done"), lines.append)
    own = [await children.start(shell(f"sleep 0.0{i % 9}; exit {i}"), lines.append) for i in range(40)]
    assert await orphans.exited == 0
    assert [await child.exited for child in own] == list(range(40))
    while children.inherited():
        await asyncio.sleep(0.01)
    long = await children.start(shell("(exec sleep 1000) & echo $!"), lines.append)
    await long.exited
    while not lines:
        await asyncio.sleep(0.01)
    assert children.inherited() == [int(lines[0])]
    before = children.adopted
    os.kill(int(lines[0]), signal.SIGKILL)
    while children.adopted == before:
        await asyncio.sleep(0.01)
    await children.close()
    # No zombie either.
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("adopted", children.adopted)

asyncio.run(main())
"""


def test_orphans_are_collected_and_no_exit_code_is_stolen() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTER], cwd=ROOT, timeout=110, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 2


class Supervised:
    """A unit with its task, its starts counted in a file."""

    def __init__(self, children: Children, script: str, *, serves: bool = True) -> None:
        self._serves = serves
        self.stream = io.StringIO()
        self.output = Output(self.stream)
        self.changed = asyncio.Event()
        self.unit = Unit(
            UnitSpec("thing", lambda: shell(script), self._watch, ((signal.SIGTERM, 10.0),), refused=2),
            children,
            self.output,
            self.changed.set,
        )
        self.task = asyncio.ensure_future(self.unit.run())

    async def _watch(self, _child: Child, report: Report) -> None:
        if self._serves:
            report(True)

    async def stop(self) -> str:
        assert await self.unit.stop(asyncio.Event())
        await asyncio.wait_for(self.task, 110)
        self.output.close()
        return self.stream.getvalue()


async def test_what_dies_is_started_again(children: Children) -> None:
    supervised = Supervised(children, "exec sleep 1000")
    unit = supervised.unit
    await asyncio.wait_for(unit.ready.wait(), 110)
    first = unit.child
    assert first is not None
    unit.signal(signal.SIGKILL)
    # The dead one's readiness does not count for its successor.
    assert not unit.ready.is_set()
    await asyncio.wait_for(unit.ready.wait(), 110)
    assert unit.child is not None
    assert unit.child.pid != first.pid
    assert (unit.starts, unit.state) == (2, "ready")
    printed = await supervised.stop()
    assert "thing was killed by SIGKILL" in printed
    assert "serves again" in printed
    assert unit.state == "stopped"


async def test_what_dies_again_and_again_is_shouted_about(children: Children) -> None:
    supervised = Supervised(children, "echo because; exit 7")
    await asyncio.wait_for(supervised.unit.failing.wait(), 110)
    assert supervised.unit.starts == 5
    # It waits for the next try, and that wait ends with it.
    printed = await supervised.stop()
    assert printed.count("thing ended with exit code 7") == 5
    assert "thing     | because" in printed
    assert "ended 5 times within 30 s" in printed


async def test_what_refuses_its_settings_is_shouted_about_at_once(children: Children) -> None:
    supervised = Supervised(children, "echo because; exit 2", serves=False)
    await asyncio.wait_for(supervised.unit.failing.wait(), 110)
    assert supervised.unit.starts == 1
    printed = await supervised.stop()
    assert "thing     | because" in printed
    assert "thing cannot work with its settings: its lines above say why" in printed


async def test_what_served_before_is_tried_again_at_once(children: Children, tmp_path: Path) -> None:
    """What it refuses now may be a port that another has for the moment."""
    first, second = tmp_path / "first", tmp_path / "second"
    again = f"if [ -e {second} ]; then exec sleep 1000; fi; touch {second}; exit 2"
    supervised = Supervised(children, f"if [ -e {first} ]; then {again}; fi; touch {first}; exec sleep 1000")
    unit = supervised.unit
    await asyncio.wait_for(unit.ready.wait(), 110)
    async with asyncio.timeout(110):
        while not first.exists():
            await asyncio.sleep(0.01)
    unit.signal(signal.SIGKILL)
    while unit.starts < 3:
        supervised.changed.clear()
        await asyncio.wait_for(supervised.changed.wait(), 110)
    assert not unit.failing.is_set()
    assert "cannot work" not in await supervised.stop()


async def test_one_that_cannot_be_started_is_tried_again(children: Children, tmp_path: Path) -> None:
    program = tmp_path / "program"
    stream = io.StringIO()
    output = Output(stream)

    async def watch(_child: Child, report: Report) -> None:
        report(True)

    spec = UnitSpec("thing", lambda: Command((str(program),), {}), watch, ((signal.SIGTERM, 10.0),))
    unit = Unit(spec, children, output, lambda: None)
    task = asyncio.ensure_future(unit.run())
    await asyncio.sleep(0)
    program.symlink_to("/bin/yes")
    await asyncio.wait_for(unit.ready.wait(), 110)
    assert await unit.stop(asyncio.Event())
    await task
    output.close()
    assert "cannot start thing: " in stream.getvalue()
