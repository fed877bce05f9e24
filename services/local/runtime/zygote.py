"""A process that has everything imported and nothing running; agents are forked from it.

    python -m services.local.runtime.zygote CONTROL_FD LIFELINE_FD CONFIGURATION

It reads requests from a socket (each a plan in a memory file, a socket for the answer and the agent's descriptors)
and works on several at a time. It ends when the socket does. It must be single-threaded and free of gRPC objects while
it serves: its children join namespaces and become agents. Before, it rehearses: it runs an agent of its own once and
ends it, so that what a first run leaves in memory is shared by all agents.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from services.local.runtime import linux
from services.local.runtime.plan import Plan
from services.local.runtime.removal import remove_tree
from services.local.runtime.stage import Stage, build_stage
from services.local.runtime.starter import make, remove
from services.local.runtime.steps import DEADLINE_SECONDS, Given, Made, StartError, Tools

READY: Final = b"ready"
_NAME: Final = b"orchard-agent"
_REQUEST_BYTES: Final = 256
_MOST_DESCRIPTORS: Final = 16
_THREADS_SECONDS: Final = 5.0
_THREADS_POLL_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the daemon tells its zygote at the start.

    Attributes:
        agent: module with `preload`, `rehearse`, `run` and `AgentConfig`.
        bwrap: path of the binary.
        stage: what to mount where for bwrap; None without the privilege.
        scratch: a folder for a rehearsal of the agent; its path must be short. Empty: no rehearsal.
    """

    agent: str
    bwrap: str
    stage: Stage | None
    scratch: str = ""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """From text."""
        values = json.loads(text)
        stage = values["stage"]
        values["stage"] = None if stage is None else Stage.from_values(stage)
        return cls(**values)


def main(arguments: list[str]) -> int:
    """Serve until the daemon closes the socket."""
    _hide_arguments()
    control = socket.socket(fileno=int(arguments[0]))
    lifeline = int(arguments[1])
    configuration = Configuration.from_json(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the daemon decides
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    os.umask(0o022)
    agent = importlib.import_module(configuration.agent)
    agent.preload()
    if configuration.scratch and not _rehearse(agent, Path(configuration.scratch)):
        # Once more, without: forked from this process, agents could not join a sandbox.
        unrehearsed = replace(configuration, scratch="").to_json()
        os.execv(sys.executable, [*sys.orig_argv[:-1], unrehearsed])  # noqa: S606
    tools = _prepare(agent, configuration, lifeline)
    gc.collect()
    gc.freeze()
    control.setblocking(False)
    loop = _Loop(control, tools)
    control.send(READY)
    loop.run()
    return 0


def _hide_arguments() -> None:
    """Sandboxes see the command line of their agents, which is ours: no path of this machine may stand there.

    It is overwritten where the kernel reads it (proc(5), stat, fields 48 and 49).
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, _NAME, min(len(_NAME), end - start - 1))
    name = ctypes.create_string_buffer(_NAME)
    linux.prctl(linux.PR_SET_NAME, ctypes.addressof(name))


def _rehearse(agent: Any, scratch: Path) -> bool:
    """Run an agent here and end it; False if that failed or left threads."""
    try:
        remove_tree(scratch)
        scratch.mkdir(mode=0o700)
        try:
            agent.rehearse(scratch)
        finally:
            remove_tree(scratch)
    except Exception:  # noqa: BLE001 (an agent of a sandbox may do better)
        traceback.print_exc()
        return False
    patience = time.monotonic() + _THREADS_SECONDS
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        if time.monotonic() > patience:
            return False
        time.sleep(_THREADS_POLL_SECONDS)
    return True


def _prepare(agent: Any, configuration: Configuration, lifeline: int) -> Tools:
    def run_agent(fields: dict[str, Any]) -> int:
        sys.path.clear()
        return int(agent.run(agent.AgentConfig(**fields)))

    def rehearse_agent(folder: Path, launcher: int) -> None:
        if configuration.scratch:
            agent.rehearse(folder, launcher)

    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
    bwrap = configuration.bwrap
    if configuration.stage is not None:
        stage, bwrap = build_stage(configuration.stage, configuration.bwrap)
        # From here on there is nothing to import any more: the stage shows no programs of ours.
        linux.setns(stage, linux.CLONE_NEWNS)
        os.close(stage)
    return Tools(
        bwrap=bwrap,
        run_agent=run_agent,
        rehearse_agent=rehearse_agent,
        lifeline=lifeline,
        proc=proc,
        own_pids=own_pids,
    )


@dataclass(slots=True, eq=False)
class _Job:
    """A request at work, waiting for one descriptor."""

    steps: Generator[int, None, Made | None]
    given: Given
    answer: socket.socket
    deadline: float
    waiting: int = -1


class _Loop:
    """Several requests at a time in one thread."""

    def __init__(self, control: socket.socket, tools: Tools) -> None:
        self._control = control
        self._tools = tools
        self._selector = selectors.DefaultSelector()
        self._jobs: set[_Job] = set()
        self._selector.register(control, selectors.EVENT_READ, None)
        # Children that end are reaped here, whoever waits for them.
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until the daemon is gone; what is half made then ends."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._control:
                    if not self._accept():
                        self._give_up()
                        return
                elif key.fileobj == self._wake:
                    self._reap()
                else:
                    self._selector.unregister(key.fileobj)
                    self._advance(key.data)
            for job in [job for job in self._jobs if job.deadline < time.monotonic()]:
                self._fail(job, StartError(f"it took more than {DEADLINE_SECONDS:g} s"))

    def _patience(self) -> float | None:
        if not self._jobs:
            return None
        return max(0.0, min(job.deadline for job in self._jobs) - time.monotonic())

    def _accept(self) -> bool:
        try:
            data, descriptors = _receive(self._control)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        header = json.loads(data)
        request, answer, launcher, *others = descriptors
        with open(request, "rb") as file:  # noqa: PTH123 (a descriptor)
            plan = Plan.from_json(file.read())
        procs = tuple(others[: header["procs"]])
        rest = others[header["procs"] :]
        event = rest.pop(0) if header["event"] else None
        counter = rest.pop(0) if header["counter"] else None
        given = Given(launcher, header["launcher"], procs, event, counter)
        job = _Job(
            steps=remove(plan) if plan.remove else make(plan, given, self._tools),
            given=given,
            answer=socket.socket(fileno=answer),
            deadline=time.monotonic() + DEADLINE_SECONDS,
        )
        self._jobs.add(job)
        self._advance(job)
        return True

    def _advance(self, job: _Job) -> None:
        try:
            job.waiting = next(job.steps)
            self._selector.register(job.waiting, selectors.EVENT_READ, job)
        except StopIteration as end:
            made: Made | None = end.value
            if made is None:
                self._finish(job, {"removed": True}, [])
                return
            descriptors = [d for d in (made.init_fd, made.agent_fd, made.claim_fd) if d is not None]
            self._finish(job, _message(made), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        except (StartError, OSError) as error:
            self._finish(job, {"error": str(error)}, [])
        except Exception as error:  # noqa: BLE001 (one request must not end the others)
            traceback.print_exc()
            self._finish(job, {"error": f"{type(error).__name__}: {error}"}, [])

    def _fail(self, job: _Job, error: StartError) -> None:
        self._selector.unregister(job.waiting)
        job.steps.close()
        self._finish(job, {"error": str(error)}, [])

    def _finish(self, job: _Job, message: dict[str, object], descriptors: list[int]) -> None:
        self._jobs.discard(job)
        with contextlib.suppress(OSError):  # the daemon may have gone; the next one finds the record
            socket.send_fds(job.answer, [json.dumps(message).encode()], descriptors)
        job.answer.close()
        for descriptor in job.given.all():
            os.close(descriptor)

    def _give_up(self) -> None:
        for job in self._jobs:
            job.steps.close()

    def _reap(self) -> None:
        os.read(self._wake, 4096)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """One request with all its descriptors, closed on exec (socket.recv_fds leaves them inheritable)."""
    size = array.array("i")
    data, ancillary, _, _ = control.recvmsg(
        _REQUEST_BYTES, socket.CMSG_SPACE(_MOST_DESCRIPTORS * size.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            size.frombytes(payload[: len(payload) - len(payload) % size.itemsize])
    return data, list(size)


def _message(made: Made) -> dict[str, object]:
    return {
        "init": asdict(made.init),
        "agent": None if made.agent is None else asdict(made.agent),
        "milliseconds": made.milliseconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
