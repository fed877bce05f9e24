"""The real platform in a process of its own, for end-to-end tests, and proof that nothing of it is left.

`running_platform(folder)` is the whole of it for most tests. Nothing of the user's own is touched: data, profile and
sockets are in `folder` and in a short folder of /tmp.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.local.runtime import cgroups
from services.local.supervisor.directories import mounts_below, run_directory_of

ROOT = Path(__file__).parents[2]
START_SECONDS = 200.0
STOP_SECONDS = 110.0
SERVICES = ("gateway", "judge", "trajectories", "scheduler", "watcher", "node", "valkey", "postgres")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid that cannot be mistaken for a later process."""

    pid: int
    started: str

    def lives(self) -> bool:
        found = identify(self.pid)
        return found == self


class PlatformProcess:
    """`python -m services.local up` and what can be done to it."""

    def __init__(
        self,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        listen: str = "127.0.0.1:0",
    ) -> None:
        """`prefix`, such as `setpriv ...`, starts the rest; `folder` belongs to the user that results."""
        self.folder = folder
        self.data = folder / "data"
        self.listen = listen
        self.prefix = tuple(prefix)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ORCHARD_", "XDG_"))},
            "HOME": str(folder),
            "ORCHARD_CONFIG_DIR": str(folder / "config"),
            "NO_COLOR": "1",
            **(environment or {}),
        }
        self.facts: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._seen: set[ProcessId] = set()

    # Starting and stopping.

    def start(self, *arguments: str) -> None:
        """Start it and wait until all is up."""
        ready = self.launch(*arguments)
        try:
            line = _read_line(ready, START_SECONDS)
        finally:
            os.close(ready)
        if not line:
            code = self.wait_end()
            raise AssertionError(f"the platform did not start (exit code {code}):\n{self.output()}")
        self.facts = json.loads(line)
        self.note_processes()

    def launch(self, *arguments: str) -> int:
        """Start it and return at once; the descriptor gives a line when all is up, its end if that never happens."""
        ready, ready_end = os.pipe()
        lifeline_end, self._lifeline = os.pipe()
        with (self.folder / "output.txt").open("ab") as output:
            fds = (ready_end, lifeline_end)
            up = (sys.executable, "-m", "services.local", "up", "--data-dir", str(self.data), "--listen", self.listen)
            self.process = subprocess.Popen(
                (*self.prefix, *up, "--ready-fd", str(fds[0]), "--lifeline-fd", str(fds[1]), *arguments),
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                start_new_session=True,
            )
        os.close(ready_end)
        os.close(lifeline_end)
        return ready

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.note_processes()
        self._process.send_signal(signal.SIGINT)
        return self.wait_end()

    def kill_supervisor(self) -> None:
        """kill -9 of the supervisor alone."""
        self.note_processes()
        self._process.kill()
        self.wait_end()

    def wait_end(self) -> int:
        """Wait until the supervisor has ended; returns its exit code."""
        code = self._process.wait(STOP_SECONDS)
        self.close()
        return code

    def close(self) -> None:
        """Let go of it, which also ends it if it still runs."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self.process is not None:
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "not started"
        return self.process

    # What it says.

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return str(self.facts["endpoint"])

    @property
    def run(self) -> Path:
        """Folder of the Unix sockets."""
        return Path(self.facts["run_directory"])

    def address(self, service: str) -> str:
        """Where one of our services speaks gRPC."""
        return self.endpoint if service == "gateway" else f"unix:{self.run}/{service}.sock"

    @property
    def profile(self) -> dict[str, str]:
        return dict(json.loads((Path(self.environment["ORCHARD_CONFIG_DIR"]) / "profile.json").read_text()))

    @property
    def api_key(self) -> str:
        return self.profile["api_key"]

    def client_environment(self) -> dict[str, str]:
        """For a program that uses the SDK or the command line."""
        return {**self.environment}

    def output(self) -> str:
        """Everything printed so far, by all starts."""
        return (self.folder / "output.txt").read_text()

    def status(self) -> dict[str, Any]:
        """What the supervisor says of each process: state, pid, starts."""
        return dict(json.loads((self.run / "status.json").read_text())["services"])

    def service_pid(self, name: str) -> int:
        pid = self.status()[name]["pid"]
        assert pid is not None, f"{name} is down"
        return int(pid)

    def kill_service(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Returns the pid that was sent the signal."""
        self.note_processes()
        pid = self.service_pid(name)
        os.kill(pid, number)
        return pid

    @contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        """Services that stand still and keep their connections (SIGSTOP); of PostgreSQL every process of it."""
        pids = []
        for name in names:
            pid = self.service_pid(name)
            os.kill(pid, signal.SIGSTOP)
            # Its children serve the connections that are open.
            below = [child.pid for child in descendants(pid)] if name == "postgres" else []
            for child in below:
                os.kill(child, signal.SIGSTOP)
            pids += [pid, *below]
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def held_down(self, *names: str) -> Iterator[None]:
        """Services that are dead, and that nobody starts again as long as this lasts; afterwards all serve again."""
        before = {name: self.service_pid(name) for name in names}
        self.note_processes()
        os.kill(self.pid, signal.SIGSTOP)
        try:
            for pid in before.values():
                os.kill(pid, signal.SIGKILL)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)
        for name, pid in before.items():
            self.wait_ready(name, not_pid=pid)

    def wait_ready(self, name: str, *, not_pid: int = 0, seconds: float = 110.0) -> int:
        """Wait until a service serves, under another pid than `not_pid`; returns its pid."""

        def ready() -> bool:
            service = self.status()[name]
            return service["state"] == "ready" and service["pid"] != not_pid

        wait_until(ready, f"{name} to be ready", seconds=seconds)
        self.note_processes()
        return self.service_pid(name)

    # What is left.

    def note_processes(self, below: int = 0) -> None:
        """Remember every process below the supervisor, or another one, to see later that each has ended."""
        if self.process is not None and self.process.poll() is None:
            below = self.process.pid
        self._seen |= descendants(below) if below else set()

    def leftovers(self) -> list[str]:
        """Processes, mounts, control groups and sockets of it that exist now, each as a line."""
        found = [f"process {_describe(process.pid)}" for process in self._seen if process.lives()]
        run = run_directory_of(self.data.resolve(), self.environment)
        for place in (self.data, run):
            found += [f"mount {point}" for point in mounts_below(place)]
        found += [f"control group {group}" for group in cgroups.left(cgroups.name_of(self.data.resolve() / "node"))]
        if run.exists() and not found:
            found += [f"file {path}" for path in sorted(run.rglob("*"))]
        return found + [f"process {_describe(pid)}" for pid in processes_naming(str(self.data), str(run))]

    def wait_nothing_left(self, *, seconds: float = 110.0) -> None:
        """After `stop`: no process, mount, control group or socket is left."""
        wait_until(
            lambda: not self.leftovers(),
            "nothing to be left",
            seconds=seconds,
            explain=lambda: "\n".join(self.leftovers()),
        )

    def wait_no_process_left(self, *, seconds: float = 110.0) -> None:
        """After kill -9 of the supervisor: no process or mount is left; the rest is the next start's to remove."""

        def processes() -> list[str]:
            return [line for line in self.leftovers() if line.startswith(("process ", "mount "))]

        wait_until(
            lambda: not processes(), "no process to be left", seconds=seconds, explain=lambda: "\n".join(processes())
        )


@contextmanager
def running_platform(folder: Path, **options: Any) -> Iterator[PlatformProcess]:
    """A platform that is up; at the end it is stopped, and nothing may be left of it.

    A fixture for a test package: `@pytest.fixture(scope="session")` over
    `with running_platform(tmp_path_factory.mktemp("platform")) as platform: yield platform`.
    """
    platform = PlatformProcess(folder, **options)
    try:
        platform.start()
        yield platform
        code = platform.stop()
        assert code == 0, platform.output()
        platform.wait_nothing_left()
    finally:
        platform.close()


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float = 110.0, explain: Callable[[], str] = lambda: ""
) -> None:
    """Look every 20 ms at something of another process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}\n{explain()}"
        time.sleep(0.02)


def identify(pid: int) -> ProcessId | None:
    """None if there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else ProcessId(pid, fields[19])


def descendants(pid: int) -> set[ProcessId]:
    """All living processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[ProcessId] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            waiting.append(child)
            identity = identify(child)
            if identity is not None:
                found.add(identity)
    return found


def processes_naming(*texts: str) -> list[int]:
    """Other processes whose command line or environment has one of these texts (as far as this user may see)."""
    wanted = [text.encode() for text in texts]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or identify(int(entry.name)) is None:
            continue
        try:
            seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if any(text in seen for text in wanted):
            found.append(int(entry.name))
    return found


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "(gone)"
    return f"{pid} {command[:200]}"


def _read_line(descriptor: int, seconds: float) -> str:
    end = time.monotonic() + seconds
    data = b""
    while not data.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            raise TimeoutError(f"the platform was not ready within {seconds} s")
        part = os.read(descriptor, 4096)
        if not part:
            return ""
        data += part
    return data.decode()
