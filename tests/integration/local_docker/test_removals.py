"""A container that is being removed still has its name: whoever needs that waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common import pods
from services.common.tokens import generate_key, public_pem
from services.local.docker.container import platform_of
from services.local.docker.engine import Engine
from services.local.docker.runtime import DockerRuntime
from services.local.docker.setup import prepared
from services.local.runtime.model import Request, new_uid
from tests.support.engine import BUSYBOX, TestEngine
from tests.support.payload import built_payload

ATTEMPTS = 6
REMOVE = Engine.remove
PEM = public_pem(generate_key()).decode()
NOTES = {pods.SANDBOX_ID: "a", pods.SPEC: pods.encode_spec(b""), pods.EXPECTS_SECRET_ENV: "0"}
# A container with many files takes a while to remove.
MANY_FILES = "mkdir /files; cd /files; i=0; while [ $i -lt {count} ]; do i=$((i+1)); : >$i; done"


async def test_a_start_waits_until_an_earlier_attempt_is_gone(
    engine: TestEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 0

    async def counted(self: Engine, container: str) -> bool:
        nonlocal refusals
        removed = await REMOVE(self, container)
        refusals += not removed and await self.inspect(container) is not None
        return removed

    monkeypatch.setattr(Engine, "remove", counted)
    async with prepared(
        tmp_path / "data",
        tmp_path,
        built_payload(),
        may_pull=False,
        concurrent_starts=1,
        public_keys_pem=lambda: PEM,
        environment=engine.environment,
    ) as runtime:
        for attempt in range(1, ATTEMPTS + 1):
            await start_while_it_is_removed(engine, runtime, platform_of(tmp_path / "data"), 2000 * attempt)
            if refusals:
                break
    assert refusals, "every removal was over before the start asked for its own"
    assert engine.containers() == []


async def start_while_it_is_removed(engine: TestEngine, runtime: DockerRuntime, platform: str, files: int) -> None:
    uid = new_uid()
    name = f"orchard-{platform}-{uid}"
    engine.docker("run", "--name", name, BUSYBOX, "sh", "-c", MANY_FILES.format(count=files))
    async with Engine.connected(engine.socket) as other:
        removing = asyncio.create_task(REMOVE(other, name))
        try:
            await runtime.create(Request(uid, "a", image=BUSYBOX, annotations=NOTES), None)
            assert engine.inspect(name)["State"]["Status"] == "running"
        finally:
            await removing
            await runtime.delete(uid)
