"""A real Kubernetes for tests: tests/cluster/testbed in Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests/cluster/testbed"
MANIFESTS = ROOT / "deploy/kustomize/base"
NAMESPACE = "orchard-sandboxes"
SERVICES = "orchard"
COMMAND_SECONDS = 120.0
UP_SECONDS = 300.0
WAIT_SECONDS = 1800
"""How long a node may be another testbed's: one at a time can run on a machine."""


@dataclass(frozen=True, slots=True)
class Testbed:
    """A running cluster. What is under test uses `kubeconfig`; the administrator's is for setting things up."""

    __test__ = False
    folder: Path

    @property
    def kubeconfig(self) -> Path:
        """User `orchard`: exactly what the manifests give to the scheduler."""
        return self.folder / "orchard.kubeconfig"

    @property
    def watcher_kubeconfig(self) -> Path:
        """User `orchard-watcher`: exactly what the manifests give to the watcher."""
        return self.folder / "orchard-watcher.kubeconfig"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    def kubectl(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        """What kubectl prints, as administrator.

        Raises:
            AssertionError: it failed; the text is what it said.
        """
        done = run("kubectl", *arguments, folder=self.folder, stdin=stdin)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(map(json.dumps, objects)))

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def import_image(self, archive: Path) -> None:
        """Load an OCI archive into the node, where Pods name it with imagePullPolicy Never."""
        run("import", str(archive), folder=self.folder).check_returncode()

    def clear(self, namespace: str = NAMESPACE) -> None:
        """Delete every Pod of a namespace, at once, and wait until none is left."""
        self.kubectl("-n", namespace, "delete", "pods", "--all", "--force", "--grace-period=0")


def run(*arguments: str, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """One command of `cluster` for a testbed that runs."""
    return subprocess.run(
        [SCRIPTS / "cluster", *arguments],
        env={**os.environ, "TESTBED_DIR": str(folder)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )


@contextmanager
def running_testbed(*, node: bool) -> Iterator[Testbed]:
    """A cluster of its own with the manifests' namespaces and roles; nothing of it is left afterwards.

    If this process is killed, the next one that starts a testbed ends this one first.
    """
    testbed = start(node=node)
    try:
        grant(testbed)
        yield testbed
    finally:
        run("down", folder=testbed.folder).check_returncode()


def start(*, node: bool, owner: int | None = None) -> Testbed:
    """Only bring it up; it lives as long as the process `owner`, or until `down`."""
    done = subprocess.run(
        [SCRIPTS / "cluster", "up", *(["--node"] if node else [])],
        env={**os.environ, "TESTBED_OWNER": str(owner or os.getpid()), "TESTBED_WAIT": str(WAIT_SECONDS)},
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr is sys.__stderr__ else subprocess.PIPE,
        text=True,
        timeout=UP_SECONDS + (WAIT_SECONDS if node else 0),
    )
    assert done.returncode == 0, done.stderr
    printed = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return Testbed(Path(printed["TESTBED_DIR"]))


def grant(testbed: Testbed) -> None:
    """What the manifests have before any service: namespaces, roles, network policies. The two users have the roles
    that the manifests give to service accounts.
    """
    files = ("namespaces.yaml", "rbac.yaml", "sandbox-network.yaml", "service-network.yaml")
    testbed.kubectl("apply", *(part for name in files for part in ("-f", str(MANIFESTS / name))))
    testbed.apply(_binding("orchard", "orchard-scheduler"), _binding("orchard-watcher", "orchard-watcher"))
    # Pods are admitted only when their account is there.
    for namespace in (NAMESPACE, SERVICES, "default"):
        testbed.kubectl("-n", namespace, "wait", "--for=create", "serviceaccount/default", "--timeout=110s")


def _binding(user: str, role: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"user-{user}", "namespace": NAMESPACE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role},
        "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
    }


def write_image(
    archive: Path,
    name: str,
    folder: Path,
    *,
    entrypoint: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    workdir: str = "",
    user: str = "",
) -> Path:
    """Pack a folder as a one-layer image; gives the archive."""
    subprocess.run(
        [
            *(SCRIPTS / "oci-image", archive, name, folder, "--entrypoint", json.dumps(list(entrypoint))),
            *(argument for key, value in (env or {}).items() for argument in ("--env", f"{key}={value}")),
            *("--workdir", workdir, "--user", user),
        ],
        check=True,
        timeout=COMMAND_SECONDS,
    )
    return archive


def static_busybox() -> Path:
    """Debian's busybox-static: a program that needs no library."""
    found = shutil.which("busybox")
    assert found, "busybox is missing: apt-get install busybox-static"
    return Path(found)


def busybox_root(folder: Path) -> Path:
    """Fill a folder with a root file system that holds busybox and nothing else."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    busybox = static_busybox()
    (programs / "busybox").write_bytes(busybox.read_bytes())
    (programs / "busybox").chmod(0o755)
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (programs / name).symlink_to("busybox")
    for name in ("etc", "tmp", "root", "proc", "dev", "sys"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (folder / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    return folder
