"""Plans a sandbox: what of a request, an image and this machine the zygote has to know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from services.local.runtime.bwrap import DEFAULT_SHM_BYTES, Overlay, Root, arguments
from services.local.runtime.cgroups import Limits
from services.local.runtime.model import Image, Request
from services.local.runtime.plan import Plan
from services.local.runtime.setup import Machine
from services.local.runtime.userids import USER_GAP

DEFAULT_PIDS: Final = 4096
RESOLVER_FILE: Final = "resolv.conf"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOME: Final = "/root"


class Planner:
    """Plans sandboxes of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def plan(self, request: Request, image: Image | None, public_keys_pem: str) -> Plan:
        """The plan of one sandbox."""
        machine = self._machine
        resources = request.resources
        folder = machine.inside(machine.sandbox_folder(request.uid))
        root = Root(
            overlays=self._overlays(image),
            bounds=() if image is not None else machine.host_bounds(),
            shm_bytes=resources.shm_bytes,
            host_network=request.host_network,
            resolver=f"{folder}/{RESOLVER_FILE}" if request.host_network else None,
        )
        agent = self._agent_fields(request, image, public_keys_pem)
        return Plan(
            folder=folder,
            socket_folder=machine.inside(machine.socket_folder(request.uid)),
            ids=machine.ids,
            bwrap=arguments(root, folder),
            layers=len(root.overlays),
            host_network=request.host_network,
            most_processes=0 if machine.cgroups.version else limits_of(request).pids,
            agent=agent,
        )

    def spare(self, request: Request) -> Plan:
        """The plan of a sandbox that nobody asked for yet; fits_spare says whose it can become."""
        return replace(self.plan(request, None, ""), agent={}, waits=True)

    def fits_spare(self, request: Request) -> bool:
        """Whether all of a request can be had of a sandbox that is already there."""
        resources = request.resources
        # Without control groups the number of processes is bound before the agent begins.
        processes = bool(self._machine.cgroups.version) or limits_of(request).pids == DEFAULT_PIDS
        memory = resources.shm_bytes in (0, DEFAULT_SHM_BYTES)
        return processes and memory and not request.image and not request.host_network

    def _overlays(self, image: Image | None) -> tuple[Overlay, ...]:
        machine = self._machine
        if image is not None:
            root = machine.image_folder(image.digest)
            return (Overlay("/", (machine.inside(root / "base"), machine.inside(root / "root"))),)
        return machine.host_overlays()

    def _agent_fields(self, request: Request, image: Image | None, public_keys_pem: str) -> dict[str, Any]:
        env = {"PATH": _PATH, "HOME": _HOME, "LANG": "C.UTF-8"}
        if image is not None:
            env.update(image.env)
        env.update(request.env)
        user = request.user or (image.user if image else "")
        # The home of root is closed to others.
        home = _HOME if user.partition(":")[0] in ("", "root", "0") else "/"
        switchable = self._machine.ids.switchable
        return {
            "uid": request.uid,
            "sandbox_id": request.sandbox_id,
            "public_keys_pem": public_keys_pem,
            "env": env,
            "working_directory": request.working_directory or (image.working_directory if image else "") or home,
            "user": user,
            "start_argv": list(request.start_argv),
            "expects_secret_env": request.expects_secret_env,
            "can_switch_user": switchable,
            "user_gap": "" if switchable else USER_GAP,
            "gaps": list(self._machine.gaps),
            "restarts": 0,
        }


def limits_of(request: Request) -> Limits:
    """What its commands may use."""
    resources = request.resources
    return Limits(resources.cpu, resources.memory_bytes, resources.pids or DEFAULT_PIDS)
