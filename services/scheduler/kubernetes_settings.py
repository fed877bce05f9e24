"""Settings of the scheduler for sandboxes that are Pods: what the operator decides, and what specs may choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, IPvAnyAddress, ValidationInfo, field_validator

from services.common.runtime_settings import RuntimeSettings
from services.scheduler.pod_manifest import PodProfile

_SHARE = "Part of a sandbox's {what} limit that its Pod requests of its node, 0 to 1: below 1, nodes are overcommitted."


class KubernetesSettings(RuntimeSettings):
    """Read from ORCHARD_* environment variables, lists and maps as JSON. With the kubernetes runtime alone."""

    payload_image: str = Field(
        default="", validate_default=True, description="Image that holds the agent; needed with the kubernetes runtime."
    )
    payload_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    payload_delivery: Literal["auto", "image-volume", "copy"] = Field(
        default="auto",
        description="How the agent comes into Pods: as an image volume, by an init container that copies it, or as a "
        "probe Pod finds out at each start.",
    )
    api_requests_per_second: float = Field(
        default=1000.0, gt=0, description="Requests that this scheduler sends to the API server in the long run."
    )
    api_burst: int = Field(default=1000, ge=1, description="Requests that it may send at once.")
    default_cpu: float = Field(default=1.0, ge=0.1, le=256, description="CPU limit of a sandbox whose spec has none.")
    default_memory_bytes: int = Field(default=2 << 30, ge=16 << 20, description="Its memory limit.")
    default_disk_bytes: int = Field(default=10 << 30, ge=16 << 20, description="Its ephemeral storage limit.")
    maximum_lifetime_seconds: int = Field(
        default=30 * 86_400,
        ge=1,
        le=365 * 86_400,
        description="How long a sandbox may live at most, unless its tenant's quota says less: its Pod's "
        "activeDeadlineSeconds.",
    )
    stuck_delete_seconds: float = Field(
        default=120.0,
        ge=1,
        description="A Pod that has been terminating for so long is removed without its node's word.",
    )
    pod_cpu_request_share: float = Field(default=1.0, ge=0, le=1, description=_SHARE.format(what="CPU"))
    pod_memory_request_share: float = Field(default=1.0, ge=0, le=1, description=_SHARE.format(what="memory"))
    pod_disk_request_share: float = Field(default=0.1, ge=0, le=1, description=_SHARE.format(what="storage"))
    pod_priority_class: str = Field(default="", description="priorityClassName of every Pod.")
    pod_node_selector: dict[str, str] = Field(default={}, description="Labels that every Pod's node must have.")
    pod_tolerations: list[dict[str, Any]] = Field(
        default=[], description="Tolerations of every Pod, as the API has them."
    )
    pod_runtime_class: str = Field(default="", description="runtimeClassName where the spec names none.")
    pod_image_pull_secrets: list[str] = Field(default=[], description="Secrets with which every image is pulled.")
    pod_user_namespaces: bool = Field(
        default=False,
        description="hostUsers: false, so that root in a sandbox is nobody on its node. Needs Kubernetes 1.33 and "
        "nodes that can.",
    )
    pod_privilege_escalation: bool = Field(
        default=False, description="allowPrivilegeEscalation, which sudo by a user who is not root needs."
    )
    pod_restricted: bool = Field(
        default=False,
        description="Pods keep to the Pod security standard `restricted`: user 1000, no root, no capability, whatever "
        "the image says. Images whose work needs root do not run then.",
    )
    pod_gpu_resource: str = Field(default="nvidia.com/gpu", description="What a GPU is called on the nodes.")
    pod_nameservers: list[IPvAnyAddress] = Field(
        default=[],
        max_length=3,  # the API takes no more
        description="Addresses of the name servers of every Pod that may look up names; empty: its node's. The network "
        "policy `names` must open them.",
    )
    offered_image_pull_secrets: frozenset[str] = Field(
        default=frozenset(), description="Secrets that a spec may name; every tenant may use each of them."
    )
    offered_node_labels: frozenset[str] = Field(
        default=frozenset(), description="Keys of node labels by which a spec may choose its node."
    )
    offered_runtime_classes: frozenset[str] = Field(
        default=frozenset(), description="runtimeClassNames a spec may name."
    )
    offered_allow_lists: frozenset[str] = Field(
        default=frozenset(),
        description="Allow-lists a spec may name; each is a network policy that selects Pods by the label "
        "orchard.dev/network=allow-list-NAME.",
    )

    @field_validator("payload_image")
    @classmethod
    def _with_kubernetes(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("runtime") == "kubernetes":
            raise ValueError("is needed with ORCHARD_RUNTIME=kubernetes: the image that holds the agent")
        return value

    def pod_profile(self, public_keys_pem: str) -> PodProfile:
        """What every Pod has of these."""
        return PodProfile(
            public_keys_pem=public_keys_pem,
            lifetime_ms=self.maximum_lifetime_seconds * 1000,
            cpu_request_share=self.pod_cpu_request_share,
            memory_request_share=self.pod_memory_request_share,
            disk_request_share=self.pod_disk_request_share,
            priority_class=self.pod_priority_class,
            node_selector=self.pod_node_selector,
            tolerations=tuple(self.pod_tolerations),
            runtime_class=self.pod_runtime_class,
            image_pull_secrets=tuple(self.pod_image_pull_secrets),
            user_namespaces=self.pod_user_namespaces,
            privilege_escalation=self.pod_privilege_escalation,
            restricted=self.pod_restricted,
            gpu_resource=self.pod_gpu_resource,
            nameservers=tuple(map(str, self.pod_nameservers)),
            offered_image_pull_secrets=self.offered_image_pull_secrets,
            offered_node_labels=self.offered_node_labels,
            offered_runtime_classes=self.offered_runtime_classes,
            offered_allow_lists=self.offered_allow_lists,
        )

    def probe_placement(self) -> Mapping[str, Any]:
        """What a Pod's spec must have to run where sandboxes run."""
        placement: dict[str, Any] = {}
        if self.pod_node_selector:
            placement["nodeSelector"] = self.pod_node_selector
        if self.pod_tolerations:
            placement["tolerations"] = self.pod_tolerations
        if self.pod_image_pull_secrets:
            placement["imagePullSecrets"] = [{"name": name} for name in self.pod_image_pull_secrets]
        if self.pod_runtime_class:
            placement["runtimeClassName"] = self.pod_runtime_class
        return placement
