"""The benchmarks. Each takes a running platform and a client, and gives its figures."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import orchard

from tests.bench.measure import Figures, agent_pid, own_bytes, p50_p99, percentile, rss_bytes, timed
from tests.bench.processors import Processors
from tests.support.platform import PlatformProcess

MEGABYTE: Final = 1_000_000
_PAUSE_SECONDS: Final = 1.0
TRUE: Final = ("sh", "-c", "true")
PAPER_COMMANDS: Final[tuple[tuple[str | tuple[str, ...], bool], ...]] = (
    (("python3", "-V"), False),
    (("ls", "/"), False),
    (("head", "-n", "3", "/etc/os-release"), False),
    ("head -n 3 /etc/os-release", True),  # in a login shell
)


class Bench:
    """One run's platform, client and size."""

    def __init__(self, platform: PlatformProcess, client: orchard.AsyncSandboxClient, *, full: bool) -> None:
        self.platform = platform
        self.client = client
        self.full = full

    async def exec(self) -> Figures:
        """A command through client and gateway; the floor is the same one as a local subprocess, in turn with it.

        In turn with both, two calls that start nothing: one that the gateway answers, and one that the agent answers.
        """
        async with await self.client.create() as sandbox:
            for _ in range(30):
                await sandbox.exec(TRUE)
            through, floor, to_gateway, to_agent = [], [], [], []
            for index in range(1000 if self.full else 300):
                if index % 500 == 0:  # the newest 1,000 are kept
                    ended = await sandbox.start(TRUE)
                    await ended.wait()
                through.append(await timed(lambda: sandbox.exec(TRUE)))
                started = time.perf_counter()
                subprocess.run(TRUE, check=True)
                floor.append((time.perf_counter() - started) * 1e3)
                to_gateway.append(await timed(self.client.version))
                to_agent.append(await timed(ended.info))
            return {
                **p50_p99(through),
                "floor_p50": percentile(floor, 0.5),
                "call_to_gateway_p50": percentile(to_gateway, 0.5),
                "call_to_agent_p50": percentile(to_agent, 0.5),
                "concurrency_64": await self._in_flight(sandbox),
            }

    async def _in_flight(self, sandbox: orchard.AsyncSandbox) -> Figures:
        count = 4000 if self.full else 1500
        slots = asyncio.Semaphore(64)

        async def one() -> float:
            async with slots:
                return await timed(lambda: sandbox.exec(TRUE, concurrent=True))

        await asyncio.gather(*(one() for _ in range(200)))
        processors = Processors(self.platform)
        started = time.perf_counter()
        times = await asyncio.gather(*(one() for _ in range(count)))
        seconds = time.perf_counter() - started
        return {
            "per_second": round(count / seconds, 1),
            "p99": percentile(times, 0.99),
            "cpu_each": processors.each(count),
        }

    async def create(self) -> Figures:
        """From create to READY: one after the other without a pause, and alone, on a platform that had a moment."""
        await self._creates(5, 0)
        count = 100 if self.full else 40
        processors = Processors(self.platform)
        busy = await self._creates(count, 0)
        cpu_each = processors.each(count)
        alone = await self._creates(20, _PAUSE_SECONDS)
        return {**p50_p99(busy), "alone_p50": percentile(alone, 0.5), "cpu_each": cpu_each}

    async def _creates(self, count: int, pause_seconds: float) -> list[float]:
        times = []
        for _ in range(count):
            await asyncio.sleep(pause_seconds)
            started = time.perf_counter()
            sandbox = await self.client.create()
            times.append((time.perf_counter() - started) * 1e3)
            await sandbox.delete()
        return times

    async def lifecycle(self) -> list[Figures]:
        """The paper's mix: create, four commands, delete, all sandboxes at once."""
        return [await self._lives(count) for count in ((200, 1000) if self.full else (200,))]

    async def _lives(self, count: int) -> Figures:
        creates: list[float] = []
        execs: list[float] = []
        failures: list[str] = []

        async def life() -> None:
            try:
                started = time.perf_counter()
                sandbox = await self.client.create(timeout=300)
                creates.append((time.perf_counter() - started) * 1e3)
                for command, login in PAPER_COMMANDS:
                    started = time.perf_counter()
                    (await sandbox.exec(command, login_shell=login)).check()
                    execs.append((time.perf_counter() - started) * 1e3)
                await sandbox.delete()
            except orchard.OrchardError as error:
                failures.append(f"{type(error).__name__}: {error}")

        processors = Processors(self.platform)
        started = time.perf_counter()
        await asyncio.gather(*(life() for _ in range(count)))
        seconds = time.perf_counter() - started
        cpu_each = processors.each(count)
        for failure in failures[:3]:
            print(f"lifecycle failure: {failure}", file=sys.stderr)
        return {
            "sandboxes": count,
            "seconds": round(seconds, 2),
            "commands_per_second": round(len(execs) / seconds, 1),
            "create_mean": round(sum(creates) / max(1, len(creates)), 1),
            "exec_mean": round(sum(execs) / max(1, len(execs)), 1),
            "failures": len(failures),
            "cpu_each": cpu_each,
        }

    async def stream(self) -> Figures:
        """Output of a process that writes as fast as it can; memory of agent and gateway before and after."""
        size = (10_000 if self.full else 2_000) * MEGABYTE
        async with await self.client.create() as sandbox:
            agent = await self._agent_of(sandbox)
            gateway = self.platform.service_pid("gateway")
            await _drain(sandbox, 200 * MEGABYTE)
            agent_before, gateway_before = rss_bytes(agent), rss_bytes(gateway)
            processors = Processors(self.platform)
            started = time.perf_counter()
            await _drain(sandbox, size)
            seconds = time.perf_counter() - started
            return {
                "megabytes_per_second": round(size / MEGABYTE / seconds, 1),
                "cpu_each_gigabyte": processors.each(size // (1000 * MEGABYTE)),
                "agent_rss_growth": rss_bytes(agent) - agent_before,
                "gateway_rss_growth": rss_bytes(gateway) - gateway_before,
            }

    async def files(self) -> Figures:
        """One large file up and down, and many small ones as an archive; and a file that is written here.

        Each kind has its rounds one right after the other, and one before them that does not count: a virtual machine
        may have to be given the memory under a new file first, and loses it within seconds when a file goes. What that
        costs is `first_write`, a plain file written into such memory.
        """
        size = 1 << 30 if self.full else 256 << 20
        rounds = 5 if self.full else 3
        count = 10_000 if self.full else 3_000
        with tempfile.TemporaryDirectory(prefix="orchard-bench-") as folder:
            large, small = Path(folder, "large"), Path(folder, "small")
            first = await timed(lambda: asyncio.to_thread(_write, large, size))
            for index in range(count):
                path = small / f"d{index % 100}" / f"f{index}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(os.urandom(500))

            async def rate(move: Callable[[], Awaitable[object]]) -> float:
                times = [await timed(move) for _ in range(rounds + 1)]
                return round(size / 1e3 / percentile(times[1:], 0.5), 1)

            def replace() -> None:
                _write(Path(folder, "new"), size)
                Path(folder, "new").replace(Path(folder, "written"))

            async with await self.client.create() as sandbox:
                processors = Processors(self.platform)
                up = await rate(lambda: sandbox.upload(large, "/srv/large"))
                each = processors.each((rounds + 1) * size // (1000 * MEGABYTE))
                down = await rate(lambda: sandbox.download("/srv/large", Path(folder, "back")))
                written = await rate(lambda: asyncio.to_thread(replace))
                many = await timed(lambda: sandbox.upload(small, "/srv/small"))
        return {
            "upload_megabytes_per_second": up,
            "upload_cpu_each_gigabyte": each,
            "download_megabytes_per_second": down,
            "write_megabytes_per_second": written,
            "first_write_megabytes_per_second": round(size / 1e3 / first, 1),
            "archive_files_per_second": round(count / many * 1e3, 1),
        }

    async def terminal(self) -> Figures:
        """Keys typed into many shells at once: from key to echo."""
        from tests.bench.terminal import measure

        return await measure(self.client, keys=100 if self.full else 25)

    async def forward(self) -> Figures:
        """A forwarded port: bytes over one connection, and the times of small exchanges."""
        from tests.bench.forward import measure

        return await measure(self.platform, self.client, full=self.full)

    async def agent(self) -> Figures:
        """Memory of an agent: forked, and as a Pod runs it, with its size and its start to the first answer."""
        async with await self.client.create() as sandbox:
            await sandbox.exec("true")
            forked_rss = own_bytes(await self._agent_of(sandbox))
        from tests.bench.own_agent import measure_own_agent

        return {**await measure_own_agent(), "forked_rss": forked_rss}

    async def _agent_of(self, sandbox: orchard.AsyncSandbox) -> int:
        namespace = (await sandbox.exec(["readlink", "/proc/self/ns/pid"])).check().stdout.strip()
        return agent_pid(self.platform.pid, namespace)

    async def watcher(self) -> Figures:
        """The watcher of a cluster, by itself."""
        from tests.bench.watcher import measure

        return await measure(full=self.full)

    async def judge(self) -> Figures:
        """Verdicts of a model server that answers at once."""
        from tests.bench.judge import measure

        return await measure(self.platform, self.client, full=self.full)

    async def trajectories(self) -> Figures:
        """The store of trajectories."""
        from tests.bench.trajectories import measure

        return await measure(self.platform, self.client, full=self.full)

    async def gateway(self) -> Figures:
        """Calls a second of the cheapest call, and the gateway's processor time for each."""
        count = 5000 if self.full else 2000
        slots = asyncio.Semaphore(64)

        async def one() -> None:
            async with slots:
                await self.client.version()

        pid = self.platform.service_pid("gateway")
        await asyncio.gather(*(one() for _ in range(200)))
        cpu, started = _cpu_seconds(pid), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(count)))
        seconds = time.perf_counter() - started
        return {
            "calls_per_second": round(count / seconds, 1),
            "cpu_per_call": round((_cpu_seconds(pid) - cpu) / count * 1e3, 3),
            "routes": await self._routes(1000 if self.full else 50),
        }

    async def _routes(self, count: int) -> Figures:
        """What a call costs the gateway that goes to the same sandbox each time, and to each of so many in turn.

        One that the agent answers without starting anything. First while there is only the one, then beside the others.
        The client's own processor time is the yardstick: it does the same for each call, so what makes it slower is the
        machine, with as many processes on it as sandboxes need.
        """
        pid, calls, slots = self.platform.service_pid("gateway"), 2 * max(count, 500), asyncio.Semaphore(32)

        async def each(names: Sequence[str]) -> Figures:
            """Milliseconds of processor for a call."""
            sandboxes = [self.client.attach(name) for name in names]

            async def call(number: int) -> None:
                async with slots:
                    await sandboxes[number % len(sandboxes)].list_execs()

            for _ in range(2):  # connections are made, and everything that is made once
                await asyncio.gather(*(call(number) for number in range(max(len(names), 100))))
            pids = {"gateway": pid, "client": os.getpid()}
            before = {stage: _cpu_seconds(of) for stage, of in pids.items()}
            await asyncio.gather(*(call(number) for number in range(calls)))
            return {stage: round((_cpu_seconds(of) - before[stage]) / calls * 1e3, 3) for stage, of in pids.items()}

        async def made() -> orchard.AsyncSandbox:
            async with slots:
                return await self.client.create(timeout=300)

        first = await made()
        alone = await each([first.sandbox_id])
        others = await asyncio.gather(*(made() for _ in range(count - 1)))
        try:
            return {
                "sandboxes": count,
                "cpu_per_call_of_one": alone,
                "cpu_per_call_of_one_among_all": await each([first.sandbox_id]),
                "cpu_per_call_of_all": await each([first.sandbox_id, *(one.sandbox_id for one in others)]),
            }
        finally:
            await asyncio.gather(*(one.delete() for one in (first, *others)))


def _write(path: Path, size: int) -> None:
    """A file of random bytes, a mebibyte at a time."""
    block = secrets.token_bytes(1 << 20)
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)


async def _drain(sandbox: orchard.AsyncSandbox, size: int) -> None:
    stream = sandbox.exec_stream(["head", "-c", str(size), "/dev/zero"])
    received = 0
    async for chunk in stream:
        received += len(chunk.data)
    if received != size:
        raise RuntimeError(f"{received} of {size} bytes arrived")


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
