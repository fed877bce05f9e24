"""How a sandbox stands on its Pod: what the scheduler writes there and the watcher reads.

Everything that rebuilds a record is on the Pod, so that losing Redis loses no sandbox. Labels only select; what a
caller chose is in annotations, whose values need no form.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from orchard.sandbox.v1 import sandbox_pb2

from services.common.validation import seconds_of

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "orchard"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
COMPONENT: Final = "sandbox"
SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY},{COMPONENT_LABEL}={COMPONENT}"

NETWORK_LABEL: Final = "orchard.dev/network"
"""By which network policies select: "none", "dns-only", "open", or "allow-list-NAME"."""

TENANT: Final = "orchard.dev/tenant"
SANDBOX_ID: Final = "orchard.dev/sandbox-id"
REQUEST_ID: Final = "orchard.dev/request-id"
SPEC_HASH: Final = "orchard.dev/spec-hash"
SPEC: Final = "orchard.dev/spec"
"""The serialised orchard.sandbox.v1.SandboxSpec, zlib-compressed, in base64."""
CREATE_MS: Final = "orchard.dev/create-ms"
"""When its create was accepted, in milliseconds since 1970 by the lease store's clock. A Pod's own creation time is of
another clock and has whole seconds.
"""
EXPIRE_MS: Final = "orchard.dev/expire-ms"
"""Its deadline in milliseconds since 1970."""
EXPECTS_SECRET_ENV: Final = "orchard.dev/expects-secret-env"  # noqa: S105 (a name)
"""1 or 0."""
PUBLIC_KEYS: Final = "orchard.dev/gateway-public-keys"
"""The gateways' public keys in PEM, two at most: what an agent checks tokens with."""

ANNOTATIONS_BYTES: Final = 256 << 10
"""What the API server accepts of an object's annotations, keys and values together."""
_SPEC_BYTES: Final = 8 << 20  # above what a request may have

CONTAINER: Final = "sandbox"
AGENT_PORT: Final = 7070

ROOT: Final = "/.orchard"
PAYLOAD_FOLDER: Final = f"{ROOT}/agent"
"""The payload, read-only. Its `init` is the container's command."""
CONFIG_FOLDER: Final = f"{ROOT}/config"
"""A downward API volume: files named below."""
STATE_FOLDER: Final = f"{ROOT}/state"
"""An emptyDir for the agent's journal and spools."""

CONFIG_FILES: Final = {
    "sandbox-id": SANDBOX_ID,
    "spec": SPEC,
    "expects-secret-env": EXPECTS_SECRET_ENV,
    "public-keys": PUBLIC_KEYS,
}
"""Names of files in the config folder, each with the annotation that it shows. Beside them, `uid` shows the uid."""


def pod_name(tenant: str, sandbox_id: str) -> str:
    """The one name that a sandbox's Pod has, so that a repeated create finds the first one's Pod."""
    digest = hashlib.sha256(f"{tenant}/{sandbox_id}".encode()).hexdigest()
    return f"sandbox-{digest[:40]}"


def encode_spec(serialized: bytes) -> str:
    """A serialised spec as the value of its annotation."""
    return base64.b64encode(zlib.compress(serialized)).decode()


def decode_spec(annotation: str) -> bytes:
    """The serialised spec in an annotation.

    Raises:
        ValueError: it holds none, or one that is too large.
    """
    decompressor = zlib.decompressobj()
    try:
        serialized = decompressor.decompress(base64.b64decode(annotation, validate=True), _SPEC_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the annotation {SPEC} holds no spec: {error}") from None
    if not decompressor.eof:
        raise ValueError(f"the annotation {SPEC} holds no whole spec of at most {_SPEC_BYTES} bytes")
    return serialized


def spec_of(annotation: str) -> sandbox_pb2.SandboxSpec:
    """The spec in an annotation.

    Raises:
        ValueError: it holds none.
    """
    return _parsed(decode_spec(annotation))


def with_user(annotation: str, user: str) -> str:
    """The annotation of a spec that names this user, unless it names one already.

    Raises:
        ValueError: it holds none.
    """
    spec = spec_of(annotation)
    spec.user = spec.user or user
    return encode_spec(spec.SerializeToString(deterministic=True))


class Patience(NamedTuple):
    """How long a spec's sandbox may take to start, in seconds."""

    start: float
    """From its Pod's creation to READY, without the pull."""
    pull: float


def patience_of(serialized: bytes) -> Patience:
    """The patience of a serialised spec.

    Raises:
        ValueError: it is none.
    """
    spec = _parsed(serialized)
    return Patience(seconds_of(spec.start_timeout) or 60.0, seconds_of(spec.pull_timeout) or 900.0)


def _parsed(serialized: bytes) -> sandbox_pb2.SandboxSpec:
    try:
        return sandbox_pb2.SandboxSpec.FromString(serialized)
    except DecodeError as error:
        raise ValueError(f"the annotation {SPEC} holds no spec: {error}") from None
