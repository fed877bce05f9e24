"""An agent as a process of its own, as it runs in a Pod."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.tokens import generate_key, public_pem
from tests.bench.measure import rss_bytes
from tests.support.platform import ROOT

_UID = "bench"
_PATIENCE_SECONDS = 30


async def start_own_agent() -> tuple[float, int]:
    """Milliseconds from its start to its first answer, and its resident memory when idle."""
    with tempfile.TemporaryDirectory(prefix="orchard-bench-") as name:
        folder = Path(name)
        (folder / "state").mkdir()
        (folder / "keys.pem").write_bytes(public_pem(generate_key()))
        environment = {
            "PATH": "/usr/bin:/bin",
            "ORCHARD_UID": _UID,
            "ORCHARD_SANDBOX_ID": _UID,
            "ORCHARD_LISTEN": f"unix:{folder}/s",
            "ORCHARD_PUBLIC_KEYS_FILE": str(folder / "keys.pem"),
            "ORCHARD_STATE_DIRECTORY": str(folder / "state"),
        }
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "services.exec_agent"], cwd=ROOT, env=environment)
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not (folder / "s").exists():
                    await asyncio.sleep(0.001)
            async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
                request = health_pb2.HealthCheckRequest(service=_UID)
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_PATIENCE_SECONDS)
            return round((time.perf_counter() - started) * 1e3, 1), rss_bytes(process.pid)
        finally:
            process.terminate()
            process.wait(_PATIENCE_SECONDS)
