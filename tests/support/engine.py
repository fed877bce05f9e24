"""A real Docker engine for tests: Debian's dockerd with everything of its own, and a registry beside it.

It runs in network and mount namespaces of its own, so that neither its bridge nor its mounts are the machine's, keeps
all it has in one folder, and ends with the test process. Packages: docker.io and docker-registry.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.testbed import busybox_root

START_SECONDS = 120.0
COMMAND_SECONDS = 120.0
BUSYBOX = "orchard.test/busybox:1"
REGISTRY = "127.0.0.1:5000"
"""Inside of the engine's network; whoever pulls from it needs no name."""
CLOSED_REGISTRY = "127.0.0.1:5001"
"""Wants the user `reader` with the password `secret`."""
_READER = "reader:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a"


class TestEngine:
    """An engine, and what can be done to it from outside of what is under test: the docker command line is Debian's."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = f"orchard-{folder.name}"
        self.containerd: subprocess.Popen[bytes] | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.registries: list[subprocess.Popen[bytes]] = []

    @property
    def socket(self) -> Path:
        return self.folder / "docker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """For whoever is to use this engine."""
        return {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": str(self.folder / "client")}

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start it. It ends with the thread that does, so that must be the first one."""
        assert threading.current_thread() is threading.main_thread()
        self.socket.unlink(missing_ok=True)
        if self.containerd is None:
            self.containerd = self._spawn("unshare", "--net", "--mount", *self._containerd())
            # Before that its namespaces are still the machine's.
            self._wait(self.containerd, (self.folder / "containerd.sock").exists)
        self.process = self._spawn(*self._inside("--mount"), *self._daemon())

    def _containerd(self) -> Sequence[str]:
        """Containers hang on it, so they outlive a daemon that is killed."""
        settings = self.folder / "containerd.toml"
        # What it is not asked for costs a second, and looks for programs that are not there.
        settings.write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
        options = ("--config", settings, "--root", self.folder / "c", "--state", self.folder / "s")
        command = ("containerd", *map(str, options), "--address", str(self.folder / "containerd.sock"))
        return ("sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command, "--log-level", "warn")

    def _daemon(self) -> Sequence[str]:
        return (
            *("dockerd", "--host", f"unix://{self.socket}", "--data-root", str(self.folder / "data")),
            *("--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "pid")),
            *("--containerd", str(self.folder / "containerd.sock")),
            # What it has of the network is in a namespace of its own; still nothing of iptables is needed.
            *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"),
            *("--cgroup-parent", f"/{self.group}", "--log-level", "warn"),
        )

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                # Whatever becomes of the tests, it ends with them.
                ["setpriv", "--pdeathsig", "TERM", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("DOCKER")},
            )

    def wait_ready(self) -> None:
        """Wait until it answers."""
        self._wait(self._process, lambda: self.docker("version", check=False).returncode == 0)

    def _wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-6000:]

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the engine was not started"
        return self.process

    def docker(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["/usr/bin/docker", *arguments],
            env={"PATH": os.environ["PATH"], **self.environment},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert done.returncode == 0 or not check, f"docker {arguments}: {done.stderr}"
        return done

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(json.loads(self.docker("inspect", container).stdout)[0])

    def containers(self, *filters: str) -> list[str]:
        """Ids of all containers, those that have ended too."""
        options = [part for one in filters for part in ("--filter", one)]
        return self.docker("ps", "--all", "--quiet", "--no-trunc", *options).stdout.split()

    def make_image(self, name: str, root: Path, *changes: str) -> None:
        """An image of a folder; `changes` are lines of a Dockerfile."""
        archive = self.folder / "image.tar"
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True, timeout=COMMAND_SECONDS)
        self.docker("import", *(part for one in changes for part in ("--change", one)), str(archive), name)
        archive.unlink()

    # Its ends

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """As an operator stops it; containers end."""
        self._process.terminate()
        self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(START_SECONDS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, with its containers, and remove all of it."""
        self.end_registries()
        if self.process is not None:
            if self.process.poll() is not None:
                self.start()
            left = self.containers()
            if left:
                self.docker("rm", "--force", "--volumes", *left)
            self.stop()
        if self.containerd is not None:
            self.containerd.terminate()
            self.containerd.wait(START_SECONDS)
        for group in [*Path("/sys/fs/cgroup").glob(f"*/{self.group}"), Path("/sys/fs/cgroup", self.group)]:
            with suppress(FileNotFoundError):
                group.rmdir()
        shutil.rmtree(self.folder)

    # Registries

    def start_registries(self) -> None:
        """One for everybody and one for `reader`, with the image "busybox:1" each, in the engine's network."""
        users = self.folder / "users"
        users.write_text(_READER)
        closed = {"auth": {"htpasswd": {"realm": "test", "path": str(users)}}}
        for address, more in ((REGISTRY, {}), (CLOSED_REGISTRY, closed)):
            self._start_registry(address, more)
        self.docker("login", "--username", "reader", "--password", "secret", CLOSED_REGISTRY)
        for address in (REGISTRY, CLOSED_REGISTRY):
            self.docker("tag", BUSYBOX, f"{address}/busybox:1")
            self.docker("push", f"{address}/busybox:1")
            self.docker("rmi", f"{address}/busybox:1")
        self.docker("logout", CLOSED_REGISTRY)

    def _start_registry(self, address: str, more: Mapping[str, Any]) -> None:
        name = address.replace(":", "-")
        settings = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / name)}},
            "http": {"addr": address},
            **more,
        }
        (self.folder / f"{name}.yml").write_text(json.dumps(settings))  # JSON is YAML
        command = ("docker-registry", "serve", str(self.folder / f"{name}.yml"))
        self.registries.append(self._spawn(*self._inside(), *command))
        listening = f":{int(address.partition(':')[2]):04X} 00000000:0000 0A"
        table = Path(f"/proc/{self._process.pid}/net/tcp")
        self._wait(self.registries[-1], lambda: listening in table.read_text())

    def _inside(self, *more: str) -> Sequence[str]:
        assert self.containerd is not None
        return ("nsenter", "--net", *more, "--target", str(self.containerd.pid))

    def end_registries(self) -> None:
        for registry in self.registries:
            registry.terminate()
            registry.wait(COMMAND_SECONDS)
        self.registries = []


@contextmanager
def running_engine() -> Iterator[TestEngine]:
    """An engine that has the image BUSYBOX; nothing of it is left afterwards."""
    assert os.geteuid() == 0, "an engine needs root: run the suite as root"
    folder = Path(tempfile.mkdtemp(prefix="oe-", dir="/tmp"))
    (folder / "client").mkdir()
    engine = TestEngine(folder)
    try:
        engine.start()
        engine.make_image(BUSYBOX, busybox_root(folder / "root"), "ENV PATH=/bin FROM_IMAGE=yes")
        shutil.rmtree(folder / "root")
        yield engine
    finally:
        engine.close()
