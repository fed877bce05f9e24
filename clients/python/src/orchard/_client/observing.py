"""Who looks on while a sandbox's commands run: they are told of each that has ended, whichever way it did."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from orchard._client.types import ExecResult
from orchard.exec.v1 import exec_pb2

OUTPUT_BYTES: Final = 8 << 20
"""What is kept of an output at most."""


class Observer(Protocol):
    """Told of each command that ended. It must not raise, and not wait."""

    def ended(self, command: ObservedCommand) -> None:
        """A command ended."""


class ObservedCommand:
    """A command on its way, for those who observe its sandbox."""

    def __init__(self, exec_id: str, spec: exec_pb2.ExecSpec, *, background: bool = False) -> None:
        self.exec_id = exec_id
        self.spec = spec
        self.background = background
        self.start_time = dt.datetime.now(dt.UTC)
        self.end_time = self.start_time
        self.result: ExecResult | None = None
        self.error: BaseException | None = None
        self.chunks: list[tuple[str, bytes]] = []
        self.missing = 0
        """Bytes of output beyond what is kept."""
        self._kept = 0

    def saw(self, stream: str, data: bytes) -> None:
        """Keep a piece of its output, up to a bound."""
        room = OUTPUT_BYTES - self._kept
        if room < len(data):
            self.missing += len(data) - max(0, room)
            data = data[: max(0, room)]
        if data:
            self._kept += len(data)
            self.chunks.append((stream, data))


class Observers:
    """Who observes which sandbox of a client."""

    def __init__(self) -> None:
        self._of: dict[str, list[Observer]] = {}

    def add(self, sandbox_id: str, observer: Observer) -> None:
        """Tell it of the sandbox's commands."""
        known = self._of.setdefault(sandbox_id, [])
        if observer not in known:
            known.append(observer)

    def remove(self, sandbox_id: str, observer: Observer) -> None:
        """Tell it no more."""
        known = self._of.get(sandbox_id, [])
        if observer in known:
            known.remove(observer)
        if not known:
            self._of.pop(sandbox_id, None)

    @contextmanager
    def observing(
        self, sandbox_id: str, exec_id: str, spec: exec_pb2.ExecSpec, *, background: bool = False
    ) -> Iterator[ObservedCommand | None]:
        """Around a command, whichever way it ends; None where nobody looks."""
        if sandbox_id not in self._of:
            yield None
            return
        command = ObservedCommand(exec_id, spec, background=background)
        try:
            yield command
        except BaseException as error:
            command.error = error
            raise
        finally:
            for observer in list(self._of.get(sandbox_id, ())):
                observer.ended(command)
