"""Trajectories while parts of the platform are killed, away, or without room.

What was acknowledged is there, once, byte by byte, and whoever reads sees a prefix.

Three rounds over hundreds of trajectories by default; `make chaos` makes it twenty over a thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import resource
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc.aio
import orchard
import pytest
from google.rpc import error_details_pb2
from orchard import Step
from orchard._client.trajectories.writer import prepared
from orchard.trajectory.v1 import trajectory_pb2, trajectory_service_pb2, trajectory_service_pb2_grpc

from services.common.peer_status import peer_status
from tests.support.health import SERVING, wait_health
from tests.support.platform import PlatformProcess, running_platform
from tests.support.wire import Wire, details, reason_of, wire_to

ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
TRAJECTORIES = 200 if ROUNDS <= 3 else 1000
READERS = 4
LONG = 100_000
# One of so many steps is a text that is stored as a body of its own.
LONG_EVERY = 97
PATIENCE = 300.0


def text_of(name: str, index: int) -> str:
    """The text of a step, the same wherever it is asked for."""
    digest = hashlib.sha256(f"{name} {index}".encode())
    length = LONG if digest.digest()[0] % LONG_EVERY == 0 and index % 7 == 3 else digest.digest()[1] * 4
    line = f"{name} {index} {digest.hexdigest()}\n"
    return line + line * (length // len(line))


def message_of(name: str, index: int) -> bytes:
    """A step as it must come back."""
    message, _bodies = prepared(Step.user(text_of(name, index)))
    message.index = index
    return message.SerializeToString(deterministic=True)


def is_prefix(name: str, steps: list[trajectory_pb2.Step]) -> bool:
    found = [step.SerializeToString(deterministic=True) for step in steps]
    return found == [message_of(name, index) for index in range(len(found))]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("kills")) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    # Between two kills on a busy machine not all of a thousand writers get through; none may give up before the last.
    patience = PATIENCE * max(1.0, ROUNDS / 3)
    client = orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key, retry_timeout=patience)
    async with client:
        await client.version()  # from now on an outage is an outage, and no wrong address
        yield client


class Writers:
    """Many trajectories that are written at once, and what was acknowledged of each."""

    def __init__(self, client: orchard.AsyncSandboxClient, seed: str) -> None:
        self.client = client
        self.label = f"k-{secrets.token_hex(6)}"
        self.names = [f"{self.label}-{number}" for number in range(TRAJECTORIES)]
        self.acknowledged = dict.fromkeys(self.names, 0)
        self._seed = seed
        self._stop = asyncio.Event()

    async def write(self, name: str) -> None:
        rng = random.Random(f"{self._seed} {name}")
        trajectory = await self.client.trajectories.create(trajectory_id=name, labels={"of": self.label})
        while not self._stop.is_set() or self.acknowledged[name] == 0:
            first = self.acknowledged[name]
            steps = [Step.user(text_of(name, index)) for index in range(first, first + rng.randint(1, 8))]
            self.acknowledged[name] = await trajectory.append(*steps)
            assert self.acknowledged[name] == first + len(steps)
        await trajectory.seal()

    async def read(self, number: int) -> None:
        """Whoever reads sees what was acknowledged before, and never a hole or another byte."""
        rng = random.Random(f"{self._seed} {number}")
        reads = 0
        while reads == 0 or not self._stop.is_set():
            name = rng.choice(self.names)
            before = self.acknowledged[name]
            if before == 0:
                await asyncio.sleep(0.01)  # nothing to see yet
                continue
            found = [step async for step in self.client.trajectories.export(trajectory_ids=name)]
            (one,) = found
            assert len(one.step_messages) >= before
            assert is_prefix(name, list(one.step_messages))
            reads += 1

    async def progress(self) -> None:
        """Return once more is acknowledged than now."""
        before = sum(self.acknowledged.values())
        async with asyncio.timeout(PATIENCE):
            while sum(self.acknowledged.values()) == before:
                await asyncio.sleep(0.01)  # the writers' next answer

    async def run(self, disturb: Callable[[], Awaitable[None]]) -> None:
        """Write and read while `disturb` does its worst; then everything must be there."""
        async with asyncio.TaskGroup() as tasks:
            for name in self.names:
                tasks.create_task(self.write(name))
            for number in range(READERS):
                tasks.create_task(self.read(number))
            try:
                await disturb()
            finally:
                self._stop.set()

    async def check(self) -> None:
        """Every acknowledged step is there once and as it was sent, and every trajectory is whole."""
        seen = {}
        async for one in self.client.trajectories.export(labels={"of": self.label}):
            assert one.info.status is orchard.TrajectoryStatus.COMPLETED
            assert is_prefix(one.trajectory_id, list(one.step_messages))
            seen[one.trajectory_id] = len(one.step_messages)
        assert seen == self.acknowledged
        long = [(name, i) for name in self.names for i in range(seen[name]) if len(text_of(name, i)) > LONG]
        for name, index in long[:20]:
            async for step in self.client.trajectories.steps(name, start=index):
                assert await self.client.trajectories.text(step) == text_of(name, index)
                break


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("service", ["trajectories", "postgres", "gateway"])
async def test_killed_under_appends(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient, service: str
) -> None:
    rng = random.Random(f"{SEED} {service}")

    async def kill_again_and_again() -> None:
        for _ in range(ROUNDS):
            await writers.progress()
            await asyncio.sleep(rng.uniform(0.2, 2.0))  # somewhere in the middle, wherever the seed says
            killed = await asyncio.to_thread(platform.kill_service, service)
            await asyncio.to_thread(platform.wait_ready, service, not_pid=killed, seconds=PATIENCE)

    writers = Writers(client, f"{SEED} {service}")
    await writers.run(kill_again_and_again)
    await writers.check()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_a_database_that_is_away_and_comes_back(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient
) -> None:
    async def take_away() -> None:
        loop = asyncio.get_running_loop()
        for hold in (platform.held_down, platform.paused):
            await writers.progress()
            holding = hold("postgres")
            await loop.run_in_executor(None, holding.__enter__)
            try:
                await appends_are_put_off(platform)
            finally:
                await loop.run_in_executor(None, holding.__exit__, None, None, None)
            await wait_health(platform.address("trajectories"), SERVING)

    writers = Writers(client, f"{SEED} away")
    await writers.run(take_away)
    await writers.check()


async def appends_are_put_off(platform: PlatformProcess) -> None:
    """UNAVAILABLE, and when to try again."""
    async with wire_to(platform.endpoint, platform.api_key) as wire:
        stub = trajectory_service_pb2_grpc.TrajectoryServiceStub(wire.channel)

        async def requests() -> AsyncIterator[trajectory_service_pb2.AppendStepsRequest]:
            start = trajectory_service_pb2.AppendStart(trajectory_id="any", writer="w")
            yield trajectory_service_pb2.AppendStepsRequest(start=start)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            call = stub.AppendSteps(requests(), metadata=wire.metadata, timeout=PATIENCE)
            with peer_status(call):
                await call
    is_put_off(caught.value, "DATABASE_UNAVAILABLE")


def is_put_off(error: grpc.aio.AioRpcError, reason: str) -> None:
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, reason)
    (retry,) = details(error)[error_details_pb2.RetryInfo]
    assert retry.retry_delay.ToMilliseconds() > 0


@contextlib.contextmanager
def no_room(platform: PlatformProcess) -> Iterator[None]:
    """The service can write no byte to any file."""
    pid = platform.service_pid("trajectories")
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def not_a_folder(platform: PlatformProcess) -> Iterator[None]:
    """A file is where the objects' folder should be."""
    folder = platform.data / "trajectories"
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_bytes(b"")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.parametrize("broken", [no_room, not_a_folder])
async def test_bodies_that_find_no_room_wait_and_nothing_else_does(
    platform: PlatformProcess,
    client: orchard.AsyncSandboxClient,
    wire: Wire,
    broken: Callable[[PlatformProcess], contextlib.AbstractContextManager[None]],
) -> None:
    long, short = [await client.trajectories.create() for _ in range(2)]
    text = secrets.token_hex(LONG)
    stub = trajectory_service_pb2_grpc.TrajectoryServiceStub(wire.channel)

    async def upload() -> AsyncIterator[trajectory_service_pb2.PutBlobRequest]:
        yield trajectory_service_pb2.PutBlobRequest(blob=trajectory_pb2.BlobReference(media_type="text/plain"))
        yield trajectory_service_pb2.PutBlobRequest(data=secrets.token_bytes(1000), end=True)

    with broken(platform):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            call = stub.PutBlob(upload(), metadata=wire.metadata, timeout=PATIENCE)
            with peer_status(call):
                await call
        is_put_off(caught.value, "OBJECT_STORE_UNAVAILABLE")
        appending = asyncio.ensure_future(long.append(Step.user("before"), Step.user(text)))
        # Short steps need no object store, nor does a seal: packing is put off.
        await short.append(Step.user("short"))
        await short.seal()
        assert [step.text async for step in client.trajectories.steps(short.trajectory_id)] == ["short"]
        assert not appending.done()
    assert await appending == 2
    await long.seal()
    steps = [step async for step in client.trajectories.steps(long.trajectory_id)]
    assert [await client.trajectories.text(step) for step in steps] == ["before", text]
    for trajectory in (long, short):
        async with asyncio.timeout(PATIENCE):
            while not (await client.trajectories.get(trajectory.trajectory_id)).content_hash:
                await asyncio.sleep(0.05)  # the packer's next try
    assert len([step async for step in client.trajectories.steps(long.trajectory_id)]) == 2
