"""`python -m tests.bench.model_server`: a model server that judges at once; writes its port, ends with its stdin."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from tests.support.judge_server import running_judge


async def _serve() -> None:
    async with running_judge() as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
