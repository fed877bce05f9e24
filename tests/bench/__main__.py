"""`python -m tests.bench [--size small|full] [--only exec,lifecycle] [--compare OLD.json]`."""

from __future__ import annotations

import argparse
import json
import os
import platform as machine
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orchard
import uvloop

from tests.bench.benchmarks import Bench
from tests.support.platform import ROOT, PlatformProcess

RESULT = ROOT / "build" / "bench.json"
NAMES = (
    "up",
    "exec",
    "create",
    "lifecycle",
    "stream",
    "files",
    "terminal",
    "forward",
    "agent",
    "watcher",
    "gateway",
    "trajectories",
    "judge",
)
# Only where they are named: they need root and the testbed of tests/cluster.
NAMED = ("kubernetes",)
# Name, figure, bound, whether it must be at most or at least that, and where the bound comes from.
GOALS: tuple[tuple[str, str, float, str], ...] = (
    ("exec.p50", "exec.floor_p50", 2.0, "at most the floor + 2 ms"),
    ("exec.concurrency_64.per_second", "", 400, "at least"),
    ("create.p50", "", 40, "at most"),
    ("lifecycle.200.seconds", "", 6, "at most"),
    ("lifecycle.1000.seconds", "", 26, "at most"),
    ("stream.megabytes_per_second", "", 300, "at least"),
    ("files.upload_megabytes_per_second", "", 300, "at least"),
    ("files.download_megabytes_per_second", "", 300, "at least"),
    ("files.archive_files_per_second", "", 2000, "at least"),
    ("terminal.echo_p50", "", 5, "at most"),
    ("forward.megabytes_per_second", "", 200, "at least"),
    ("agent.forked_rss", "", 10 << 20, "at most"),
    ("agent.idle_rss", "", 40 << 20, "at most"),
    ("agent.payload_bytes", "", 40 << 20, "at most"),
    ("watcher.events_per_second", "", 20_000, "at least"),
    ("watcher.bytes_per_pod", "", 5_000, "at most"),
    ("watcher.wake_p50", "", 5, "at most"),
    ("trajectories.appends_per_second", "", 5000, "at least"),
    ("trajectories.query_p50", "", 20, "at most"),
    ("trajectories.stats_p50", "", 200, "at most"),
    ("trajectories.export_megabytes_per_second", "", 100, "at least"),
    ("trajectories.storage_share_of_raw", "", 0.333, "at most"),
    ("up.ready", "", 5000, "at most"),
    ("judge.overhead_p50", "", 5, "at most"),
    ("judge.cache_hit_p50", "", 3, "at most"),
    ("judge.verdicts_per_second", "", 300, "at least"),
    ("kubernetes.admission_per_second", "", 1000, "at least"),
    ("kubernetes.create_share_of_raw", "", 0.8, "at least"),
    ("kubernetes.apart_create_share_of_raw", "", 0.8, "at least"),
    ("kubernetes.heartbeat_ids_per_second", "", 5000, "at least"),
    ("kubernetes.overhead_p50", "", 100, "at most"),
)


def main() -> int:
    """Run the chosen benchmarks, print the table, write the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure Orchard on this machine.")
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--only", default="all", help=f"comma-separated, of {', '.join((*NAMES, *NAMED))}")
    parser.add_argument("--compare", type=Path, help="an earlier result to show beside this one")
    arguments = parser.parse_args()
    wanted = NAMES if arguments.only == "all" else tuple(arguments.only.split(","))
    if unknown := set(wanted) - set(NAMES) - set(NAMED):
        parser.error(f"--only: no benchmark {min(unknown)!r}; there are {', '.join((*NAMES, *NAMED))}")
    results: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "kernel": machine.release(), "size": arguments.size}
    }
    if "kubernetes" in wanted:
        from tests.bench import kubernetes

        results["kubernetes"] = kubernetes.measure(full=arguments.size == "full")
        wanted = tuple(name for name in wanted if name != "kubernetes")
    if wanted:
        _measure_one_machine(wanted, results, full=arguments.size == "full")
    _show(results, json.loads(arguments.compare.read_text()) if arguments.compare else {})
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {RESULT.relative_to(ROOT)}")
    failures = sum(one["failures"] for one in results.get("lifecycle", []))
    failures += results.get("kubernetes", {}).get("at_once", {}).get("failures", 0)
    return 1 if failures else 0


def _measure_one_machine(wanted: Sequence[str], results: dict[str, Any], *, full: bool) -> None:
    """All that `orchard up` is enough for."""
    with tempfile.TemporaryDirectory(prefix="orchard-bench-") as folder:
        os.chmod(folder, 0o711)  # noqa: PTH101 (the database's own user passes through)
        platform = PlatformProcess(Path(folder))
        try:
            platform.start()
            if "up" in wanted:
                results["up"] = {"ready": _restart(platform)}
            uvloop.run(_measure(platform, [name for name in wanted if name != "up"], results, full))
            platform.stop()
        finally:
            platform.close()


def _restart(platform: PlatformProcess) -> float:
    """Milliseconds of a start that is not the first."""
    platform.stop()
    started = time.perf_counter()
    platform.start()
    return round((time.perf_counter() - started) * 1e3, 1)


async def _measure(platform: PlatformProcess, names: list[str], results: dict[str, Any], full: bool) -> None:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        bench = Bench(platform, client, full=full)
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            results[name] = await getattr(bench, name)()


def _flat(results: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in results.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for one in value:
                yield from _flat(
                    {k: v for k, v in one.items() if k != "sandboxes"}, f"{prefix}{name}.{one['sandboxes']}."
                )
        elif isinstance(value, (int, float)):
            yield prefix + name, value


def _show(results: dict[str, Any], earlier: dict[str, Any]) -> None:
    figures, before = dict(_flat(results)), dict(_flat(earlier))
    print(f"{'figure':<40} {'value':>14} {'earlier':>14}  goal")
    for name, value in figures.items():
        old = f"{before[name]:,}" if name in before else ""
        print(f"{name:<40} {value:>14,} {old:>14}  {_goal(name, value, figures)}")


def _goal(name: str, value: float, figures: dict[str, float]) -> str:
    for figure, base, bound, words in GOALS:
        if figure == name:
            limit = bound + figures.get(base, 0)
            met = value >= limit if words == "at least" else value <= limit
            return f"{'met' if met else 'MISSED'}: {words} {'' if base else f'{bound:,} '}({limit:,.2f})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
