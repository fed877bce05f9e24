"""An API server's watch of Pods from a recording, as fast as its reader takes it: `python -m tests.bench.replay`.

No API server here sends events fast enough to show how fast a watcher reads them. The recording is one Pod as
kube-apiserver 1.34 sent it (pod.json); names, uids and versions are put in anew for each event, every event is a chunk
of the body as there. Prints the port, then obeys lines of standard input: `add COUNT`, `change COUNT`; each is answered
with the last version and the monotonic nanosecond before the last of them was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import uvloop

from services.common import pods

RECORDING = Path(__file__).parent / "pod.json"
TENANT = "bench"
_TOGETHER = 16
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def sandbox_id(number: int) -> str:
    return f"sb-{number:016x}"


def _template() -> bytes:
    """One event with places for its type, name, uid, version, sandbox id and request id."""
    pod: dict[str, Any] = orjson.loads(RECORDING.read_bytes())
    pod["metadata"].update(name="%(name)s", uid="%(uid)s", resourceVersion="%(version)s")
    # Agents are not measured here: nobody asks one that has no address.
    del pod["status"]["podIP"], pod["status"]["podIPs"]
    pod["metadata"]["annotations"].update(
        {pods.TENANT: TENANT, pods.SANDBOX_ID: "%(id)s", pods.REQUEST_ID: "%(request)s"}
    )
    return orjson.dumps({"type": "%(type)s", "object": pod}) + b"\n"


class Replay:
    """One watch at a time."""

    def __init__(self) -> None:
        self._template = _template()
        self._version = itertools.count(1000)
        self._writer: asyncio.StreamWriter | None = None
        self._count = 0

    def event(self, kind: str, number: int, version: int) -> bytes:
        line = self._template % {
            b"type": kind.encode(),
            b"name": b"sandbox-%040x" % number,
            b"uid": b"%08x-0000-4000-8000-%012x" % (number, number),
            b"version": b"%d" % version,
            b"id": sandbox_id(number).encode(),
            b"request": b"auto-%024x" % number,
        }
        return b"%x\r\n%b\r\n" % (len(line), line)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request: nothing exists yet."""
        await reader.readuntil(b"\r\n\r\n")
        notes = {"annotations": {"k8s.io/initial-events-end": "true"}}
        mark = {"kind": "Pod", "metadata": {"resourceVersion": str(next(self._version)), **notes}}
        line = orjson.dumps({"type": "BOOKMARK", "object": mark}) + b"\n"
        writer.write(_HEAD + b"%x\r\n%b\r\n" % (len(line), line))
        self._writer = writer

    async def send(self, command: str, count: int) -> dict[str, int]:
        """Send so many events, of new Pods or of those there are in turn."""
        assert self._writer is not None
        kind = "ADDED" if command == "add" else "MODIFIED"
        first = self._count if command == "add" else 0
        version = at = 0
        for start in range(0, count, _TOGETHER):
            batch = []
            for index in range(start, min(start + _TOGETHER, count)):
                version = next(self._version)
                number = first + index if command == "add" else index % self._count
                batch.append(self.event(kind, number, version))
            at = time.monotonic_ns()
            self._writer.write(b"".join(batch))
            await self._writer.drain()
        if command == "add":
            self._count += count
        return {"version": version, "at": at}


async def _main() -> None:
    replay = Replay()
    server = await asyncio.start_server(replay.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, count = line.split()
        print(json.dumps(await replay.send(command, int(count))), flush=True)


if __name__ == "__main__":
    uvloop.run(_main())
