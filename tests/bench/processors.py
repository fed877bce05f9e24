"""Processor time of one platform by stage, so that a figure that misses its goal says where its time went."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.bench.measure import Figures
from tests.support.platform import SERVICES, PlatformProcess, descendants

_TICKS = os.sysconf("SC_CLK_TCK")


class Processors:
    """Counts from its making on.

    Stages: client (this process), each service by its name, agents, launchers (the processes beside an agent: init and
    launcher), and ended (whatever ended meanwhile: commands, and whole sandboxes when they were deleted). Of a process
    that was started and is there still everything counts; of one that ended, what its reaper was told.
    """

    def __init__(self, platform: PlatformProcess) -> None:
        self._platform = platform
        self._services = {platform.service_pid(name): name for name in SERVICES}
        self._before = self._read()

    def each(self, operations: int) -> Figures:
        """Milliseconds of processor for each of so many operations, by stage; what is under 0.01 is left out."""
        spent = self._read()
        spent.subtract(self._before)
        figures = {stage: round(ticks / _TICKS / operations * 1e3, 2) for stage, ticks in sorted(spent.items())}
        return {stage: value for stage, value in figures.items() if value >= 0.01}

    def _read(self) -> Counter[str]:
        own = os.times()
        spent = Counter({"client": round((own.user + own.system) * _TICKS)})
        for process in descendants(self._platform.pid):
            try:
                fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                stage = self._services.get(process.pid) or _stage(process.pid)
            except OSError:
                continue
            spent[stage] += int(fields[11]) + int(fields[12])
            spent["ended"] += int(fields[13]) + int(fields[14])
        return spent


def _stage(pid: int) -> str:
    if Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink():
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return "postgres" if name.startswith("postgres") else "platform"
    # The agent is Python; the init and the launcher are tiny and static.
    return "launchers" if "memfd" in str(Path(f"/proc/{pid}/exe").readlink()) else "agents"
