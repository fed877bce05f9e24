"""The judge service as a process, against a real PostgreSQL and a model server on loopback.

One process serves all tests that neither kill nor configure it, each as a tenant of its own; the model server has the
same port for all, so that the process finds it whichever test it is of.
"""

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from orchard.judge.v1 import judge_pb2, judge_service_pb2_grpc
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from services.common.db import migrate
from services.common.peer_status import peer_status
from services.common.tokens import PRINCIPAL_KEY, Principal, Signer
from services.judge.__main__ import MIGRATIONS
from services.judge.store.tables import SCHEMA
from tests.support.health import wait_reached
from tests.support.judge_server import JudgeServer, running_judge

ATTEMPTS = 3


@pytest.fixture(scope="session")
def database(postgres_url: str) -> str:
    migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
    return postgres_url


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="session")
def model_socket() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield listening


@pytest.fixture
async def server(model_socket: socket.socket) -> AsyncIterator[JudgeServer]:
    async with running_judge(model_socket) as judge:
        yield judge


@dataclass
class ServiceProcess:
    """The service; can be killed and started again. `tenant`: of the test that uses it.

    All that share a database share `objects`, as replicas do.
    """

    database: str
    objects: Path
    folder: Path
    judges: list[dict[str, Any]]
    connections: int
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    process: subprocess.Popen[bytes] | None = None
    tenant: str = field(default_factory=lambda: f"t-{secrets.token_hex(4)}")

    @property
    def address(self) -> str:
        return f"unix:{self.folder / 's'}"

    def start(self) -> None:
        public, judges = self.folder / "public.pem", self.folder / "judges.json"
        public.write_bytes(self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        judges.write_text(json.dumps(self.judges))
        environment = os.environ | {
            "ORCHARD_LISTEN": self.address,
            "ORCHARD_DATABASE_URL": self.database,
            "ORCHARD_OBJECT_STORE_URL": self.objects.as_uri(),
            "ORCHARD_DATABASE_CONNECTIONS": str(self.connections),
            "ORCHARD_PUBLIC_KEYS_FILE": str(public),
            "ORCHARD_JUDGES_FILE": str(judges),
        }
        self.process = subprocess.Popen((sys.executable, "-m", "services.judge"), env=environment)
        wait_reached(self.address)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(110)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(110)

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return ((PRINCIPAL_KEY, Signer(self.key).principal_token(Principal(tenant, "key", frozenset({"user"})))),)


def judges_at(port: int) -> list[dict[str, Any]]:
    """A model behind HTTP, another one there, and the scripted judge."""
    model = {
        "kind": "openai",
        "model": "judge-1",
        "base_url": f"http://127.0.0.1:{port}/v1",
        "attempts": ATTEMPTS,
        "first_delay_seconds": 0.01,
        "timeout_seconds": 60,
        "prompt_usd_per_million": 2,
        "cached_usd_per_million": 1,
        "completion_usd_per_million": 10,
    }
    return [
        {"name": "model", **model},
        {"name": "other", **model, "model": "judge-2"},
        {"name": "script", "kind": "scripted", "script": [{"contains": "Do it", "score": 0.3}]},
    ]


class Calls:
    """What tests call: each method of the stub with a tenant's principal."""

    def __init__(self, process: ServiceProcess, channel: grpc.aio.Channel, tenant: str = "") -> None:
        self.process, self.channel, self.tenant = process, channel, tenant or process.tenant
        self.stub = judge_service_pb2_grpc.JudgeServiceStub(channel)

    def of(self, tenant: str) -> "Calls":
        return Calls(self.process, self.channel, f"{self.tenant}-{tenant}")

    def __getattr__(self, name: str):
        method = getattr(self.stub, name)
        return lambda request: method(request, metadata=self.process.metadata(self.tenant), timeout=90)

    async def judge(
        self,
        *attempts: list[trajectory_pb2.Step],
        images: dict[str, bytes] | None = None,
        request_id: str = "",
        **fields: Any,
    ) -> judge_pb2.Verdict:
        parts = [pb.JudgeRequest(judgement=judgement(**fields), request_id=request_id)]
        parts += [pb.JudgeRequest(**piece) for piece in pieces(attempts or (STEPS,), images or {})]

        async def requests() -> AsyncIterator[pb.JudgeRequest]:
            for part in parts:
                yield part

        call = self.Judge(requests())
        with peer_status(call):
            return (await call).verdict

    async def batch(
        self, batch_id: str, items: dict[str, dict[str, Any]], **start: Any
    ) -> tuple[dict[str, judge_pb2.Verdict], list[pb.BatchProgress]]:
        verdicts: dict[str, judge_pb2.Verdict] = {}
        progress = []
        call = self.JudgeBatch(batch_requests(batch_id, items, **start))
        with peer_status(call):
            async for response in call:
                if response.HasField("progress"):
                    progress.append(response.progress)
                    continue
                for item in response.verdicts.verdicts if response.HasField("verdicts") else (response.verdict,):
                    assert item.item_id not in verdicts
                    verdicts[item.item_id] = item.verdict
        return verdicts, progress


async def batch_requests(
    batch_id: str, items: dict[str, dict[str, Any]], **start: Any
) -> AsyncIterator[pb.JudgeBatchRequest]:
    yield pb.JudgeBatchRequest(start=pb.BatchStart(batch_id=batch_id, **start))
    for item_id, fields in items.items():
        given = dict(fields)
        steps = given.pop("steps", STEPS)
        yield pb.JudgeBatchRequest(item=pb.ItemStart(item_id=item_id, judgement=judgement(**given)))
        for piece in pieces((steps,), {}):
            yield pb.JudgeBatchRequest(**piece)
        yield pb.JudgeBatchRequest(end=pb.ItemEnd())


def step(index: int, text: str = "", role: int = trajectory_pb2.ROLE_ASSISTANT, **fields: Any) -> trajectory_pb2.Step:
    content = [{"text": text or f"step {index}"}]
    return trajectory_pb2.Step(index=index, role=role, **({"content": content} | fields))


STEPS = [step(0, "Do it.", trajectory_pb2.ROLE_USER), step(1, "Done.")]


def judgement(kind: str = "OUTCOME", **fields: Any) -> judge_pb2.Judgement:
    number = judge_pb2.JudgementKind.Value(f"JUDGEMENT_KIND_{kind}")
    return judge_pb2.Judgement(**({"kind": number, "instruction": "Do it."} | fields))


def pieces(attempts: Any, images: dict[str, bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, steps in enumerate(attempts):
        found += [{"steps": pb.AttemptSteps(attempt=number, steps=[one])} for one in steps]
    for sha256, data in images.items():
        for start in range(0, len(data), 3):
            chunk = pb.ImageChunk(sha256=sha256, media_type="image/png", data=data[start : start + 3])
            found.append({"image": chunk})
    return found


def image(data: bytes) -> tuple[str, dict[str, Any]]:
    """The hash of an image, and a part of a step that refers to it."""
    sha256 = hashlib.sha256(data).hexdigest()
    return sha256, {"blob": {"sha256": sha256, "size": len(data), "media_type": "image/png"}}


@contextmanager
def running(database: str, objects: Path, port: int, connections: int = 12) -> Iterator[ServiceProcess]:
    """A service for the time of the context."""
    with tempfile.TemporaryDirectory(prefix="oj-") as folder:
        service = ServiceProcess(database, objects, Path(folder), judges_at(port), connections)
        service.start()
        try:
            yield service
        finally:
            assert service.process is not None
            if service.process.poll() is None:
                assert service.stop() == 0


@pytest.fixture
def process(database: str, objects: Path, server: JudgeServer) -> Iterator[ServiceProcess]:
    """A process of the test's own, to kill and to stop; with as few connections as it can do with."""
    with running(database, objects, server.port, 3) as service:
        yield service


@pytest.fixture(scope="session")
def shared(database: str, objects: Path, model_socket: socket.socket) -> Iterator[ServiceProcess]:
    """The process of all other tests."""
    with running(database, objects, model_socket.getsockname()[1]) as service:
        yield service


@pytest.fixture
async def calls(shared: ServiceProcess, server: JudgeServer) -> AsyncIterator[Calls]:
    """As a tenant that nobody else is."""
    async with grpc.aio.insecure_channel(shared.address) as channel:
        yield Calls(shared, channel, f"t-{secrets.token_hex(4)}")
