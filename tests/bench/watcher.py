"""The watcher as it runs in a cluster, against a recorded stream of Pods."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.health import Health
from services.common.watch_cache import WatchCache
from tests.bench.measure import Figures, p50_p99, rss_bytes
from tests.bench.replay import TENANT, sandbox_id
from tests.support.platform import ROOT

_PODS = 10_000
_PATIENCE_SECONDS = 120.0
_STEPS = 4  # revisions of a watcher for each of the API server's


class Stream:
    """The replaying process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def send(self, command: str, count: int) -> dict[str, int]:
        """Returns when the last of them was taken."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command} {count}\n".encode())
        return dict(json.loads(await self._process.stdout.readline()))


async def measure(*, full: bool) -> Figures:
    """Memory for each of 10,000 Pods, events a second, and from a Pod's change to the wake of a waiter in a gateway."""
    with tempfile.TemporaryDirectory(prefix="orchard-bench-") as name:
        folder = Path(name)
        async with asyncio.timeout(_PATIENCE_SECONDS), _program("tests.bench.replay", {}) as replaying:
            assert replaying.stdout is not None
            port = int(await replaying.stdout.readline())
            environment = {
                "ORCHARD_RUNTIME": "kubernetes",
                "ORCHARD_KUBECONFIG": str(_kubeconfig(folder, port)),
                "ORCHARD_LISTEN": f"unix:{folder}/watcher",
            }
            async with _program("services.watcher", environment) as watching:
                return await _measure(Stream(replaying), watching.pid, f"unix:{folder}/watcher", full=full)


async def _measure(stream: Stream, pid: int, address: str, *, full: bool) -> Figures:
    async with _following(address):
        pass  # it is up and has synced
    idle = rss_bytes(pid)
    version = (await stream.send("add", _PODS))["version"]
    async with _following(address) as cache:
        await _reach(cache, _PODS - 1, version)
    loaded = rss_bytes(pid)
    count = 200_000 if full else 60_000
    await stream.send("change", 5_000)
    started = time.perf_counter()
    version = (await stream.send("change", count))["version"]
    seconds = time.perf_counter() - started
    wakes = []
    async with _following(address) as cache:
        for following in range(version + 1, version + 1 + (1000 if full else 300)):
            waiter = asyncio.ensure_future(_reach(cache, 0, following))
            sent = await stream.send("change", 1)
            wakes.append((await waiter - sent["at"]) / 1e6)
    return {
        "events_per_second": round(count / seconds, 1),
        "bytes_per_pod": (loaded - idle) // _PODS,
        **{f"wake_{key}": value for key, value in p50_p99(wakes).items()},
    }


async def _reach(cache: WatchCache, number: int, version: int) -> int:
    """Wait as a gateway does for a sandbox; returns the monotonic nanosecond of the wake."""
    await cache.wait(TENANT, sandbox_id(number), lambda seen: seen.revision >= version * _STEPS, _PATIENCE_SECONDS)
    return time.monotonic_ns()


@asynccontextmanager
async def _following(address: str) -> AsyncIterator[WatchCache]:
    """A gateway's cache once it is live."""
    live = asyncio.Event()
    cache = WatchCache(address, Health(), include_spec=False, on_synced=live.set)
    task = asyncio.ensure_future(cache.run())
    try:
        await live.wait()
        yield cache
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _program(module: str, environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("ORCHARD_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        cwd=ROOT,
        env={**own, **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    # JSON is YAML.
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "replay", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "bench", "user": {"token": "bench"}}],
                "contexts": [{"name": "replay", "context": {"cluster": "replay", "user": "bench"}}],
                "current-context": "replay",
            }
        )
    )
    return path
