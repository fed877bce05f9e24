"""How often the sandbox's memory limit has killed, from the counter file or the event descriptor of its cgroup."""

from __future__ import annotations

import contextlib
import os


class OomCounter:
    """Counts kills; always zero where the host gives neither source."""

    def __init__(self, counter_fd: int | None, event_fd: int | None) -> None:
        self._counter_fd = counter_fd
        self._event_fd = event_fd
        self._events = 0
        if event_fd is not None:
            os.set_blocking(event_fd, False)

    def read(self) -> int:
        """Kills so far. Only differences mean something."""
        if self._counter_fd is not None:
            try:
                text = os.pread(self._counter_fd, 4096, 0)
            except OSError:  # the cgroup is being removed
                return 0
            for line in text.splitlines():
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
        if self._event_fd is not None:
            with contextlib.suppress(BlockingIOError):
                self._events += int.from_bytes(os.read(self._event_fd, 8), "little")
        return self._events
