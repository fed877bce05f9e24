"""The suites that every runtime must pass, on Pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.support.exec_suite import *  # noqa: F403
from tests.support.file_suite import *  # noqa: F403
from tests.support.hostile_suite import *  # noqa: F403
from tests.support.pod_platform import TENANT, PodPlatform
from tests.support.runtime_suite import *  # noqa: F403
from tests.support.runtime_suite import Subject
from tests.support.testbed import NAMESPACE
from tests.support.wire import wire_to


@pytest.fixture
async def subject(platform: PodPlatform) -> AsyncIterator[Subject]:
    testbed = platform.testbed

    async def remove_behind(sandbox: sandbox_pb2.Sandbox) -> None:
        name = pods.pod_name(TENANT, sandbox.sandbox_id)
        await asyncio.to_thread(testbed.kubectl, "-n", NAMESPACE, "delete", "pod", name, "--wait=false")

    def seen_outside(sandbox: sandbox_pb2.Sandbox) -> Iterator[bytes]:
        name = pods.pod_name(TENANT, sandbox.sandbox_id)
        yield json.dumps(testbed.get("-n", NAMESPACE, "pod", name)).encode()
        yield testbed.kubectl("-n", NAMESPACE, "get", "events", "-o", "json").encode()
        yield testbed.kubectl("-n", NAMESPACE, "logs", name, "-c", pods.CONTAINER).encode()
        yield platform.logs().encode()
        yield from (path.read_bytes() for path in (platform.folder / "valkey").rglob("*") if path.is_file())

    async with wire_to(platform.endpoint, platform.api_key) as wire:
        yield Subject(
            wire=wire,
            endpoint=platform.endpoint,
            api_key=platform.api_key,
            image=BUSYBOX,
            # The kubelet has no way to pull anything.
            missing_image="127.0.0.1:9/none:1",
            refuses_missing=False,
            restart_owner=None,
            remove_behind=remove_behind,
            seen_outside=seen_outside,
            offered=platform.offered,
            network_is_filtered=True,
        )
