"""Composition root of the judge service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from orchard.judge.v1 import judge_service_pb2_grpc

from services.common.auth import PrincipalAuthenticator
from services.common.backoff import Backoff
from services.common.db import connect
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.objects import ObjectStore
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.common.tokens import INTERNAL_AUDIENCE, PublicKeysFile, Verifier
from services.judge.backends.endpoint import make_endpoint
from services.judge.backends.settings import load_judges
from services.judge.batches import Batches
from services.judge.held import Held
from services.judge.journal import Answers
from services.judge.rubric_shelf import RubricShelf
from services.judge.service import Judging
from services.judge.servicer import JudgeServicer
from services.judge.settings import JudgeServiceSettings
from services.judge.store.calls import CallStore
from services.judge.store.claims import ClaimStore
from services.judge.store.endings import EndingStore
from services.judge.store.lanes import Lines
from services.judge.store.locks import QuestionLocks
from services.judge.store.rubrics import RubricStore
from services.judge.store.texts import TextStore
from services.judge.store.turns import Turns
from services.judge.store.verdicts import VerdictStore

SERVICE_NAMES: Final = ("orchard.judge.v1.JudgeService",)
DEPENDENCY: Final = "database"
_LANES: Final = 4
_PROBE_SECONDS: Final = 5.0


@asynccontextmanager
async def run(settings: JudgeServiceSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the judge service while the context is open."""
    health = Health([DEPENDENCY])
    url, connections = settings.database_url.get_secret_value(), settings.database_connections
    engine = connect(url, pool_size=connections, tls=settings.database_tls())
    # The locks keep one, and of the others at least one is not kept.
    lines = Lines(engine, min(_LANES, connections - 2))
    database = Turns(engine, max(connections - 1 - _LANES, 1))
    store, locks = VerdictStore(database), QuestionLocks(engine, lines)
    claims, calls, endings = ClaimStore(lines), CallStore(database, lines), EndingStore(lines)
    shelf = RubricShelf(RubricStore(database), _now)
    verifier = Verifier(PublicKeysFile(settings.public_keys_file), INTERNAL_AUDIENCE)
    server = Server(
        interceptor=CallInterceptor(authenticator=PrincipalAuthenticator(verifier), telemetry=telemetry),
        health=health,
        service_names=SERVICE_NAMES,
    )
    answers = Answers(ObjectStore(settings.object_store_url), TextStore(database), server.stopping)
    endpoints = {judge.name: make_endpoint(judge, server.stopping) for judge in load_judges(settings.judges_file)}
    judging = Judging(endpoints, store, claims, calls, endings, shelf, locks, answers, _now, lines)
    batches, held = Batches(judging, store, _now), Held(settings.most_held_bytes)
    servicer = JudgeServicer(judging, batches, shelf, calls, answers, server.stopping, settings.most_judgements, held)
    judge_service_pb2_grpc.add_JudgeServiceServicer_to_server(servicer, server.grpc_server)

    async def probe() -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                await store.probe()
            except UnavailableError as error:
                await health.unwell(DEPENDENCY, error.message)
                await asyncio.sleep(backoff.next())
            else:
                backoff.reset()
                await health.well(DEPENDENCY)
                await asyncio.sleep(_PROBE_SECONDS)

    if telemetry is not None:
        telemetry.gauge("orchard.judge.judgements", "Judgements under way.", lambda: {"running": servicer.running})
        telemetry.gauge("orchard.judge.held", "Bytes that judgements hold.", lambda: {"bytes": held.bytes})
    tasks.start("probe the database", probe())
    tasks.start("move answers to the object store", answers.move())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds)
        await tasks.close()
        for endpoint in endpoints.values():
            await endpoint.close()
        for lanes in (claims, calls, endings, locks, lines):
            await lanes.close()
        await database.close()


def _now() -> datetime:
    return datetime.now(UTC)
