"""An agent as it runs in a Pod: the payload, in a root file system that has nothing else."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

from tests.bench.measure import Figures, own_dirty_bytes, rss_bytes
from tests.support.payload import built_payload, running_container

_REPEATS = 5


async def measure_own_agent() -> Figures:
    """Size of the payload's archive, milliseconds from the start to the first answer, memory when idle: all that is
    resident, and what no other agent of the node shares (the rest is pages of the payload's files).
    """
    payload = built_payload(with_archive=True)
    starts, idle, own = [], [], []
    for _ in range(_REPEATS):
        with tempfile.TemporaryDirectory(prefix="orchard-bench-") as root:
            started = time.perf_counter()
            with running_container(payload, Path(root)) as container:
                await container.listening()  # finer than a channel that tries again every 50 ms
                await container.healthy()
                starts.append((time.perf_counter() - started) * 1e3)
                idle.append(rss_bytes(container.agent()))
                own.append(own_dirty_bytes(container.agent()))
    archive = payload.parent.parent / f"payload-{payload.name}.tar.gz"
    return {
        "payload_bytes": archive.stat().st_size,
        "start": round(median(starts), 1),
        "idle_rss": round(median(idle)),
        "idle_own": round(median(own)),
    }
