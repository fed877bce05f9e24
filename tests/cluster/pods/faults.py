"""What goes wrong. Each fault is there while its context is open; at its end what was killed is started again, as a
kubelet or a machine does. It may not serve then: of two faults the other one may be what it needs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import redis.asyncio as redis

from tests.support.pod_platform import PodPlatform
from tests.support.services import ServiceProcess
from tests.support.testbed_process import TestbedProcess

FULL = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1")) > 1
AWAY_SECONDS = 60 if FULL else 20
"""How long an API server is away."""

Fault = Callable[[PodPlatform, random.Random], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def killed(*services: ServiceProcess, rng: random.Random) -> AsyncIterator[None]:
    for service in services:
        service.kill()
    try:
        yield
        await asyncio.sleep(rng.uniform(0, 1))  # somebody has to notice
    finally:
        for service in services:
            service.start()


def gateway(platform: PodPlatform, rng: random.Random) -> AbstractAsyncContextManager[None]:
    return killed(platform.gateway, rng=rng)


def scheduler(platform: PodPlatform, rng: random.Random) -> AbstractAsyncContextManager[None]:
    return killed(rng.choice(platform.schedulers), rng=rng)


def schedulers(platform: PodPlatform, rng: random.Random) -> AbstractAsyncContextManager[None]:
    return killed(*platform.schedulers, rng=rng)


def watcher(platform: PodPlatform, rng: random.Random) -> AbstractAsyncContextManager[None]:
    return killed(rng.choice(platform.watchers), rng=rng)


def watchers(platform: PodPlatform, rng: random.Random) -> AbstractAsyncContextManager[None]:
    return killed(*platform.watchers, rng=rng)


@asynccontextmanager
async def store_emptied(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    """And the scheduler that may be the elected one is dead: another one has to take its place first."""
    async with killed(rng.choice(platform.schedulers), rng=rng):
        async with redis.Redis.from_url(platform.valkey.url) as store:
            assert await store.dbsize() > 0
            await store.flushall()
        yield


@asynccontextmanager
async def store_restarted(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    platform.valkey.kill()
    await asyncio.sleep(rng.uniform(0, 0.5))
    await platform.valkey.start()
    yield


@asynccontextmanager
async def store_away(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    """Longer than a call to it may take."""
    platform.valkey.kill()
    try:
        yield
        await asyncio.sleep(rng.uniform(5, 8))
    finally:
        await platform.valkey.start()


@asynccontextmanager
async def api_server_away(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    server = TestbedProcess(platform.testbed, "kube-apiserver")
    server.kill()
    try:
        yield
        await asyncio.sleep(AWAY_SECONDS)
    finally:
        server.start()
    await answers(platform)


@asynccontextmanager
async def api_server_stands_still(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    """Connections stay, and nothing comes on them."""
    server = TestbedProcess(platform.testbed, "kube-apiserver")
    server.pause()
    try:
        yield
        await asyncio.sleep(AWAY_SECONDS)
    finally:
        server.resume()
    await answers(platform)


async def answers(platform: PodPlatform) -> None:
    async with asyncio.timeout(120):
        while (await asyncio.to_thread(platform.testbed.kubectl, "get", "--raw", "/readyz", check=False)) != "ok":
            await asyncio.sleep(0.1)


@asynccontextmanager
async def containerd(platform: PodPlatform, rng: random.Random) -> AsyncIterator[None]:
    daemon = TestbedProcess(platform.testbed, "containerd")
    daemon.kill()
    try:
        yield
        await asyncio.sleep(rng.uniform(0, 2))
    finally:
        daemon.start()


API_SERVER: tuple[Fault, ...] = (api_server_away, api_server_stands_still)
# Of one kind is what must not happen to a part twice at once.
KINDS: tuple[tuple[Fault, ...], ...] = (
    (gateway,),
    (schedulers, scheduler),
    (watchers, watcher),
    (store_away, store_restarted),
    API_SERVER,
    (containerd,),
)
ALL = (*(fault for kind in KINDS for fault in kind), store_emptied)
CHOSEN = ALL if FULL else (*(kind[0] for kind in KINDS), store_emptied)
