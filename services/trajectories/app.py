"""Composition root of the trajectory service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from orchard.trajectory.v1 import group_service_pb2_grpc

from services.common.auth import PrincipalAuthenticator
from services.common.backoff import Backoff
from services.common.db import Database, connect
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.objects import ObjectStore
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.telemetry import Telemetry
from services.common.tokens import INTERNAL_AUDIENCE, PublicKeysFile, Verifier
from services.trajectories.appender import Appender
from services.trajectories.bodies import Bodies
from services.trajectories.exporting import Exporter
from services.trajectories.groups import Groups
from services.trajectories.housekeeping import Housekeeper
from services.trajectories.service import Trajectories
from services.trajectories.servicer import TrajectoryServicer
from services.trajectories.servicer_groups import GroupServicer
from services.trajectories.settings import TrajectoriesSettings
from services.trajectories.store.annotations import AnnotationStore
from services.trajectories.store.appends import AppendStore
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.changes import changes
from services.trajectories.store.groups import GroupStore
from services.trajectories.store.stats import StatsStore
from services.trajectories.store.trajectories import TrajectoryStore
from services.trajectories.store.wholes import WholeStore
from services.trajectories.wholes import Wholes

SERVICE_NAMES: Final = ("orchard.trajectory.v1.TrajectoryService", "orchard.trajectory.v1.GroupService")
DEPENDENCY: Final = "database"


@asynccontextmanager
async def run(settings: TrajectoriesSettings, tasks: TaskGroup, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """Run the trajectory service while the context is open."""
    health = Health([DEPENDENCY])
    url, connections = settings.database_url.get_secret_value(), settings.database_connections
    engine = connect(url, pool_size=connections, tls=settings.database_tls())
    database, objects = Database(engine), ObjectStore(settings.object_store_url)
    store, blobs, appender = TrajectoryStore(database), BlobIndex(database), Appender(AppendStore(database))
    housekeeper = Housekeeper(store, blobs, objects, _now, blob_grace_seconds=settings.blob_grace_seconds)
    trajectories = Trajectories(
        store, AnnotationStore(database), StatsStore(database), appender, objects, _now, sealed=housekeeper.wake
    )
    verifier = Verifier(PublicKeysFile(settings.public_keys_file), INTERNAL_AUDIENCE)
    server = Server(
        interceptor=CallInterceptor(authenticator=PrincipalAuthenticator(verifier), telemetry=telemetry),
        health=health,
        service_names=SERVICE_NAMES,
    )
    servicer = TrajectoryServicer(
        trajectories,
        Wholes(WholeStore(database), _now, sealed=housekeeper.wake),
        Exporter(store, objects),
        Bodies(blobs, objects, _now),
        server.stopping,
    )
    server.grpc_server.add_generic_rpc_handlers((servicer.handlers(),))
    group_service_pb2_grpc.add_GroupServiceServicer_to_server(
        GroupServicer(Groups(GroupStore(database), _now)), server.grpc_server
    )

    async def follow_changes() -> None:
        backoff = Backoff(0.1, 2.0)

        def connected() -> None:
            backoff.reset()
            tasks.start("database is well", health.well(DEPENDENCY), forever=False)
            trajectories.wake()

        while True:
            try:
                async for keys in changes(engine, connected):
                    trajectories.changed(keys)
            except UnavailableError as error:
                await health.unwell(DEPENDENCY, error.message)
            await asyncio.sleep(backoff.next())

    if telemetry is not None:
        telemetry.gauge(
            "orchard.trajectories.waiting",
            "Bytes of steps that wait to be written.",
            lambda: {"waiting": appender.waiting_bytes},
        )
    tasks.start("follow changes", follow_changes())
    tasks.start("append", appender.run())
    tasks.start("pack", housekeeper.run_packing())
    tasks.start("sweep", housekeeper.run_sweeping())
    await server.start(settings.listen, tls=settings.server_tls(), health_address=settings.health_listen)
    try:
        yield
    finally:
        await server.stop(notice_seconds=settings.stop_notice_seconds, wake=trajectories.wake)
        await tasks.close()
        await database.close()


def _now() -> datetime:
    return datetime.now(UTC)
