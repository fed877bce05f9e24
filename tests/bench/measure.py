"""What every benchmark shares."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""One benchmark's figures: times in milliseconds unless a name says seconds, sizes in bytes."""


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds that it took."""
    started = time.perf_counter()
    await work()
    return (time.perf_counter() - started) * 1e3


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile, rounded to a hundredth."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2)


def p50_p99(values: Sequence[float]) -> Figures:
    return {"p50": percentile(values, 0.50), "p99": percentile(values, 0.99)}


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def own_bytes(pid: int) -> int:
    """Memory that a process shares with no other."""
    return _mapped(pid, "Private_Clean:", "Private_Dirty:")


def own_dirty_bytes(pid: int) -> int:
    """Memory that no process could share: pages of files, which another one may map, are not in it."""
    return _mapped(pid, "Private_Dirty:")


def _mapped(pid: int, *kinds: str) -> int:
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(kinds):
            total += int(line.split()[1]) << 10
    return total


def agent_pid(platform_pid: int, namespace: str) -> int:
    """The agent of a sandbox, by what `readlink /proc/self/ns/pid` says in it."""
    from tests.support.platform import descendants

    for process in descendants(platform_pid):
        try:
            inside = str(Path(f"/proc/{process.pid}/ns/pid").readlink()) == namespace
            # The agent is Python; the init and the launcher are tiny and static.
            if inside and "memfd" not in str(Path(f"/proc/{process.pid}/exe").readlink()):
                return process.pid
        except OSError:
            continue
    raise RuntimeError(f"no agent in the pid namespace {namespace}")
