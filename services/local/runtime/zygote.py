"""A process that has everything imported and nothing started, forked for every sandbox.

    python -m services.local.runtime.zygote CONTROL_FD LIFELINE_FD CONFIGURATION

It reads requests from a socket (each a plan in a memory file and a socket for the answer) and forks a starter for
each. It ends when the socket does. It must stay single-threaded and free of gRPC objects: its children join
namespaces and become agents.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any, Final

from services.local.runtime import linux
from services.local.runtime.plan import Plan
from services.local.runtime.stage import Stage, build_stage
from services.local.runtime.starter import DEADLINE_SECONDS, Made, StartError, Tools, make

READY: Final = b"ready"
_REQUEST_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the daemon tells its zygote at the start.

    Attributes:
        agent: module with `preload`, `run` and `AgentConfig`.
        bwrap: path of the binary.
        stage: what to mount where for bwrap; None without the privilege.
    """

    agent: str
    bwrap: str
    stage: Stage | None

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """From text."""
        values = json.loads(text)
        stage = values["stage"]
        return cls(values["agent"], values["bwrap"], None if stage is None else Stage.from_values(stage))


def main(arguments: list[str]) -> int:
    """Serve until the daemon closes the socket."""
    control = socket.socket(fileno=int(arguments[0]))
    lifeline = int(arguments[1])
    configuration = Configuration.from_json(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the daemon decides
    os.umask(0o022)
    tools = _prepare(configuration, lifeline)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # starters are reaped by the kernel
    gc.collect()
    gc.freeze()
    control.send(READY)
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
        except ConnectionError:
            return 0
        if not data:
            return 0
        request, answer = descriptors
        if os.fork() == 0:
            control.close()
            _serve(tools, request, socket.socket(fileno=answer))
            os._exit(0)
        os.close(request)
        os.close(answer)


def _prepare(configuration: Configuration, lifeline: int) -> Tools:
    agent: Any = importlib.import_module(configuration.agent)
    from services.exec_agent.launcher import open_launcher

    agent.preload()
    # What a starter imports on its way, also on its way to an error.
    _ = (traceback, select, time)
    bwrap, stage = configuration.bwrap, None
    if configuration.stage is not None:
        stage, bwrap = build_stage(configuration.stage, configuration.bwrap)

    def run_agent(fields: dict[str, Any]) -> int:
        sys.path.clear()
        return int(agent.run(agent.AgentConfig(**fields)))

    return Tools(bwrap=bwrap, open_launcher=open_launcher, run_agent=run_agent, lifeline=lifeline, stage=stage)


def _serve(tools: Tools, request: int, answer: socket.socket) -> None:
    """In the starter: do what the plan says and tell how it went."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.alarm(DEADLINE_SECONDS)
    try:
        with open(request, "rb", closefd=True) as file:
            plan = Plan.from_json(file.read())
        made = make(plan, tools)
    except (StartError, OSError) as error:
        _send(answer, {"error": str(error)}, [])
    except BaseException as error:  # noqa: BLE001 (the process ends here; the daemon must learn why)
        _send(answer, {"error": f"{type(error).__name__}: {error}"}, [])
        traceback.print_exc()
    else:
        if made is not None:
            _send(answer, _message(made), [d for d in (made.init_fd, made.agent_fd) if d is not None])


def _message(made: Made) -> dict[str, object]:
    return {
        "init": asdict(made.init),
        "agent": None if made.agent is None else asdict(made.agent),
        "milliseconds": made.milliseconds,
    }


def _send(answer: socket.socket, message: dict[str, object], descriptors: list[int]) -> None:
    try:
        socket.send_fds(answer, [json.dumps(message).encode()], descriptors)
    except OSError:
        return  # the daemon has gone; it will find the record


if __name__ == "__main__":
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    sys.exit(main(sys.argv[1:]))
