"""The files of all outputs of a sandbox together, and their common limit."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Container
from typing import Final, Protocol

from services.exec_agent.model import Chunk
from services.exec_agent.ring import Kept, Ring

_PREFIX: Final = "output-"


class Droppable(Protocol):
    """The output of a command that has ended."""

    def drop(self) -> None:
        """Give up everything that is in the file."""


class OutputLog(Protocol):
    """Where output is noted that is in no file. Neither call fails: what cannot be noted is lost with the agent."""

    def output(self, exec_id: str, chunk: Chunk) -> None:
        """This follows what was noted before."""

    def lost(self, exec_id: str, end: int) -> None:
        """The output has reached `end`, and nothing before it is kept."""


class SpoolStore:
    """Makes spool files in the agent's own directory and keeps their sum below the sandbox's limit."""

    def __init__(self, directory_fd: int, limit: int, log: OutputLog) -> None:
        self._directory_fd = directory_fd
        self._limit = limit
        self._allocated = 0
        self._ended: OrderedDict[int, Droppable] = OrderedDict()
        self.log = log

    @property
    def allocated(self) -> int:
        """Bytes of all spool files."""
        return self._allocated

    def create(self, exec_id: str, capacity: int) -> Ring:
        """A new file.

        Raises:
            OSError: there is no space or no descriptor left.
        """
        return Ring.create(self._directory_fd, _PREFIX + exec_id, capacity)

    def find(self, exec_id: str) -> tuple[Ring, Kept] | None:
        """The file that an agent before this one left; None if there is none that can be used."""
        return Ring.open(self._directory_fd, _PREFIX + exec_id)

    def remove(self, exec_id: str) -> None:
        """Take a file's name away; whoever has it open keeps it."""
        with contextlib.suppress(OSError):
            os.unlink(_PREFIX + exec_id, dir_fd=self._directory_fd)

    def remove_others(self, known: Container[str]) -> None:
        """Remove the files of commands that are not known any more."""
        with os.scandir(self._directory_fd) as entries:
            found = [entry.name.removeprefix(_PREFIX) for entry in entries if entry.name.startswith(_PREFIX)]
        for exec_id in found:
            if exec_id not in known:
                self.remove(exec_id)

    def grow(self, size: int) -> bool:
        """Take `size` more bytes, if need be from the commands that ended first; False if the rest is in use."""
        while self._allocated + size > self._limit and self._ended:
            _, oldest = self._ended.popitem(last=False)
            oldest.drop()
        if self._allocated + size > self._limit:
            return False
        self._allocated += size
        return True

    def force_grow(self, size: int) -> None:
        """Take what every command may have, or what is in use already."""
        self._allocated += size

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._allocated -= size

    def note_ended(self, spool: Droppable) -> None:
        """Its output may be dropped when others need the space."""
        self._ended[id(spool)] = spool

    def forget(self, spool: Droppable) -> None:
        """It is closed."""
        self._ended.pop(id(spool), None)
