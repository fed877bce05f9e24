"""The Pod of a sandbox. That an API server takes it, tests/cluster/scheduler shows."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.common import pods
from services.common.errors import InvalidArgumentError
from services.common.states import State
from services.scheduler.injection import Injection
from services.scheduler.pod_manifest import PodBuilder, PodProfile, PodTerms, check
from services.scheduler.records import Record

HOUR_MS = 3_600_000
PROFILE = PodProfile(public_keys_pem="PEM", lifetime_ms=24 * HOUR_MS)
TERMS = PodTerms(image="python:3.12", cpu=1.0, memory_bytes=2 << 30, disk_bytes=10 << 30, shm_bytes=64 << 20)
INJECTION = Injection(
    volumes=({"name": "payload", "image": {"reference": "payload:1"}},),
    mounts=({"name": "payload", "mountPath": pods.PAYLOAD_FOLDER},),
    init_containers=(),
    command=("/.orchard/agent/init",),
)
RECORD = Record(
    "team-",
    "s1",
    "r1",
    "hash",
    b"spec",
    State.STARTING,
    create_ms=1000,
    expire_ms=2000,
    lifetime_ms=HOUR_MS + 1,
    expects_secret_env=True,
)


def made(terms: PodTerms = TERMS, profile: PodProfile = PROFILE, record: Record = RECORD) -> dict[str, Any]:
    return PodBuilder(profile, INJECTION).pod(record, terms)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return dict(only)


def test_it_carries_all_that_rebuilds_its_record() -> None:
    metadata = made()["metadata"]
    assert metadata["name"] == pods.pod_name("team-", "s1")
    notes = metadata["annotations"]
    assert pods.decode_spec(notes.pop(pods.SPEC)) == b"spec"
    assert notes == {
        pods.TENANT: "team-",  # no label could say that
        pods.SANDBOX_ID: "s1",
        pods.REQUEST_ID: "r1",
        pods.SPEC_HASH: "hash",
        pods.CREATE_MS: "1000",
        pods.EXPIRE_MS: "2000",
        pods.EXPECTS_SECRET_ENV: "1",
        pods.PUBLIC_KEYS: "PEM",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }
    labels = metadata["labels"]
    assert all(f"{key}={labels[key]}" in pods.SELECTOR for key in (pods.MANAGED_BY_LABEL, pods.COMPONENT_LABEL))


def test_it_gets_nothing_that_it_does_not_need() -> None:
    pod = made()
    spec, security = pod["spec"], container(pod)["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert security["privileged"] is security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"]
    # What the "baseline" Pod security standard allows, and of that what images need.
    assert set(security["capabilities"]["add"]) == {
        *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETUID", "SETGID", "SETPCAP", "NET_BIND_SERVICE"),
        *("SYS_CHROOT", "SETFCAP", "AUDIT_WRITE"),
    }
    assert "runAsUser" not in security
    for absent in ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "serviceAccountName"):
        assert absent not in spec


def test_restricted_pods_have_no_root_and_no_capability() -> None:
    profile = replace(PROFILE, restricted=True, privilege_escalation=True)
    pod = made(profile=profile)
    assert pod["spec"]["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
    }
    security = container(pod)["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["allowPrivilegeEscalation"] is False
    with pytest.raises(InvalidArgumentError) as caught:
        check(profile, b"", replace(TERMS, user="root"))
    assert [violation.field for violation in caught.value.violations] == ["spec.user"]


def test_it_never_restarts_and_ends_by_itself() -> None:
    spec = made()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 3601
    assert spec["terminationGracePeriodSeconds"] == 1
    assert made(record=replace(RECORD, lifetime_ms=0))["spec"]["activeDeadlineSeconds"] == 24 * 3600


def test_limits_and_requests() -> None:
    profile = replace(PROFILE, cpu_request_share=0.25, memory_request_share=0.5, disk_request_share=0.0)
    terms = replace(TERMS, cpu=0.1, memory_bytes=1 << 30, disk_bytes=1 << 30, gpu=2)
    assert container(made(terms, profile))["resources"] == {
        "limits": {"cpu": "100m", "memory": str(1 << 30), "ephemeral-storage": str(1 << 30), "nvidia.com/gpu": "2"},
        "requests": {"cpu": "25m", "memory": str(1 << 29), "ephemeral-storage": "0", "nvidia.com/gpu": "2"},
    }
    assert container(made(replace(terms, cpu=0.1004)))["resources"]["limits"]["cpu"] == "101m"


def test_shared_memory_is_its_own() -> None:
    pod = made(replace(TERMS, shm_bytes=1 << 30))
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(1 << 30)}} in pod["spec"]["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(pod)["volumeMounts"]


def test_the_agent_is_injected_whole() -> None:
    init = {"name": "copy", "image": "payload:1"}
    pod = PodBuilder(PROFILE, replace(INJECTION, init_containers=(init,))).pod(RECORD, TERMS)
    assert pod["spec"]["initContainers"] == [init]
    assert "initContainers" not in made()["spec"]
    assert INJECTION.volumes[0] in pod["spec"]["volumes"]
    assert INJECTION.mounts[0] in container(pod)["volumeMounts"]
    assert container(pod)["command"] == ["/.orchard/agent/init"]
    assert container(pod)["name"] == pods.CONTAINER


@pytest.mark.parametrize(
    ("network", "label", "policy"),
    [
        ("none", "none", "None"),
        ("dns-only", "dns-only", "Default"),
        ("open", "open", "Default"),
        ("allow-list", "allow-list-pypi", "Default"),
    ],
)
def test_networks(network: str, label: str, policy: str) -> None:
    pod = made(replace(TERMS, network=network, allow_list="pypi" if network == "allow-list" else ""))
    assert pod["metadata"]["labels"][pods.NETWORK_LABEL] == label
    assert pod["spec"]["dnsPolicy"] == policy
    assert bool(pod["spec"].get("dnsConfig")) == (policy == "None")


@pytest.mark.parametrize(("network", "servers"), [("none", ["127.0.0.1"]), ("dns-only", ["192.0.2.1", "2001:db8::1"])])
def test_name_servers_of_the_operator(network: str, servers: list[str]) -> None:
    profile = replace(PROFILE, nameservers=("192.0.2.1", "2001:db8::1"))
    spec = made(replace(TERMS, network=network), profile)["spec"]
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": servers})


def test_the_operators_profile() -> None:
    profile = replace(
        PROFILE,
        priority_class="sandboxes",
        node_selector={"pool": "sandboxes"},
        tolerations=({"key": "sandboxes", "operator": "Exists"},),
        runtime_class="gvisor",
        image_pull_secrets=("registry",),
        user_namespaces=True,
        privilege_escalation=True,
        gpu_resource="amd.com/gpu",
    )
    pod = made(replace(TERMS, gpu=1), profile)
    spec = pod["spec"]
    assert spec["priorityClassName"] == "sandboxes"
    assert spec["nodeSelector"] == {"pool": "sandboxes"}
    assert spec["tolerations"] == [{"key": "sandboxes", "operator": "Exists"}]
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["hostUsers"] is False
    assert container(pod)["securityContext"]["allowPrivilegeEscalation"] is True
    assert container(pod)["resources"]["limits"]["amd.com/gpu"] == "1"


def test_what_a_spec_chooses() -> None:
    profile = replace(PROFILE, node_selector={"pool": "p"}, runtime_class="runc", image_pull_secrets=("a", "b"))
    chosen = replace(
        TERMS,
        node_selector={"pool": "mine", "zone": "z"},
        runtime_class="gvisor",
        image_pull_secret="b",
        user="1000:1000",
    )
    pod = made(chosen, profile)
    # The operator's word is the last.
    assert pod["spec"]["nodeSelector"] == {"pool": "p", "zone": "z"}
    assert pod["spec"]["runtimeClassName"] == "gvisor"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "b"}, {"name": "a"}]
    # Only root can become somebody else.
    assert container(pod)["securityContext"]["runAsUser"] == 0


OFFERS = replace(
    PROFILE,
    offered_image_pull_secrets=frozenset({"registry"}),
    offered_node_labels=frozenset({"zone"}),
    offered_runtime_classes=frozenset({"gvisor", "kata"}),
    offered_allow_lists=frozenset({"pypi"}),
)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"image": ""}, "spec.image", "is required"),
        ({"image": "-rm"}, "spec.image", "python:3.12"),
        ({"image": "a b"}, "spec.image", "python:3.12"),
        ({"image": "Upper"}, "spec.image", "python:3.12"),
        ({"image": "python:"}, "spec.image", "python:3.12"),
        ({"image": "python:3.12\n"}, "spec.image", "python:3.12"),
        ({"image": "python@sha256:short"}, "spec.image", "python:3.12"),
        ({"pids": 100}, "spec.resources.pids", "podPidsLimit"),
        ({"network": "host"}, "spec.network.mode", "one machine"),
        ({"network": "allow-list", "allow_list": "npm"}, "spec.network.allow_list", "there are pypi"),
        ({"image_pull_secret": "others"}, "spec.image_pull_secret", "there are registry"),
        ({"runtime_class": "runc"}, "spec.runtime_class", "there are gvisor, kata"),
        ({"node_selector": {"kubernetes.io/hostname": "n"}}, "spec.node_selector['kubernetes.io/hostname']", "zone"),
        ({"node_selector": {"zone": "-"}}, "spec.node_selector['zone']", "letter or digit at both ends"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_no_cluster_can_do_is_named(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check(OFFERS, b"", replace(TERMS, **change))
    assert [violation.field for violation in caught.value.violations] == [field]
    assert says in caught.value.violations[0].description


@pytest.mark.parametrize(
    "image",
    [
        "python",
        "python:3.12",
        "library/python:3.12-slim_1",
        "localhost:5000/a/b_c/d-e:v1",
        "registry.example.com/team/image@sha256:" + "0" * 64,
        "Registry.Example.com:443/a__b/c--d:tag@sha256:" + "a" * 64,
    ],
)
def test_images(image: str) -> None:
    check(PROFILE, b"", replace(TERMS, image=image))


def test_a_hostile_image_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgumentError):
        check(PROFILE, b"", replace(TERMS, image="a-" * 255 + "!"))


@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (lambda: b"a" * (2 << 20), True),  # compresses to little
        (lambda: random.Random(1).randbytes(128 << 10), True),
        (lambda: random.Random(1).randbytes(200 << 10), False),
    ],
    ids=["plain", "random", "too large"],
)
def test_a_spec_must_fit_into_annotations(make: Callable[[], bytes], fits: bool) -> None:
    spec = make()
    profile = replace(PROFILE, public_keys_pem="P" * 400)
    if not fits:
        with pytest.raises(InvalidArgumentError) as caught:
            check(profile, spec, TERMS)
        assert caught.value.violations[0].field == "spec"
        return
    check(profile, spec, TERMS)
    record = replace(RECORD, tenant="t" * 63, sandbox_id="s" * 63, request_id="r" * 64, spec=spec)
    pod = made(profile=profile, record=record)
    notes = pod["metadata"]["annotations"]
    assert sum(len(key) + len(value) for key, value in notes.items()) <= pods.ANNOTATIONS_BYTES
