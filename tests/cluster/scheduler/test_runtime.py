"""Pods made, changed and removed with exactly the scheduler's rights, on a real API server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.kubernetes import KubernetesClient
from services.common.states import State
from services.scheduler.injection import Delivery, injection_of
from services.scheduler.kubernetes import KubernetesRuntime
from services.scheduler.pod_api import PodApi
from services.scheduler.pod_manifest import PodProfile
from services.scheduler.records import Incarnation, Record
from services.scheduler.servicer_pods import pod_terms_of
from services.scheduler.servicer_specs import Defaults, admitted
from services.scheduler.throttle import Throttle
from services.watcher.pod_states import project
from tests.cluster.watcher.pods import Truth
from tests.support.api_proxy import ApiProxy, Reply
from tests.support.testbed import NAMESPACE, Testbed

DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000
PROFILE = PodProfile(public_keys_pem="PEM", lifetime_ms=DAY_MS)
SPEC = sandbox_pb2.SandboxSpec(image="orchard.test/none:1")


def record(sandbox_id: str = "a", request_id: str = "r", spec: sandbox_pb2.SandboxSpec = SPEC, **more: Any) -> Record:
    full = admitted(spec, Defaults(0.1, 64 << 20, 64 << 20), DAY_MS).SerializeToString(deterministic=True)
    return Record(
        "t",
        sandbox_id,
        request_id,
        "hash",
        full,
        State.STARTING,
        create_ms=more.pop("create_ms", NOW_MS),
        expire_ms=NOW_MS + 1000,
        lifetime_ms=3_600_000,
        **more,
    )


NAME = pods.pod_name("t", "a")


@asynccontextmanager
async def runtime_of(
    kubeconfig: Path, profile: PodProfile = PROFILE, delivery: Delivery = Delivery.IMAGE_VOLUME
) -> AsyncIterator[KubernetesRuntime]:
    api = PodApi(await KubernetesClient.connect(kubeconfig), NAMESPACE, Throttle(1000, 1000))
    runtime = KubernetesRuntime(api, profile, terms_of=pod_terms_of)
    runtime.inject(injection_of(delivery, "orchard.test/payload:1"))
    try:
        yield runtime
    finally:
        await api.close()


@pytest.fixture
async def runtime(control_plane: Testbed, truth: Truth) -> AsyncIterator[KubernetesRuntime]:
    async with runtime_of(control_plane.kubeconfig) as runtime:
        yield runtime


async def pod(truth: Truth, name: str = NAME) -> dict[str, Any]:
    found: dict[str, Any] = await truth.call("GET", f"/{name}")
    return found


async def hold(truth: Truth, name: str = NAME) -> None:
    """Keep the Pod from going, as a node that is slow does."""
    await truth.call("PATCH", f"/{name}", {"metadata": {"finalizers": ["test/hold"]}})


async def let_go(truth: Truth, name: str = NAME) -> None:
    await truth.call("PATCH", f"/{name}", {"metadata": {"finalizers": None}})


class TestCreate:
    @pytest.mark.parametrize("delivery", list(Delivery))
    async def test_the_watcher_reads_what_was_written(
        self, control_plane: Testbed, truth: Truth, delivery: Delivery
    ) -> None:
        async with runtime_of(control_plane.kubeconfig, delivery=delivery) as runtime:
            wanted = record(expects_secret_env=True)
            uid = await runtime.create(wanted)
        seen = project(await pod(truth)).observed
        assert (seen.tenant, seen.sandbox_id, seen.uid, seen.request_id) == ("t", "a", uid, "r")
        assert (seen.spec, seen.spec_hash) == (wanted.spec, "hash")
        assert (seen.create_ms, seen.expire_ms, seen.state) == (NOW_MS, NOW_MS + 1000, State.STARTING)

    async def test_a_lost_answer_costs_nothing(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        uids = await asyncio.gather(*(runtime.create(record()) for _ in range(5)))
        assert len(set(uids)) == 1
        assert len((await truth.call("GET"))["items"]) == 1

    async def test_what_never_was_ours_is_in_the_way_for_ever(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        await truth.create(NAME)  # of the sandbox whose id is that name
        with pytest.raises(AlreadyExistsError) as caught:
            await runtime.create(record())
        assert NAME in caught.value.message

    async def test_a_later_create_is_not_taken_for_this_one(self, runtime: KubernetesRuntime) -> None:
        await runtime.create(record(request_id="later", create_ms=NOW_MS + 1))
        with pytest.raises(AlreadyExistsError):
            await runtime.create(record())

    async def test_what_an_ended_sandbox_left_is_waited_for(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        old = await runtime.create(record(request_id="earlier", create_ms=NOW_MS - 1))
        with pytest.raises(UnavailableError, match="is still there"):
            await runtime.create(record())
        await hold(truth)
        await runtime.delete(Incarnation("t", "a", old))
        with pytest.raises(UnavailableError, match="is still being removed"):
            await runtime.create(record())
        await let_go(truth)
        new = await runtime.create(record())
        assert new != old

    async def test_one_that_goes_is_not_adopted(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        """Its own Pod, deleted by hand a moment ago: there is nothing to adopt."""
        await runtime.create(record())
        await hold(truth)
        await truth.call("DELETE", f"/{NAME}")
        with pytest.raises(UnavailableError):
            await runtime.create(record())
        await let_go(truth)

    async def test_all_that_an_operator_and_a_spec_choose_is_admitted(
        self, control_plane: Testbed, truth: Truth
    ) -> None:
        control_plane.apply(
            {
                "apiVersion": "scheduling.k8s.io/v1",
                "kind": "PriorityClass",
                "metadata": {"name": "sandboxes"},
                "value": -10,
            },
            {
                "apiVersion": "node.k8s.io/v1",
                "kind": "RuntimeClass",
                "metadata": {"name": "gvisor"},
                "handler": "runsc",
            },
        )
        profile = replace(
            PROFILE,
            priority_class="sandboxes",
            node_selector={"pool": "sandboxes"},
            tolerations=({"key": "sandboxes", "operator": "Exists"},),
            image_pull_secrets=("registry",),
            user_namespaces=True,
            privilege_escalation=True,
        )
        spec = sandbox_pb2.SandboxSpec(
            image="orchard.test/none@sha256:" + "0" * 64,
            runtime_class="gvisor",
            node_selector={"zone": "a"},
            user="1000",
            resources={"gpu": 1, "cpu": 0.25, "shm_bytes": 1 << 30},
            network={"mode": "NETWORK_MODE_ALLOW_LIST", "allow_list": "pypi"},
        )
        async with runtime_of(control_plane.kubeconfig, profile, Delivery.COPY) as runtime:
            await runtime.create(record(spec=spec))
        made = (await pod(truth))["spec"]
        assert (made["priority"], made["runtimeClassName"], made["hostUsers"]) == (-10, "gvisor", False)
        assert made["nodeSelector"] == {"pool": "sandboxes", "zone": "a"}
        assert made["containers"][0]["resources"]["limits"]["cpu"] == "250m"
        assert made["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"

    async def test_a_field_that_the_cluster_does_not_know_is_refused_and_not_dropped(
        self, runtime: KubernetesRuntime
    ) -> None:
        volume = {"name": "v", "emptyDir": {}, "noSuchField": 1}
        runtime.inject(replace(injection_of(Delivery.COPY, "p"), volumes=(volume,)))
        with pytest.raises(FailedPreconditionError, match="noSuchField"):
            await runtime.create(record())


class TestRefusals:
    async def test_a_quota_of_the_cluster(
        self, control_plane: Testbed, runtime: KubernetesRuntime, truth: Truth
    ) -> None:
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": NAMESPACE}}
        control_plane.apply({**quota, "spec": {"hard": {"pods": "1"}}})
        wait = ("wait", "--for=jsonpath={.status.hard.pods}=1", "resourcequota/few", "--timeout=110s")
        control_plane.kubectl("-n", NAMESPACE, *wait)
        try:
            await runtime.create(record())
            with pytest.raises(ResourceExhaustedError) as caught:
                await runtime.create(record("b"))
            assert "exceeded quota: few" in caught.value.message
        finally:
            control_plane.kubectl("-n", NAMESPACE, "delete", "resourcequota/few")

    async def test_many_creates_against_one_quota_take_all_of_it(
        self, control_plane: Testbed, runtime: KubernetesRuntime, truth: Truth
    ) -> None:
        """The API server answers Conflict when several write the quota at once: that is no refusal."""
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "many", "namespace": NAMESPACE}}
        control_plane.apply({**quota, "spec": {"hard": {"pods": "20"}}})
        wait = ("wait", "--for=jsonpath={.status.hard.pods}=20", "resourcequota/many", "--timeout=110s")
        control_plane.kubectl("-n", NAMESPACE, *wait)

        async def create(name: str) -> str:
            async with asyncio.timeout(110):
                while True:
                    try:
                        return await runtime.create(record(name))
                    except UnavailableError:
                        continue

        try:
            made = await asyncio.gather(*(create(f"s{n}") for n in range(30)), return_exceptions=True)
        finally:
            control_plane.kubectl("-n", NAMESPACE, "delete", "resourcequota/many")
        assert sum(isinstance(one, str) for one in made) == 20
        assert sum(isinstance(one, ResourceExhaustedError) for one in made) == 10

    async def test_a_pod_security_standard(self, control_plane: Testbed, truth: Truth) -> None:
        async with runtime_of(control_plane.kubeconfig) as runtime:
            usual = injection_of(Delivery.COPY, "p")
            host = {"name": "v", "hostPath": {"path": "/"}}
            runtime.inject(replace(usual, volumes=(*usual.volumes, host)))
            with pytest.raises(FailedPreconditionError, match="violates PodSecurity"):
                await runtime.create(record())

    async def test_annotations_beyond_the_limit(self, runtime: KubernetesRuntime) -> None:
        """`check` does not let it come so far."""
        with pytest.raises(FailedPreconditionError, match="Too long"):
            await runtime.create(replace(record(), spec_hash="h" * (257 << 10)))

    async def test_rights_that_are_missing_are_the_operators_to_mend(
        self, control_plane: Testbed, truth: Truth, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with runtime_of(control_plane.watcher_kubeconfig) as runtime:
            for _ in range(3):
                with pytest.raises(UnavailableError, match="does not let the scheduler create a Pod"):
                    await runtime.create(record())
        said = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert len(said) == 1  # and not with each retry
        assert "rbac.yaml" in said[0].getMessage()
        assert 'cannot create resource "pods"' in said[0].getMessage()

    async def test_credentials_that_are_refused(
        self, control_plane: Testbed, truth: Truth, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = yaml.safe_load(control_plane.kubeconfig.read_text())
        right = config["users"][0]["user"]["token"]
        kubeconfig = tmp_path / "kubeconfig"
        config["users"][0]["user"]["token"] = "wrong"
        kubeconfig.write_text(yaml.safe_dump(config))
        async with runtime_of(kubeconfig) as runtime:
            with pytest.raises(UnavailableError, match="credentials"):
                await runtime.create(record())
            assert "credentials" in caplog.text
            # A token that was replaced on disk is found without a restart.
            config["users"][0]["user"]["token"] = right
            kubeconfig.write_text(yaml.safe_dump(config))
            assert await runtime.create(record())

    async def test_a_namespace_that_is_not_there(
        self, control_plane: Testbed, truth: Truth, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = await KubernetesClient.connect(control_plane.admin_kubeconfig)
        api = PodApi(client, "nowhere", Throttle(1000, 1000))
        try:
            with pytest.raises(UnavailableError, match="no namespace 'nowhere'"):
                await api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {}})
            assert "'nowhere' is not there" in caplog.text
        finally:
            await api.close()


@pytest.fixture
async def proxy(control_plane: Testbed, truth: Truth, tmp_path: Path) -> AsyncIterator[ApiProxy]:
    proxy = ApiProxy(control_plane.kubeconfig)
    async with proxy.running(tmp_path / "kubeconfig"):
        yield proxy


@pytest.fixture
async def far_runtime(proxy: ApiProxy, tmp_path: Path) -> AsyncIterator[KubernetesRuntime]:
    """Behind the proxy."""
    async with runtime_of(tmp_path / "kubeconfig") as runtime:
        yield runtime


PAGE = b"<html>something in between</html>"


class TestOutages:
    @pytest.mark.parametrize(
        "reply",
        [
            Reply(429, b'{"kind": "Status", "reason": "TooManyRequests", "message": "m"}', {"Retry-After": "1"}),
            Reply(500, PAGE),
            Reply(502, PAGE),
            Reply(503, PAGE, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
            Reply(504, b'{"kind": "Status", "reason": "Timeout", "message": "m"}'),
            Reply(404, PAGE),
            Reply(409, PAGE),
            Reply(200, PAGE),
            Reply(201, PAGE),
        ],
        ids=lambda reply: str(reply.status),
    )
    async def test_what_may_work_later_is_said_to(
        self, proxy: ApiProxy, far_runtime: KubernetesRuntime, reply: Reply
    ) -> None:
        proxy.reply(*[reply] * 3)
        with pytest.raises(UnavailableError):
            await far_runtime.create(record())
        with pytest.raises(UnavailableError):
            # A page of a proxy does not say that a sandbox is gone.
            await far_runtime.is_gone(Incarnation("t", "a", "u"))

    async def test_a_server_that_asks_for_time_is_given_it(
        self, proxy: ApiProxy, far_runtime: KubernetesRuntime
    ) -> None:
        proxy.reply(Reply(429, b"", {"Retry-After": "1"}))
        loop = asyncio.get_running_loop()
        asked = loop.time()  # before the second begins, however long this call takes
        with pytest.raises(UnavailableError):
            await far_runtime.is_gone(Incarnation("t", "a", "u"))
        assert await far_runtime.is_gone(Incarnation("t", "a", "u"))
        assert loop.time() - asked > 0.9

    async def test_a_server_that_hangs_or_is_away(
        self, proxy: ApiProxy, far_runtime: KubernetesRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import aiohttp

        monkeypatch.setattr("services.scheduler.pod_api._TIMEOUT", aiohttp.ClientTimeout(total=0.2))
        proxy.stall()
        with pytest.raises(UnavailableError, match="does not answer"):
            await far_runtime.is_gone(Incarnation("t", "a", "u"))
        proxy.flow()
        proxy.refusing = True
        with pytest.raises(UnavailableError, match="does not answer"):
            await far_runtime.is_gone(Incarnation("t", "a", "u"))


class TestDelete:
    async def test_exactly_this_incarnation_goes(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        uid = await runtime.create(record())
        for _ in range(2):
            await runtime.delete(Incarnation("t", "a", "another"))
            await runtime.delete(Incarnation("t", "a", "another"), force=True)
        assert not await runtime.is_gone(Incarnation("t", "a", uid))
        assert await runtime.is_gone(Incarnation("t", "a", "another"))
        for _ in range(2):
            await runtime.delete(Incarnation("t", "a", uid))
        assert await runtime.is_gone(Incarnation("t", "a", uid))

    async def test_its_containers_get_a_second(
        self, runtime: KubernetesRuntime, truth: Truth, control_plane: Testbed
    ) -> None:
        """Of a Pod that a node has, the object stays until the node says that it has ended, or somebody forces it."""
        uid = await runtime.create(record())
        await truth.call(
            "POST",
            f"/{NAME}/binding",
            {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": NAME},
                "target": {"kind": "Node", "name": "n"},
            },
        )
        # One that the cluster's own scheduler has just changed is not stuck, and is left for the next round.
        async with asyncio.timeout(110):
            while "deletionGracePeriodSeconds" not in (metadata := (await pod(truth))["metadata"]):
                await runtime.delete(Incarnation("t", "a", uid), force=True)  # it was not even asked to go
        assert metadata["deletionGracePeriodSeconds"] == 1
        assert not await runtime.is_gone(Incarnation("t", "a", uid))
        await runtime.delete(Incarnation("t", "a", uid))
        assert not await runtime.is_gone(Incarnation("t", "a", uid))
        async with asyncio.timeout(110):
            while not await runtime.is_gone(Incarnation("t", "a", uid)):
                await runtime.delete(Incarnation("t", "a", uid), force=True)


class TestUpdate:
    async def test_a_deadline_is_moved(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        uid = await runtime.create(record())
        await runtime.update(Incarnation("t", "a", uid), NOW_MS + 77_000)
        assert project(await pod(truth)).observed.expire_ms == NOW_MS + 77_000

    async def test_another_incarnations_is_not(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        await runtime.create(record())
        with pytest.raises(NotFoundError):
            await runtime.update(Incarnation("t", "a", "another"), NOW_MS)
        with pytest.raises(NotFoundError):
            await runtime.update(Incarnation("t", "none", "another"), NOW_MS)
        assert project(await pod(truth)).observed.expire_ms == NOW_MS + 1000

    async def test_one_that_was_replaced_since_it_was_read(self, control_plane: Testbed, truth: Truth) -> None:
        api = PodApi(await KubernetesClient.connect(control_plane.kubeconfig), NAMESPACE, Throttle(1000, 1000))
        try:
            made = await truth.create("a")
            assert not await api.annotate("a", "another", {pods.EXPIRE_MS: "1"})
            assert await api.annotate("a", made["metadata"]["uid"], {pods.EXPIRE_MS: "1"})
        finally:
            await api.close()

    async def test_no_promise_beyond_the_pods_own_end(self, runtime: KubernetesRuntime, truth: Truth) -> None:
        uid = await runtime.create(record())  # activeDeadlineSeconds: an hour
        await runtime.update(Incarnation("t", "a", uid), NOW_MS + 3_600_000)
        with pytest.raises(InvalidArgumentError) as caught:
            await runtime.update(Incarnation("t", "a", uid), NOW_MS + 3_600_001)
        assert caught.value.violations[0].field == "ttl"
        assert project(await pod(truth)).observed.expire_ms == NOW_MS + 3_600_000
