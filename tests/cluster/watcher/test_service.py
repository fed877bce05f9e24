"""The watcher's own process in front of a real API server, and several of them."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from services.common import pods
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.states import State
from services.common.watch_cache import WatchCache
from tests.cluster.watcher.pods import BACKSTOP, Truth, Watched
from tests.support.api_proxy import ApiProxy
from tests.support.otlp import Receiver, attributes, receiver
from tests.support.platform import ROOT
from tests.support.testbed import NAMESPACE, Testbed


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(BACKSTOP):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def replica(
    kubeconfig: Path, folder: Path, name: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[WatchCache]:
    """A watcher's process, and the cache of a gateway that follows it."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("ORCHARD_")}
    settings = {
        "ORCHARD_RUNTIME": "kubernetes",
        "ORCHARD_KUBECONFIG": str(kubeconfig),
        "ORCHARD_NAMESPACE": NAMESPACE,
        "ORCHARD_LISTEN": f"unix:{folder}/{name}",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.watcher"), cwd=ROOT, env={**own, **settings, **(environment or {})}
    )
    cache = WatchCache(settings["ORCHARD_LISTEN"], Health(), include_spec=True)
    following = asyncio.ensure_future(cache.run())
    try:
        await until(lambda: cache.live)
        yield cache
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BACKSTOP):
            assert await process.wait() == 0
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def agent(uid: str) -> AsyncIterator[str]:
    """A server on an agent's port that answers as this sandbox; gives its address, one of this machine's own."""
    address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(2, 254)}"
    server = Server(
        interceptor=CallInterceptor(authenticator=None, telemetry=None), health=Health(), service_names=[uid]
    )
    await server.start(f"{address}:{pods.AGENT_PORT}")
    try:
        yield address
    finally:
        await server.stop()


async def run_pod(truth: Truth, name: str, address: str) -> None:
    """Write the status of a Pod that runs, as its kubelet would."""
    now = "2026-01-01T00:00:00Z"
    container = {"name": pods.CONTAINER, "image": "i", "imageID": "i", "ready": True, "restartCount": 0}
    await truth.status(
        name,
        phase="Running",
        startTime=now,
        podIP=address,
        podIPs=[{"ip": address}],
        containerStatuses=[{**container, "state": {"running": {"startedAt": now}}}],
    )


def rows(cache: WatchCache) -> dict[str, tuple[object, ...]]:
    return {one.uid: (one.sandbox_id, one.revision, one.state, one.endpoint, one.spec) for one in cache.living()}


async def test_two_replicas_tell_the_same(control_plane: Testbed, truth: Truth, tmp_path: Path) -> None:
    uids = {name: (await truth.create(name))["metadata"]["uid"] for name in "abc"}
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(agent(uids["a"]))
        one, other = [
            await stack.enter_async_context(replica(control_plane.watcher_kubeconfig, tmp_path, name))
            for name in ("one", "other")
        ]
        await run_pod(truth, "a", address)
        await truth.delete("b")
        await truth.annotate("c", x="1")
        for cache in (one, other):
            ready = await cache.wait("t", "a", lambda seen: seen.state is State.READY, BACKSTOP)
            assert ready is not None
            assert (ready.state, ready.endpoint) == (State.READY, f"{address}:{pods.AGENT_PORT}")
        wanted = {uid: row[1] for uid, row in (await truth.expected()).items()}
        await until(lambda: rows(one) == rows(other) and {uid: row[1] // 4 for uid, row in rows(one).items()} == wanted)


async def test_an_address_that_is_anothers_now_is_not_ready(
    control_plane: Testbed, truth: Truth, tmp_path: Path
) -> None:
    await truth.create("a")
    uid = (await truth.create("b"))["metadata"]["uid"]
    async with agent(uid) as address, replica(control_plane.watcher_kubeconfig, tmp_path, "w") as cache:
        for name in "ab":
            await run_pod(truth, name, address)
        await cache.wait("t", "b", lambda seen: seen.state is State.READY, BACKSTOP)
        a = cache.get("t", "a")
        assert a is not None
        assert a.state is State.STARTING


def measured(received: Receiver, name: str) -> dict[str, int]:
    """The newest values of a metric, by kind."""
    metric = received.metrics.get(name)
    if metric is None:
        return {}
    points = getattr(metric, metric.WhichOneof("data")).data_points
    return {attributes(point)["kind"]: point.as_int for point in points}


async def test_what_happens_to_the_watch_is_measured(
    truth: Truth, proxy: ApiProxy, kubeconfig: Path, tmp_path: Path
) -> None:
    await truth.create("a")
    async with receiver() as (received, endpoint):
        telemetry = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        async with replica(kubeconfig, tmp_path, "w", telemetry) as cache:
            await until(lambda: measured(received, "orchard.watch").get("relists"))
            before = measured(received, "orchard.watch")
            assert before.keys() == {"events", "repeats", "bookmarks", "relists", "resumes", "interruptions"}
            proxy.cut()
            await truth.create("b")
            await until(lambda: cache.get("t", "b"))
            await until(lambda: measured(received, "orchard.watch")["interruptions"] > before["interruptions"])
            await until(lambda: measured(received, "orchard.watch")["resumes"] > before["resumes"])
            await until(lambda: measured(received, "orchard.watch")["events"] > before["events"])
            await until(lambda: measured(received, "orchard.sandboxes").get("STARTING") == 2)
            await until(lambda: measured(received, "orchard.watch.lag"))


async def test_an_api_server_that_starts_anew_is_followed_on(
    control_plane: Testbed, truth: Truth, proxy: ApiProxy, watched: Watched
) -> None:
    pid, arguments = api_server(control_plane.folder)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
    await until(lambda: watched.runtime.counts()["interruptions"])
    with (control_plane.folder / "log" / "kube-apiserver.log").open("ab") as log:
        subprocess.run(["setsid", "--fork", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
    async with asyncio.timeout(BACKSTOP):
        while "ok" not in control_plane.kubectl("get", "--raw", "/readyz", check=False):
            await asyncio.sleep(0.1)
    await truth.annotate("a", x="1")
    await truth.delete("b")
    await truth.create("d")
    await watched.agrees(truth)
    assert watched.ids() == {"a", "c", "d"}


def api_server(folder: Path) -> tuple[int, list[str]]:
    """The pid and command of a testbed's API server."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().decode().split("\0")[:-1]
        except OSError:
            continue
        if arguments and arguments[0].endswith("/kube-apiserver") and any(str(folder) in one for one in arguments):
            return int(process.name), arguments
    raise AssertionError("there is no API server")
