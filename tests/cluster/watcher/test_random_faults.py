"""Random changes under random faults, by a seed; after each round the cache says what the API server says."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.cluster.watcher.pods import Truth, watching
from tests.cluster.watcher.test_faults import EXPIRED, HTML, PAGE
from tests.support.api_proxy import ApiProxy, Connection, Reply

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3"))
STEPS = 25


class Chaos:
    def __init__(self, rng: random.Random, truth: Truth, proxy: ApiProxy) -> None:
        self.rng = rng
        self.truth = truth
        self.proxy = proxy
        self.names: list[str] = []
        self.over: set[str] = set()
        """Pods that have ended: no kubelet ever lets one run again, and to the watcher an end is an end."""
        self.made = 0
        self.log: list[str] = []

    async def change(self) -> None:
        rng = self.rng
        if len(self.names) < 3 or rng.random() < 0.3:
            self.made += 1
            self.names.append(f"r{self.made}")
            await self.truth.create(self.names[-1])
            self.log.append(f"create {self.names[-1]}")
            return
        name = rng.choice(self.names)
        what = rng.choice(["annotate", "annotate", "delete", "recreate", "unselect", "select", "status"])
        self.log.append(f"{what} {name}")
        if what == "annotate":
            await self.truth.annotate(name, n=str(rng.random()))
        elif what in ("unselect", "select"):
            await self.truth.select(name, what == "select")
        elif what == "status":
            phase = "Failed" if name in self.over else rng.choice(["Running", "Failed"])
            if phase == "Failed":
                self.over.add(name)
            await self.truth.status(name, phase=phase, reason=rng.choice(["Evicted", "Shutdown"]))
        else:
            await self.truth.delete(name)
            self.over.discard(name)
            if what == "recreate":
                await self.truth.create(name)
            else:
                self.names.remove(name)

    async def harm(self) -> None:
        rng, proxy = self.rng, self.proxy
        kind = rng.choice(["watch", "list", ""])
        replies = [
            Reply(410, b'{"kind":"Status","code":410,"reason":"Expired"}'),
            Reply(429, b"", {"Retry-After": "0.1"}),
            Reply(500, PAGE, HTML),
            Reply(504, PAGE, HTML),
            Reply(200, PAGE, HTML),
            Reply(200, b"", lines=True),
            Reply(200, EXPIRED, lines=True),
            Reply(401),
            Reply(422),
        ]
        harms: dict[str, Callable[[], Awaitable[None]]] = {
            "cut": self._now(proxy.cut),
            "reply": self._now(lambda: proxy.reply(rng.choice(replies), to=kind)),
            "reply and cut": self._now(lambda: (proxy.reply(rng.choice(replies), to=kind), proxy.cut())),
            "end": lambda: proxy.inject(b"\n", end=True),
            "expire": lambda: proxy.inject(EXPIRED, end=True),
            "nonsense": lambda: proxy.inject(rng.choice([b"{}\n", b"\x00\n", b'{"type":"ADDED","object":{}}\n', PAGE])),
            "truncate": self._now(lambda: proxy.harm(self._truncate)),
            "repeat": self._now(lambda: (proxy.repeat(lambda lines: rng.sample(lines, len(lines))), proxy.cut())),
            "stall": self._now(proxy.stall),
            "flow": self._now(proxy.flow),
            "refuse": self._now(lambda: setattr(proxy, "refusing", not proxy.refusing)),
        }
        name = rng.choice(list(harms))
        self.log.append(f"- {name}")
        await harms[name]()

    @staticmethod
    def _now(work: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            work()

        return run

    async def _truncate(self, connection: Connection, line: bytes) -> bool:
        await connection.send(line[: self.rng.randrange(len(line))] or b" ")
        if self.rng.random() < 0.5:
            connection.end()
        else:
            connection.abort()
        return False


async def rounds(seed: int, count: int, truth: Truth, proxy: ApiProxy, kubeconfig: Path) -> None:
    chaos = Chaos(random.Random(seed), truth, proxy)
    async with watching(kubeconfig) as watched:
        for _ in range(count):
            for _ in range(STEPS):
                await (chaos.change() if chaos.rng.random() < 0.6 else chaos.harm())
                # Sometimes the watcher sees it before the next, sometimes several at once.
                for _ in range(chaos.rng.choice([0, 0, 1, 50])):
                    await asyncio.sleep(0)
            proxy.refusing = False
            proxy.flow()
            try:
                await watched.agrees(truth)
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"seed {seed}: after\n" + "\n".join(chaos.log)) from error


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_random_faults(truth: Truth, proxy: ApiProxy, kubeconfig: Path, seed: int) -> None:
    await rounds(seed, 3, truth, proxy, kubeconfig)


@pytest.mark.chaos
async def test_many_random_faults(truth: Truth, proxy: ApiProxy, kubeconfig: Path) -> None:
    await rounds(SEED, 10 * ROUNDS, truth, proxy, kubeconfig)
