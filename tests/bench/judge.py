"""The judge service through gateway and SDK, with a model server on loopback that answers at once."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import orchard
from orchard import Judgement, Step

from tests.bench.measure import Figures, percentile, rss_bytes, timed
from tests.bench.processors import Processors
from tests.support.health import SERVING, wait_health
from tests.support.platform import ROOT, PlatformProcess

_PATIENCE_SECONDS = 300.0
_STEPS = 40


async def measure(platform: PlatformProcess, client: orchard.AsyncSandboxClient, *, full: bool) -> Figures:
    """What a verdict takes beside the model: alone, of many at once, and found again."""
    async with asyncio.timeout(_PATIENCE_SECONDS * (4 if full else 1)), _model_server(platform) as port:
        count = 400 if full else 50
        for number in range(20):
            await client.judge.run(_asked(f"warm {number}"))
        alone, floor, found = [], [], []
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:

            async def model() -> None:
                async with http.post("/v1/chat/completions", json=_BODY) as response:
                    await response.read()

            for number in range(count):
                judgement = _asked(f"alone {number}")
                alone.append(await timed(partial(client.judge.run, judgement)))
                floor.append(await timed(model))
                found.append(await timed(partial(client.judge.run, judgement)))
        many = 10_000 if full else 400
        processors = Processors(platform)
        started = time.perf_counter()
        judge, judged, early = platform.service_pid("judge"), 0, 0
        async for item in client.judge.batch("bench", _items(many)):
            assert item.verdict.state == "scored", item.verdict.message
            judged += 1
            if judged == many // 10:
                early = rss_bytes(judge)
        seconds = time.perf_counter() - started
        assert judged == many
        return {
            "overhead_p50": round(percentile(alone, 0.5) - percentile(floor, 0.5), 2),
            "cache_hit_p50": percentile(found, 0.5),
            "model_p50": percentile(floor, 0.5),
            "verdicts_per_second": round(many / seconds, 1),
            "judge_rss": rss_bytes(judge),
            # From a tenth of the batch on.
            "judge_rss_growth": rss_bytes(judge) - early,
            "cpu_each": processors.each(many),
        }


async def _items(count: int) -> AsyncIterator[tuple[str, Judgement]]:
    for number in range(count):
        yield f"i{number}", _asked(f"many {number}")


def _asked(instruction: str) -> Judgement:
    """Forty steps of a few hundred characters each, as a short rollout has."""
    steps = [Step.assistant(f"step {number}: " + "I look at it and change a line. " * 10) for number in range(_STEPS)]
    return Judgement("outcome", instruction, [Step.user(instruction), *steps])


_SCHEMA = {"properties": {"verdict": {"enum": ["success", "failure", None]}}}
_BODY = {
    "messages": [{"role": "system", "content": '"ticket": the string "0"'}],
    "response_format": {"json_schema": {"schema": _SCHEMA}},
}


@asynccontextmanager
async def _model_server(platform: PlatformProcess) -> AsyncIterator[int]:
    """A model server that the platform's judge asks; gives its port."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.model_server"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = int(await server.stdout.readline())
        judge = {"name": "instant", "kind": "openai", "base_url": f"http://127.0.0.1:{port}/v1", "model": "judge-1"}
        (platform.data / "judges.json").write_text(json.dumps([judge]))
        before = platform.kill_service("judge")
        await asyncio.to_thread(platform.wait_ready, "judge", not_pid=before)
        await wait_health(platform.address("judge"), SERVING)
        yield port
    finally:
        server.stdin.close()
        await server.wait()
