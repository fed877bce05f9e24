"""Sandboxes' Pods as objects of a real API server, and the watcher's cache beside what that server says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.kubernetes import KubernetesClient
from services.common.states import State
from services.watcher.kubernetes import KubernetesRuntime
from services.watcher.pod_states import project
from services.watcher.pod_watch import Timing
from services.watcher.service import DEPENDENCY, Watcher
from tests.support.testbed import NAMESPACE

BACKSTOP = 110
HASTY = Timing(read=1.0, snapshot=1.0, first_retry=0.02, longest_retry=0.2)
SPEC = sandbox_pb2.SandboxSpec(image="i")
SPEC.start_timeout.seconds = SPEC.pull_timeout.seconds = 3600


def pod_of(name: str, spec: sandbox_pb2.SandboxSpec = SPEC, **more: Any) -> dict[str, Any]:
    """A sandbox's Pod; it stays as it is, since its scheduler does not exist."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {pods.MANAGED_BY_LABEL: pods.MANAGED_BY, pods.COMPONENT_LABEL: pods.COMPONENT},
            "annotations": {
                pods.TENANT: "t",
                pods.SANDBOX_ID: name,
                pods.REQUEST_ID: f"r-{name}",
                pods.SPEC_HASH: "h",
                pods.SPEC: pods.encode_spec(spec.SerializeToString()),
                pods.CREATE_MS: "1700000000000",
                pods.EXPIRE_MS: "4000000000000",
            },
        },
        "spec": {
            "schedulerName": "nobody",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": pods.CONTAINER, "image": "i"}],
            **more,
        },
    }


class Truth:
    """The API server itself, as administrator and past every proxy."""

    def __init__(self, client: KubernetesClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def of(cls, kubeconfig: Path) -> AsyncIterator[Truth]:
        client = await KubernetesClient.connect(kubeconfig)
        truth = cls(client)
        try:
            await truth.clear()
            yield truth
            await truth.clear()
        finally:
            await client.close()

    async def call(self, method: str, path: str = "", body: Any = None, **query: str) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        response = await self._client.api.call_api(
            f"/api/v1/namespaces/{NAMESPACE}/pods{path}",
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": kind},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=BACKSTOP,
        )
        answer = json.loads(await response.read())
        assert response.status in (200, 201, 202, 404), answer
        return answer

    async def create(self, name: str, **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.call("POST", body=pod_of(name, **more))
        return made

    async def annotate(self, name: str, **notes: str | None) -> None:
        await self.call("PATCH", f"/{name}", {"metadata": {"annotations": {f"test/{k}": v for k, v in notes.items()}}})

    async def select(self, name: str, selected: bool) -> None:
        """Put it inside or outside of what the watcher selects."""
        label = pods.COMPONENT if selected else "other"
        await self.call("PATCH", f"/{name}", {"metadata": {"labels": {pods.COMPONENT_LABEL: label}}})

    async def status(self, name: str, **status: Any) -> None:
        """Write its status, as a kubelet does."""
        await self.call("PATCH", f"/{name}/status", {"status": status})

    async def delete(self, name: str) -> None:
        await self.call("DELETE", f"/{name}", gracePeriodSeconds="0")

    async def clear(self) -> None:
        await self.call("DELETE", gracePeriodSeconds="0")
        while (await self.call("GET"))["items"]:
            await asyncio.sleep(0.02)

    async def expected(self) -> dict[str, tuple[Any, ...]]:
        """What a right cache holds."""
        answer = await self.call("GET", labelSelector=pods.SELECTOR)
        assert answer["kind"] == "PodList"
        return {seen.uid: _row(seen, 1) for seen in (project(pod).observed for pod in answer["items"]) if seen.tenant}


def _row(seen: Any, steps: int) -> tuple[Any, ...]:
    return seen.sandbox_id, seen.revision // steps, seen.state, seen.reason, seen.message, seen.expire_ms


class Agents:
    """Probes of agents that answer when told to."""

    def __init__(self) -> None:
        self.answering: set[str] = set()

    async def answers(self, endpoint: str, uid: str) -> str | None:
        return "" if uid in self.answering else None


class Watched:
    """A watcher, and a consumer that knows only what the watcher's stream told it."""

    def __init__(self, runtime: KubernetesRuntime, silence_seconds: float) -> None:
        self.runtime = runtime
        self.agents = Agents()
        self.health = Health([DEPENDENCY])
        self.watcher = Watcher(
            runtime, self.agents, self.health, probe_interval_seconds=0.02, silence_seconds=silence_seconds
        )
        self.told: dict[str, Any] = {}
        self.revisions: dict[str, int] = {}
        self.deleted: list[str] = []

    async def consume(self) -> None:
        """As the caches of gateways do: keep what is known when the stream ends, and drop what a new one leaves out."""
        while True:
            try:
                snapshot, changes = self.watcher.subscribe()
            except UnavailableError:
                await asyncio.sleep(0.005)
                continue
            for uid in set(self.told) - {one.uid for one in snapshot}:
                self._end(uid)
            with changes:
                self._apply(snapshot)
                while self.watcher.synced:
                    self._apply(await changes.next(1))

    def _apply(self, seen: list[Any]) -> None:
        for one in seen:
            if one.revision > self.revisions.get(one.uid, -1):
                self.revisions[one.uid] = one.revision
                self.told[one.uid] = one
                if one.state is State.DELETED:
                    self._end(one.uid)

    def _end(self, uid: str) -> None:
        self.deleted.append(self.told.pop(uid).sandbox_id)

    async def synced(self) -> None:
        async with asyncio.timeout(BACKSTOP):
            while not self.watcher.synced:
                await asyncio.sleep(0.005)

    async def agrees(self, truth: Truth) -> None:
        """Wait until the cache and its consumer say what the API server says."""
        expected = await truth.expected()
        try:
            async with asyncio.timeout(BACKSTOP):
                while not self.watcher.synced or self.cached() != expected or self.consumed() != expected:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            sides = {"cache": self.cached(), "consumer": self.consumed()}
            wrong = [
                f"{side}: {have.get(uid)} in place of {expected.get(uid)}"
                for side, have in sides.items()
                for uid in have.keys() | expected.keys()
                if have.get(uid) != expected.get(uid)
            ]
            raise AssertionError("\n".join(wrong) or "it is not synced") from None

    def cached(self) -> Mapping[str, tuple[Any, ...]]:
        return {uid: _row(one, 4) for uid, one in self.watcher._sandboxes.items()}

    def consumed(self) -> Mapping[str, tuple[Any, ...]]:
        return {uid: _row(one, 4) for uid, one in self.told.items()}

    def ids(self) -> set[str]:
        return {one.sandbox_id for one in self.told.values()}


@asynccontextmanager
async def watching(kubeconfig: Path, timing: Timing = HASTY, silence_seconds: float = 30) -> AsyncIterator[Watched]:
    client = await KubernetesClient.connect(kubeconfig)
    watched = Watched(KubernetesRuntime(client, NAMESPACE, timing), silence_seconds)
    tasks = [asyncio.ensure_future(work) for work in (watched.watcher.run(), watched.consume())]
    try:
        yield watched
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
