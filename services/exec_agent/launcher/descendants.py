"""Finds and signals every descendant of this process through /proc: tree.c in Python."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Final

_MOST_PASSES: Final = 64
_PARENT, _GROUP = 1, 2
"""Places behind the name in proc(5), stat."""


class Descendants:
    """Those of this process, which must be a child subreaper to have them all."""

    def __init__(self, proc_fd: int) -> None:
        """`proc_fd` is /proc, kept open so that nobody can unmount it from us."""
        self._proc = proc_fd
        self._own = os.getpid()
        try:
            self._read(f"{self._own}/task/{self._own}/children")
            self._has_children_lists = True
        except FileNotFoundError:
            self._has_children_lists = False

    def signal(self, number: int) -> None:
        """Signal each once, looking again until no new one is found."""
        sent: set[int] = set()
        for _ in range(_MOST_PASSES):
            fresh = [(pid, parent) for pid, parent in self._walk() if pid not in sent]
            if not fresh:
                return
            for pid, parent in fresh:
                sent.add(pid)
                self._signal_one(pid, parent, number)

    def kill(self) -> None:
        """End all that are there. Repeat it until there are none.

        By their process groups, which are theirs alone, as a command begins a session of its own: one call ends all of
        a group at once, and none of it outruns that by forking. This is not as fast as the launcher's way; processes
        that fork, begin a group and end within microseconds live on for as long as they are faster than this.
        """
        own = os.getpgrp()
        killed: set[int] = set()
        for pid, parent in self._walk():
            group = self._stat(pid, _GROUP)
            if group in killed:
                continue
            if group > 1 and group != own:
                killed.add(group)
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            else:  # it was forked just now and will begin its session next
                self._signal_one(pid, parent, signal.SIGKILL)

    def _walk(self) -> list[tuple[int, int]]:
        """Pids and their parents, each after its parent."""
        children = self._children if self._has_children_lists else self._by_parents().get
        found: list[tuple[int, int]] = []
        seen = {self._own}
        todo = [self._own]
        while todo:
            parent = todo.pop()
            for pid in children(parent) or ():
                if pid not in seen:
                    seen.add(pid)
                    found.append((pid, parent))
                    todo.append(pid)
        return found

    def _children(self, pid: int) -> list[int]:
        found: list[int] = []
        for thread in self._numbers(f"{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, self._read(f"{pid}/task/{thread}/children").split())
        return found

    def _by_parents(self) -> dict[int, list[int]]:
        """The same where the kernel keeps no such lists: by the parent of every process there is."""
        children: dict[int, list[int]] = {}
        for pid in self._numbers("."):
            parent = self._parent_of(pid)
            if parent > 0:
                children.setdefault(parent, []).append(pid)
        return children

    def _signal_one(self, pid: int, parent: int, number: int) -> None:
        """Nobody else reaps our own children, so their numbers are theirs. The number of another one may have gone to
        a stranger since: the descriptor pins it, then its parent must still be the same, or we if that has ended.
        """
        with contextlib.suppress(OSError):
            if parent == self._own:
                os.kill(pid, number)
                return
            descriptor = os.pidfd_open(pid)
            try:
                if self._parent_of(pid) in (parent, self._own):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def _parent_of(self, pid: int) -> int:
        return self._stat(pid, _PARENT)

    def _stat(self, pid: int, field: int) -> int:
        """A number of proc(5), stat; -1 if the process is gone."""
        try:
            # The name before the last parenthesis may hold anything.
            return int(self._read(f"{pid}/stat").rpartition(b")")[2].split()[field])
        except (OSError, IndexError):
            return -1

    def _numbers(self, path: str) -> Iterator[int]:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        finally:
            os.close(folder)
        yield from (int(name) for name in names if name.isdigit())

    def _read(self, path: str) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            data = b""
            while block := os.read(descriptor, 65_536):
                data += block
            return data
        finally:
            os.close(descriptor)
