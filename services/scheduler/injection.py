"""What brings the agent into a Pod, whatever its image is.

The payload (scripts/build-payload) is an image of its own, whose root holds `init` and `runtime`. A cluster that can
mount an image does so: read-only, without a copy, unpacked once a node. On any other an init container copies it
into a volume of the Pod. The agent reads what it is told from a volume that shows the Pod's uid and annotations, and
applies the spec's env, user, working directory and start command itself, so a Pod says nothing of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.common import pods

COPY_BYTES: Final = 80 << 20
"""At most what a copied payload takes of a Pod's ephemeral storage."""

_AGENT: Final = "orchard-agent"
_CONFIG: Final = "orchard-config"
_STATE: Final = "orchard-state"
_COPY_TARGET: Final = "/target"
_NOBODY: Final = 65534
_COMMAND: Final = f"{pods.PAYLOAD_FOLDER}/init"


class Delivery(enum.StrEnum):
    """How the payload comes into a Pod."""

    IMAGE_VOLUME = "image-volume"
    """As a volume: Kubernetes 1.33 or newer with the feature ImageVolume, containerd 2.1 or CRI-O 1.31."""
    COPY = "copy"
    """By an init container, on every cluster."""


@dataclass(frozen=True, slots=True)
class Injection:
    """The parts of a Pod that hold the agent: everything below pods.ROOT, its volumes, and what is started.

    Objects as the API takes them. Whoever adds them to a Pod must not change them: every Pod shares them.
    """

    volumes: tuple[Mapping[str, Any], ...]
    """Of the Pod."""
    mounts: tuple[Mapping[str, Any], ...]
    """Of the sandbox's container."""
    init_containers: tuple[Mapping[str, Any], ...]
    """Run before it; none where the payload needs no copy."""
    command: tuple[str, ...]
    """Of the sandbox's container, in place of the image's entry point."""


def injection_of(delivery: Delivery, image: str, pull_policy: str = "IfNotPresent") -> Injection:
    """The parts for one way of delivery. `image` is the payload's; `pull_policy` is of the API's imagePullPolicy."""
    by_volume = delivery is Delivery.IMAGE_VOLUME
    agent = _image_volume(image, pull_policy) if by_volume else {"name": _AGENT, "emptyDir": {}}
    return Injection(
        volumes=(agent, _config_volume(), {"name": _STATE, "emptyDir": {}}),
        mounts=(
            {"name": _AGENT, "mountPath": pods.PAYLOAD_FOLDER, "readOnly": True},
            {"name": _CONFIG, "mountPath": pods.CONFIG_FOLDER, "readOnly": True},
            {"name": _STATE, "mountPath": pods.STATE_FOLDER},
        ),
        init_containers=() if by_volume else (_copying(image, pull_policy),),
        command=(_COMMAND,),
    )


def probe_spec(image: str, pull_policy: str = "IfNotPresent") -> dict[str, Any]:
    """Spec of a Pod that succeeds where Delivery.IMAGE_VOLUME works.

    It runs the payload out of the volume. Where the cluster does not know such volumes the create is refused, or the
    Pod never starts; nothing else than the payload's own image is pulled.
    """
    container = _small(image, pull_policy, [_COMMAND, "check"])
    container["volumeMounts"] = [{"name": _AGENT, "mountPath": pods.PAYLOAD_FOLDER, "readOnly": True}]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [_image_volume(image, pull_policy)],
    }


def _image_volume(image: str, pull_policy: str) -> dict[str, Any]:
    return {"name": _AGENT, "image": {"reference": image, "pullPolicy": pull_policy}}


def _config_volume() -> dict[str, Any]:
    uid = {"path": "uid", "fieldRef": {"fieldPath": "metadata.uid"}}
    annotations = [
        {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
        for path, key in pods.CONFIG_FILES.items()
    ]
    return {"name": _CONFIG, "downwardAPI": {"items": [uid, *annotations]}}


def _copying(image: str, pull_policy: str) -> dict[str, Any]:
    container = _small(image, pull_policy, ["/init", "copy", _COPY_TARGET])
    container["volumeMounts"] = [{"name": _AGENT, "mountPath": _COPY_TARGET}]
    return container


def _small(image: str, pull_policy: str, command: list[str]) -> dict[str, Any]:
    """A container of the payload's image that may do nothing but what it is for."""
    return {
        "name": _AGENT,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": command,
        # Why a copy failed stands in its log: a full disk, for instance.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": _NOBODY,
        },
        # What the sandbox's own container asks for is more, so a Pod with it needs no more than one without.
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi", "ephemeral-storage": str(COPY_BYTES)},
            "limits": {"cpu": "1", "memory": "64Mi", "ephemeral-storage": str(COPY_BYTES)},
        },
    }
