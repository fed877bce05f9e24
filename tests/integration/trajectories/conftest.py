"""A trajectory service as a process of its own, on a real PostgreSQL and a folder."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from orchard.trajectory.v1 import trajectory_pb2, trajectory_service_pb2, trajectory_service_pb2_grpc

from services.common.db import migrate
from services.common.peer_status import peer_status
from services.common.tokens import PRINCIPAL_KEY, Principal, Signer
from services.trajectories.__main__ import MIGRATIONS
from services.trajectories.store.tables import SCHEMA
from tests.support.health import wait_reached

TABLES = (
    "trajectories, steps, tools, annotations, rewards, step_values, blobs, blob_references, garbage, groups, samples"
)


@pytest.fixture(scope="session")
def database(postgres_url: str) -> str:
    migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
    return postgres_url


@dataclass
class ServiceProcess:
    """The service; can be killed and started again."""

    database: str
    folder: Path
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.folder / 's'}"

    def start(self) -> None:
        public = self.folder / "public.pem"
        public.write_bytes(self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        environment = os.environ | {
            "ORCHARD_LISTEN": self.address,
            "ORCHARD_DATABASE_URL": self.database,
            "ORCHARD_OBJECT_STORE_URL": f"file://{self.folder / 'objects'}",
            "ORCHARD_PUBLIC_KEYS_FILE": str(public),
        }
        command = (sys.executable, "-m", "services.trajectories")
        self.process = subprocess.Popen(command, env=environment)
        wait_reached(self.address)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(110)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(110)

    def metadata(self, tenant: str = "default") -> tuple[tuple[str, str], ...]:
        return ((PRINCIPAL_KEY, Signer(self.key).principal_token(Principal(tenant, "key", frozenset({"user"})))),)


@pytest.fixture(scope="module")
def process(database: str) -> Iterator[ServiceProcess]:
    with tempfile.TemporaryDirectory(prefix="ot-") as folder:
        service = ServiceProcess(database, Path(folder))
        service.start()
        yield service
        assert service.stop() == 0


class Calls:
    """What tests call: each method of the stub with a tenant's principal."""

    def __init__(self, process: ServiceProcess, channel: grpc.aio.Channel, tenant: str = "default") -> None:
        self.process, self.channel, self.tenant = process, channel, tenant
        self.stub = trajectory_service_pb2_grpc.TrajectoryServiceStub(channel)

    def of(self, tenant: str) -> "Calls":
        return Calls(self.process, self.channel, tenant)

    def __getattr__(self, name: str):
        method = getattr(self.stub, name)
        return lambda request: method(request, metadata=self.process.metadata(self.tenant), timeout=60)

    async def create(self, trajectory_id: str, **fields) -> trajectory_pb2.Trajectory:
        message = trajectory_pb2.Trajectory(trajectory_id=trajectory_id, **fields)
        request = trajectory_service_pb2.CreateTrajectoryRequest(trajectory=message)
        return (await self.CreateTrajectory(request)).trajectory

    async def append(self, trajectory_id: str, *batches, writer: str = "w", take_over: bool = False) -> int:
        start = trajectory_service_pb2.AppendStart(trajectory_id=trajectory_id, writer=writer, take_over=take_over)

        async def requests():
            yield trajectory_service_pb2.AppendStepsRequest(start=start)
            for batch in batches:
                yield trajectory_service_pb2.AppendStepsRequest(steps={"steps": batch})

        call = self.AppendSteps(requests())
        with peer_status(call):
            return (await call).next_index

    async def seal(self, trajectory_id: str, status=trajectory_pb2.TRAJECTORY_STATUS_COMPLETED, **fields):
        request = trajectory_service_pb2.SealTrajectoryRequest(trajectory_id=trajectory_id, status=status, **fields)
        return (await self.SealTrajectory(request)).trajectory

    async def get(self, trajectory_id: str) -> trajectory_service_pb2.GetTrajectoryResponse:
        return await self.GetTrajectory(trajectory_service_pb2.GetTrajectoryRequest(trajectory_id=trajectory_id))

    async def read(self, trajectory_id: str, first: int = 0) -> list[trajectory_pb2.Step]:
        request = trajectory_service_pb2.ReadStepsRequest(trajectory_id=trajectory_id, from_index=first)
        return [step async for response in self.ReadSteps(request) for step in response.steps]

    async def packed(self, trajectory_id: str) -> trajectory_pb2.Trajectory:
        """Wait until a sealed trajectory is packed."""
        deadline = time.monotonic() + 110
        while not (found := (await self.get(trajectory_id)).trajectory).content_hash:
            assert time.monotonic() < deadline
        return found


@pytest.fixture
async def calls(process: ServiceProcess) -> AsyncIterator[Calls]:
    with psycopg.connect(process.database, autocommit=True) as connection:
        connection.execute("TRUNCATE " + ", ".join(f"{SCHEMA}.{name}" for name in TABLES.split(", ")))
    async with grpc.aio.insecure_channel(process.address) as channel:
        yield Calls(process, channel)


async def exported(calls: Calls, **wanted) -> list[trajectory_service_pb2.WholeTrajectory]:
    """An export in either form, as trajectories; none of its messages is larger than a mebibyte."""
    found: list[trajectory_service_pb2.WholeTrajectory] = []
    ended = True
    async for response in calls.ExportTrajectories(trajectory_service_pb2.ExportTrajectoriesRequest(**wanted)):
        assert response.ByteSize() <= 1 << 20
        if response.whole:
            assert wanted.get("several")
            assert ended, "a trajectory within the pieces of another"
            found += response.whole
            continue
        if response.HasField("trajectory"):
            assert ended
            found.append(
                trajectory_service_pb2.WholeTrajectory(trajectory=response.trajectory, step_values=response.step_values)
            )
            ended = False
        if response.steps:
            found[-1].steps.extend(response.steps)
        if response.resume_token:
            found[-1].resume_token = response.resume_token
            ended = True
    assert ended
    return found


def step(index: int, text: str = "", role=trajectory_pb2.ROLE_ASSISTANT, **fields) -> trajectory_pb2.Step:
    return trajectory_pb2.Step(index=index, role=role, content=[{"text": text or f"step {index}"}], **fields)


def steps(count: int, first: int = 0) -> list[trajectory_pb2.Step]:
    return [step(index) for index in range(first, first + count)]
