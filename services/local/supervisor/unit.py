"""One supervised process: started, watched until it is ready, and started again whenever it dies."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from services.local.stores.command import Command
from services.local.stores.errors import StoreError
from services.local.supervisor.children import Child, Children, StopStep
from services.local.supervisor.output import Output

DEATHS: Final = 5
DEATHS_SECONDS: Final = 30.0
_FIRST_DELAY_SECONDS: Final = 0.1
_SLOW_DELAY_SECONDS: Final = 10.0

Report = Callable[[bool], None]
"""Called with whether the process serves, at every change."""


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """What to run.

    Attributes:
        name: prefixes its log.
        command: makes its command line, anew for every start.
        watch: reports whether it serves, as long as the process lives; it is cancelled when the process ends.
        stop: signals to stop it with, in order, each with its patience.
        clear: removes what a dead one left, before it is started again.
        refused: the exit code by which it says that what it was given will never do.
    """

    name: str
    command: Callable[[], Command]
    watch: Callable[[Child, Report], Awaitable[None]]
    stop: Sequence[StopStep]
    clear: Callable[[], Awaitable[None]] | None = None
    refused: int | None = None


def restart_delay(deaths: Sequence[float], now: float) -> float:
    """Seconds to wait before a process that died at these times (the last is now) is started again."""
    recent = sum(1 for death in deaths if now - death <= DEATHS_SECONDS)
    if recent >= DEATHS:
        return _SLOW_DELAY_SECONDS
    return _FIRST_DELAY_SECONDS * float(2 ** (recent - 1))


class Unit:
    """Keeps one process running until `stop`. `on_change` is told whenever its state has changed."""

    def __init__(self, spec: UnitSpec, children: Children, output: Output, on_change: Callable[[], None]) -> None:
        self.name = spec.name
        self.ready = asyncio.Event()
        self.failing = asyncio.Event()
        """Set as long as it dies again and again, or refuses what it was given."""
        self.starts = 0
        self.child: Child | None = None
        self._spec = spec
        self._children = children
        self._output = output
        self._on_change = on_change
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._stopping = asyncio.Event()
        self._unwatched = asyncio.Event()
        self._unwatched.set()
        self._served = False

    @property
    def state(self) -> str:
        """One of "starting" (or not serving at the moment), "ready", "down", "stopped"."""
        if self._stopping.is_set() and self.child is None:
            return "stopped"
        if self.child is None:
            return "down"
        return "ready" if self.ready.is_set() else "starting"

    async def run(self) -> None:
        """Keep it running; returns after `stop`."""
        while not self._stopping.is_set():
            self.starts += 1
            code = None
            try:
                if self.starts > 1 and self._spec.clear is not None:
                    await self._spec.clear()
                self.child = await self._children.start(self._spec.command(), self._line)
            except (OSError, StoreError) as error:
                self._output.shout(f"cannot start {self.name}: {error}")
            else:
                code = await self._live(self.child)
                self.child = None
                self.ready.clear()
                self._on_change()
                if not self._stopping.is_set():
                    self._output.shout(f"{self.name} {_describe(code)}")
            # One that served before may find only for now what it refuses, such as a port that another has taken.
            await self._pause(is_refusal=code is not None and code == self._spec.refused and not self._served)

    def _line(self, text: str) -> None:
        self._output.line(self.name, text)

    async def _live(self, child: Child) -> int:
        self._on_change()
        if self._stopping.is_set():
            # It was stopped while the process was being started.
            await child.end(self._steps())
        self._unwatched.clear()
        watching = asyncio.ensure_future(self._spec.watch(child, lambda serves: self._report(child, serves)))
        ending = asyncio.ensure_future(self._stopping.wait())
        try:
            waits: set[asyncio.Future[Any]] = {child.exited, watching, ending}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            # A watch that is done has nothing more to say about this process; one that failed is a fault of ours.
            if watching.done():
                watching.result()
                await asyncio.wait(waits - {watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # An open stream would hold up a server that stops.
            for task in (watching, ending):
                task.cancel()
            await asyncio.gather(watching, ending, return_exceptions=True)
            self._unwatched.set()
        return await asyncio.shield(child.exited)

    def _report(self, child: Child, serves: bool) -> None:
        if child is not self.child or child.doomed or serves == self.ready.is_set():
            return
        if serves:
            self.ready.set()
            if self._served:
                self._output.say(f"{self.name} serves again (process {child.pid})")
            self._served = True
        else:
            self.ready.clear()
            if not self._stopping.is_set():
                self._output.say(f"{self.name} does not serve at the moment")
        self._on_change()

    async def _pause(self, *, is_refusal: bool) -> None:
        if self._stopping.is_set():
            return
        now = asyncio.get_running_loop().time()
        self._deaths.append(now)
        delay = restart_delay(self._deaths, now)
        what = ""
        if is_refusal:
            delay, what = _SLOW_DELAY_SECONDS, "cannot work with its settings"
        elif delay >= _SLOW_DELAY_SECONDS:
            what = f"ended {DEATHS} times within {DEATHS_SECONDS:.0f} s"
        if what:
            self.failing.set()
            self._output.shout(
                f"{self.name} {what}: its lines above say why. It is tried again every {_SLOW_DELAY_SECONDS:.0f} s"
            )
        else:
            self.failing.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._stopping.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send its present process a signal."""
        if self.child is not None:
            self.child.signal(number)
            if number == signal.SIGKILL:
                self.ready.clear()

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Stop it and start it no more; whether it ended."""
        self._stopping.set()
        if self.child is None:
            return True
        await self._unwatched.wait()
        return await self.child.end(self._steps(), hurry=hurry) if self.child else True

    def _steps(self) -> tuple[StopStep, ...]:
        return (*self._spec.stop, (signal.SIGKILL, 5.0))


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
