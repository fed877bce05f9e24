"""A sandbox as a Pod, in plain dictionaries: nothing here talks to anybody."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.common import pods
from services.common.validation import Fields
from services.scheduler.injection import Injection
from services.scheduler.records import Record

DEFAULT_PIDS: Final = 4096
_GRACE_SECONDS: Final = 1
_SHM: Final = "shm"
_HOSTNAME: Final = "sandbox"
_RESTRICTED_USER: Final = 1000
_NO_RESOLVER: Final = "127.0.0.1"  # refuses at once, where an address behind a policy would let a look-up time out
_SMALL_SPEC_BYTES: Final = 128 << 10  # in base64, with everything else, this fits even if it cannot be compressed

# What typical work in an image needs, package managers and su included; in the API's own order of the alphabet.
_CAPABILITIES: Final = (
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
)

_DOMAIN_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_DOMAIN: Final = rf"(?:{_DOMAIN_LABEL}(?:\.{_DOMAIN_LABEL})*(?::[0-9]+)?/)?"
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    rf"{_DOMAIN}{_COMPONENT}(?:/{_COMPONENT})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?\Z"
)
_LABEL_VALUE: Final = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?\Z")


@dataclass(frozen=True, slots=True)
class PodTerms:
    """What a Pod has of a spec, defaults filled in. Sizes in bytes."""

    image: str
    cpu: float
    memory_bytes: int
    disk_bytes: int
    shm_bytes: int
    pids: int = DEFAULT_PIDS
    gpu: int = 0
    network: str = "none"
    """"none", "dns-only", "allow-list", "open", or another that no cluster has."""
    allow_list: str = ""
    user: str = ""
    image_pull_secret: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str = ""


@dataclass(frozen=True, slots=True)
class PodProfile:
    """What the operator decides for every Pod, and what a spec may choose from."""

    public_keys_pem: str
    lifetime_ms: int
    """For records that do not say how long they may live at most."""
    cpu_request_share: float = 1.0
    memory_request_share: float = 1.0
    disk_request_share: float = 0.1
    priority_class: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    runtime_class: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    user_namespaces: bool = False
    privilege_escalation: bool = False
    restricted: bool = False
    """Whether Pods keep to the Pod security standard "restricted": no root and no capability."""
    gpu_resource: str = "nvidia.com/gpu"
    nameservers: tuple[str, ...] = ()
    """Addresses; empty: the node's."""
    offered_image_pull_secrets: frozenset[str] = frozenset()
    offered_node_labels: frozenset[str] = frozenset()
    offered_runtime_classes: frozenset[str] = frozenset()
    offered_allow_lists: frozenset[str] = frozenset()


def check(profile: PodProfile, spec: bytes, terms: PodTerms) -> None:
    """Find what no Pod can be made of.

    Raises:
        InvalidArgumentError: with each field and what to do.
    """
    fields = Fields()
    fields.check(bool(terms.image), "spec.image", "is required on a cluster: name an image of a registry")
    fields.check(
        not terms.image or _IMAGE.match(terms.image) is not None,
        "spec.image",
        "must be an image's name like python:3.12 or registry.example/team/image@sha256:...",
    )
    fields.check(
        terms.pids == DEFAULT_PIDS,
        "spec.resources.pids",
        f"cannot be chosen on a cluster: the podPidsLimit of its nodes holds for each Pod; "
        f"leave it out or give {DEFAULT_PIDS:,}",
    )
    fields.check(
        not (profile.restricted and terms.user),
        "spec.user",
        f"cannot be chosen on this cluster: sandboxes run as user {_RESTRICTED_USER}, without root; leave it out",
    )
    _check_network(terms, profile, fields)
    _check_choices(terms, profile, fields)
    if len(spec) > _SMALL_SPEC_BYTES:
        # What else there is beside the spec is bounded, and small.
        packed, room = len(pods.encode_spec(spec)), pods.ANNOTATIONS_BYTES - (16 << 10)
        fields.check(
            packed <= room,
            "spec",
            f"must be at most {room:,} bytes, compressed and in base64, on a cluster: it has {packed:,}; "
            "put large env or start_argv into a file of the sandbox",
        )
    fields.done()


class PodBuilder:
    """Makes Pods by a profile."""

    def __init__(self, profile: PodProfile, injection: Injection) -> None:
        self._profile = profile
        self._injection = injection

    def pod(self, record: Record, terms: PodTerms) -> dict[str, Any]:
        """The Pod of a record whose spec passed `check`."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pods.pod_name(record.tenant, record.sandbox_id),
                "labels": {
                    pods.MANAGED_BY_LABEL: pods.MANAGED_BY,
                    pods.COMPONENT_LABEL: pods.COMPONENT,
                    pods.NETWORK_LABEL: _network_label(terms),
                },
                "annotations": self._annotations(record),
            },
            "spec": self._spec(record, terms),
        }

    def _annotations(self, record: Record) -> dict[str, str]:
        return {
            pods.TENANT: record.tenant,
            pods.SANDBOX_ID: record.sandbox_id,
            pods.REQUEST_ID: record.request_id,
            pods.SPEC_HASH: record.spec_hash,
            pods.SPEC: pods.encode_spec(record.spec),
            pods.CREATE_MS: str(record.create_ms),
            pods.EXPIRE_MS: str(record.expire_ms),
            pods.EXPECTS_SECRET_ENV: str(int(record.expects_secret_env)),
            pods.PUBLIC_KEYS: self._profile.public_keys_pem,
            # A sandbox holds work that no other Pod can take over.
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        }

    def _spec(self, record: Record, terms: PodTerms) -> dict[str, Any]:
        profile, injection = self._profile, self._injection
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            # Can never be raised later, so it is the longest life that any update may give.
            "activeDeadlineSeconds": math.ceil((record.lifetime_ms or profile.lifetime_ms) / 1000),
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": _HOSTNAME,
            "securityContext": _pod_security(profile),
            "containers": [self._container(terms)],
            "volumes": [*injection.volumes, _shm_volume(terms)],
            **_resolver(terms, profile),
        }
        if injection.init_containers:
            spec["initContainers"] = list(injection.init_containers)
        if profile.user_namespaces:
            spec["hostUsers"] = False
        if profile.priority_class:
            spec["priorityClassName"] = profile.priority_class
        if selector := {**terms.node_selector, **profile.node_selector}:
            spec["nodeSelector"] = selector
        if profile.tolerations:
            spec["tolerations"] = list(profile.tolerations)
        if runtime_class := terms.runtime_class or profile.runtime_class:
            spec["runtimeClassName"] = runtime_class
        secrets = (terms.image_pull_secret,) if terms.image_pull_secret else ()
        if secrets := (*secrets, *profile.image_pull_secrets):
            spec["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(secrets)]
        return spec

    def _container(self, terms: PodTerms) -> dict[str, Any]:
        profile = self._profile
        security: dict[str, Any] = {
            "privileged": False,
            "allowPrivilegeEscalation": profile.privilege_escalation and not profile.restricted,
            "capabilities": {"drop": ["ALL"]} if profile.restricted else {"drop": ["ALL"], "add": list(_CAPABILITIES)},
        }
        if terms.user:
            # Only root can become the user that was asked for; else the agent runs as the image's own.
            security["runAsUser"] = 0
        return {
            "name": pods.CONTAINER,
            "image": terms.image,
            "command": list(self._injection.command),
            "ports": [{"name": "agent", "containerPort": pods.AGENT_PORT}],
            "readinessProbe": {"tcpSocket": {"port": pods.AGENT_PORT}, "periodSeconds": 5},
            "resources": self._resources(terms),
            "securityContext": security,
            "volumeMounts": [*self._injection.mounts, {"name": _SHM, "mountPath": "/dev/shm"}],  # noqa: S108 (in the Pod)
        }

    def _resources(self, terms: PodTerms) -> dict[str, dict[str, str]]:
        profile = self._profile
        millis = math.ceil(terms.cpu * 1000)
        limits = {
            "cpu": f"{millis}m",
            "memory": str(terms.memory_bytes),
            "ephemeral-storage": str(terms.disk_bytes),
        }
        requests = {
            "cpu": f"{math.ceil(millis * profile.cpu_request_share)}m",
            "memory": str(math.ceil(terms.memory_bytes * profile.memory_request_share)),
            "ephemeral-storage": str(math.ceil(terms.disk_bytes * profile.disk_request_share)),
        }
        if terms.gpu:
            # Not shared: what is asked for is what is taken.
            limits[profile.gpu_resource] = requests[profile.gpu_resource] = str(terms.gpu)
        return {"limits": limits, "requests": requests}


def _pod_security(profile: PodProfile) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if profile.restricted:
        # A number, above what an image says: the kubelet cannot tell whether a name is root's.
        security |= {"runAsNonRoot": True, "runAsUser": _RESTRICTED_USER, "runAsGroup": _RESTRICTED_USER}
        security["fsGroup"] = _RESTRICTED_USER
    return security


def _shm_volume(terms: PodTerms) -> dict[str, Any]:
    return {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": str(terms.shm_bytes)}}


def _resolver(terms: PodTerms, profile: PodProfile) -> dict[str, Any]:
    """The profile's or the node's, never the cluster's own, which knows every service; none without a network."""
    nameservers = (_NO_RESOLVER,) if terms.network == "none" else profile.nameservers
    if nameservers:
        return {"dnsPolicy": "None", "dnsConfig": {"nameservers": list(nameservers)}}
    return {"dnsPolicy": "Default"}


def _network_label(terms: PodTerms) -> str:
    return f"allow-list-{terms.allow_list}" if terms.network == "allow-list" else terms.network


def _check_network(terms: PodTerms, profile: PodProfile, fields: Fields) -> None:
    if not fields.check(
        terms.network in ("none", "dns-only", "allow-list", "open"),
        "spec.network.mode",
        "a cluster knows NONE, DNS_ONLY, ALLOW_LIST and OPEN; HOST is for one machine",
    ):
        return
    if terms.network == "allow-list":
        _offered(fields, "spec.network.allow_list", terms.allow_list, profile.offered_allow_lists, "allow-lists")


def _check_choices(terms: PodTerms, profile: PodProfile, fields: Fields) -> None:
    secrets, classes = profile.offered_image_pull_secrets, profile.offered_runtime_classes
    _offered(fields, "spec.image_pull_secret", terms.image_pull_secret, secrets, "pull secrets")
    _offered(fields, "spec.runtime_class", terms.runtime_class, classes, "runtime classes")
    for key, value in terms.node_selector.items():
        name = f"spec.node_selector[{key[:80]!r}]"
        _offered(fields, name, key, profile.offered_node_labels, "node labels")
        fields.check(
            _LABEL_VALUE.match(value) is not None,
            name,
            "the value must be at most 63 of A-Z, a-z, 0-9, '-', '_', '.', with a letter or digit at both ends",
        )


def _offered(fields: Fields, name: str, value: str, offered: Iterable[str], what: str) -> None:
    """Only what the operator offers: a name must not reach what it was not meant to."""
    known = sorted(offered)
    if value and value not in known:
        there_are = f"there are {', '.join(known)}" if known else "it has none"
        fields.check(False, name, f"{value[:80]!r} is not among the {what} that this cluster offers; {there_are}")
