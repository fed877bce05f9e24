"""A sandbox as a container, in plain dictionaries: nothing here talks to anybody."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.common import pods
from services.local.docker.engine import Container, EngineFacts, ImageFacts
from services.local.runtime.model import Ended, Reason, Request
from services.local.runtime.planning import DEFAULT_PIDS
from services.local.runtime.steps import SOCKET_NAME

PLATFORM_LABEL: Final = "dev.orchard.platform"
"""On every container of ours: whose it is, a hash of the data directory."""
UID_LABEL: Final = "dev.orchard.uid"
KEYS_LABEL: Final = "dev.orchard.keys"
"""A hash of the gateways' public keys, without which an agent trusts nobody."""
SOCKET_FOLDER: Final = f"{pods.ROOT}/socket"

# As on a cluster: what package managers and su in an image need.
_CAPABILITIES: Final = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
_EXIT_CONFIGURATION: Final = 78  # of the payload's init: an agent that no restart helps


@dataclass(frozen=True, slots=True)
class Place:
    """Where things of one platform are on the machine, and what the engine is.

    Attributes:
        platform: its name on labels.
        payload: the agent's payload.
        sandboxes: a folder for each sandbox.
        links: short paths to those, for sockets.
        engine: what the engine is.
    """

    platform: str
    payload: Path
    sandboxes: Path
    links: Path
    engine: EngineFacts

    @property
    def label(self) -> str:
        """By which our containers are found."""
        return label_of(self.platform)

    def name(self, uid: str) -> str:
        """A sandbox's container."""
        return f"orchard-{self.platform}-{uid}"

    def folder(self, uid: str) -> Path:
        """What a sandbox's container sees of the machine."""
        return self.sandboxes / uid

    def link(self, uid: str) -> Path:
        """The short path to the folder of its socket: paths of sockets have 107 bytes at most."""
        return self.links / uid

    def socket(self, uid: str) -> Path:
        """Its agent's socket."""
        return self.link(uid) / SOCKET_NAME


def platform_of(data: Path) -> str:
    """The name of the platform on a data directory."""
    return hashlib.sha256(os.fsencode(data)).hexdigest()[:12]


def label_of(platform: str) -> str:
    """By which the containers of a platform are found."""
    return f"{PLATFORM_LABEL}={platform}"


def hash_of_keys(public_keys_pem: str) -> str:
    """For KEYS_LABEL."""
    return hashlib.sha256(public_keys_pem.encode()).hexdigest()[:16]


def make_folders(place: Place, request: Request, image: ImageFacts, public_keys_pem: str) -> None:
    """Write what a sandbox's agent reads, and make the folder of its socket.

    Raises:
        OSError: there is no space.
    """
    folder = place.folder(request.uid)
    config, socket = folder / "config", folder / "socket"
    for path in (folder, config, socket):
        path.mkdir(mode=0o755, exist_ok=True)
    # Where a container's root is no user of ours, nothing but the folders around keeps others out.
    socket.chmod(0o777 if place.engine.remaps_users else 0o755)
    told = {**request.annotations, pods.PUBLIC_KEYS: public_keys_pem}
    # The agent runs as root, whoever the image's user is: commands run as that user then.
    told[pods.SPEC] = pods.with_user(told[pods.SPEC], image.user)
    for name, key in pods.CONFIG_FILES.items():
        _write(config / name, told[key])
    _write(config / "uid", request.uid)
    make_link(place, request.uid)


def make_link(place: Place, uid: str) -> None:
    """Make the short path to a sandbox's socket; the folder it is in does not outlive a platform."""
    link = place.link(uid)
    link.unlink(missing_ok=True)
    link.symlink_to(place.folder(uid) / "socket")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def configuration(place: Place, request: Request, image: ImageFacts, public_keys_pem: str) -> dict[str, Any]:
    """What the engine is told to make. No secret is in it: those go from the gateway to the agent."""
    return {
        "Image": image.id,
        "Entrypoint": [f"{pods.PAYLOAD_FOLDER}/init", f"unix:{SOCKET_FOLDER}/{SOCKET_NAME}"],
        "Cmd": [],
        "User": "0:0",
        "Hostname": "sandbox",
        "Labels": {
            PLATFORM_LABEL: place.platform,
            UID_LABEL: request.uid,
            KEYS_LABEL: hash_of_keys(public_keys_pem),
            pods.MANAGED_BY_LABEL: pods.MANAGED_BY,
            **request.annotations,
        },
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_configuration(place, request),
    }


def _host_configuration(place: Place, request: Request) -> dict[str, Any]:
    resources = request.resources
    folder = place.folder(request.uid)
    return {
        "NetworkMode": "default" if request.open_network else "none",
        "IpcMode": "private",
        "Mounts": [
            _bind(place.payload, pods.PAYLOAD_FOLDER, read_only=True),
            _bind(folder / "config", pods.CONFIG_FOLDER, read_only=True),
            _bind(folder / "socket", SOCKET_FOLDER, read_only=False),
            # The engine's own, so that it goes with the container, whoever its files belong to.
            {"Type": "volume", "Target": pods.STATE_FOLDER},
        ],
        "NanoCpus": math.ceil(resources.cpu * 1e9),
        "Memory": resources.memory_bytes,
        # Memory and swap together: no swap.
        "MemorySwap": resources.memory_bytes,
        "PidsLimit": resources.pids or DEFAULT_PIDS,
        "ShmSize": resources.shm_bytes or 64 << 20,
        "CapDrop": ["ALL"],
        "CapAdd": list(_CAPABILITIES),
        # The engine's default seccomp profile stays on.
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
    }


def _bind(source: Path, target: str, *, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


def annotations_of(labels: Mapping[str, str]) -> dict[str, str]:
    """What a record is rebuilt from, of a container's labels."""
    return {key: value for key, value in labels.items() if key.startswith("orchard.dev/")}


def why_ended(uid: str, container: Container | None, *, engine_was_away: bool, log: str) -> Ended:
    """Why a sandbox that nobody deleted is no more; `container` is None where it was removed."""
    if container is None:
        return Ended(uid, Reason.DELETED_EXTERNALLY, "its container was removed behind the platform's back")
    if container.out_of_memory:
        return Ended(uid, Reason.OOM, "it ran out of memory and its container was ended as a whole")
    if container.exit_code == _EXIT_CONFIGURATION:
        return Ended(uid, Reason.AGENT_START, f"its agent cannot run: {log or 'it wrote nothing'}")
    code = f"exit code {container.exit_code}"
    if engine_was_away:
        return Ended(
            uid, Reason.HOST_RESTART, f"its container ended while the engine was stopped or restarted ({code})"
        )
    return Ended(uid, Reason.DELETED_EXTERNALLY, f"its container was ended from outside ({code})")
