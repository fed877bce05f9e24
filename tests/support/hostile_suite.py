"""Commands that mean no good, on every runtime: each comes to its right end, and all else in the sandbox goes on.

Import the tests, and define the fixture `subject` of the runtime suite, which has `kill -9 -1` and too much memory.
Commands are those of busybox and of any Linux: images differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from tests.support.runtime_suite import BACKSTOP, Subject
from tests.support.wire import reason_of, seconds

EXITED = exec_pb2.EXEC_END_EXITED
TIMED_OUT = exec_pb2.EXEC_END_TIMED_OUT
OUTPUT_LIMIT = exec_pb2.EXEC_END_OUTPUT_LIMIT
# Found by it among all processes of a sandbox: its arguments are nobody else's.
MARK = "424242"
STRAYS = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep {MARK[:-1]}[{MARK[-1]}]' || true"
ZOMBIES = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true"
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Workload:
    """A command that means no good.

    Attributes:
        name: of the test.
        shell: what it runs.
        ended: how it must end.
        exit_code: with EXITED.
        output_bytes: how much it must have written; None: it does not matter.
        spec: further fields of its ExecSpec.
    """

    name: str
    shell: str
    ended: int = EXITED
    exit_code: int = 0
    output_bytes: int | None = None
    spec: dict[str, Any] = field(default_factory=dict)


def limited(timeout: float = 2, grace: float = 0.5) -> dict[str, Any]:
    return {"timeout": seconds(timeout), "kill_grace": seconds(grace)}


WORKLOADS = (
    Workload("closes its output and goes on", "exec >&- 2>&-; sleep 0.3; exit 3", exit_code=3, output_bytes=0),
    Workload("reads input that there is none of", "cat; head -c 1; exit 4", exit_code=4, output_bytes=0),
    Workload("ignores TERM", f"trap '' TERM; while :; do sleep {MARK}; done", TIMED_OUT, spec=limited()),
    Workload("stops itself", "kill -STOP $$", TIMED_OUT, spec=limited()),
    Workload("stops all of its children", f"sleep {MARK} & kill -STOP $!; wait", TIMED_OUT, spec=limited()),
    Workload(
        "leaves its session twice",
        f"setsid sh -c 'setsid sleep {MARK} & setsid setsid sleep {MARK} & wait' & (sleep {MARK} &); sleep {MARK}",
        TIMED_OUT,
        spec=limited(),
    ),
    Workload(
        "starts hundreds that ignore TERM",
        f"trap '' TERM; i=0; while [ $i -lt 300 ]; do sleep {MARK} & i=$((i+1)); done; wait",
        TIMED_OUT,
        spec=limited(4),
    ),
    Workload(
        "multiplies until it may no longer",
        # The leader itself has nothing to start that could be refused.
        f"trap '' TERM; m() {{ while :; do sleep {MARK} & done; }}; m & m & m & exec sleep {MARK}",
        TIMED_OUT,
        spec=limited(5),
    ),
    Workload(
        "fills a file system",
        "cat /dev/zero >/dev/shm/full; code=$?; wc -c </dev/shm/full; rm /dev/shm/full; exit $code",
        exit_code=1,
    ),
    Workload(
        "leaves two thousand dead children unattended",
        "i=0; while [ $i -lt 2000 ]; do (: &) ; i=$((i+1)); done; echo done",
        output_bytes=5,
    ),
    Workload(
        "removes the ground it stands on", "mkdir /tmp/gone && cd /tmp/gone && rmdir /tmp/gone; ls; exit 5", exit_code=5
    ),
    Workload("writes one line without an end", "head -c 30000000 /dev/zero | tr '\\0' x", output_bytes=30_000_000),
    Workload("writes much more than is kept", "head -c 300000000 /dev/zero", output_bytes=300_000_000),
    Workload(
        "writes without end", "yes", OUTPUT_LIMIT, spec={"output_limit_bytes": 5 * MEBIBYTE, "kill_grace": seconds(0.5)}
    ),
    Workload(
        "writes and ignores its limit",
        f"trap '' TERM PIPE; while :; do head -c 1000000 /dev/zero; done; sleep {MARK}",
        OUTPUT_LIMIT,
        spec={"output_limit_bytes": 5 * MEBIBYTE, "kill_grace": seconds(0.5)},
    ),
    Workload("kills its own shell's parent", "kill -9 $PPID; exit 6"),
)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name.replace(" ", "-"))
async def test_a_command_that(subject: Subject, workload: Workload) -> None:
    sandbox = await subject.ready()
    neighbour = await subject.wire.run(
        sandbox, "sleep 1000", exec_id="neighbour", wait=0, concurrent=True, no_timeout=True
    )
    assert not neighbour.exec.HasField("result")
    exec_id = f"e-{secrets.token_hex(6)}"
    started = await subject.wire.run(sandbox, workload.shell, exec_id=exec_id, wait=0, **workload.spec)
    result = await ended(subject, sandbox, exec_id) if not started.exec.HasField("result") else started.exec.result
    if workload.shell.startswith("kill -9 $PPID"):
        # What started it is the launcher's or the agent's; whichever it reaches, the end is told.
        assert result.ended in (EXITED, exec_pb2.EXEC_END_SIGNALLED, exec_pb2.EXEC_END_AGENT_RESTARTED), result
    else:
        assert result.ended == workload.ended, result
        assert result.ended != EXITED or result.exit_code == workload.exit_code
    if workload.output_bytes is not None:
        assert result.output_bytes == workload.output_bytes
    # Nothing of it is left, and all else goes on.
    for what in (STRAYS, ZOMBIES):
        # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
        async with asyncio.timeout(BACKSTOP):
            while await seen(subject, sandbox, what) != b"0\n":
                pass
    assert await subject.output(sandbox, "echo alive") == b"alive\n"
    if result.ended != exec_pb2.EXEC_END_AGENT_RESTARTED:
        request = exec_service_pb2.WaitExecRequest(sandbox_id=sandbox, exec_id="neighbour")
        assert not (await subject.wire.call(subject.wire.execs.WaitExec, request)).exec.HasField("result")
    await subject.wire.delete(sandbox)


async def seen(subject: Subject, sandbox: str, shell: str) -> bytes:
    """What a command writes; nothing where the dying have left no room for it yet, which it is told."""
    try:
        return await subject.output(sandbox, shell)
    except grpc.aio.AioRpcError as error:
        assert reason_of(error) == "PROCESS_LIMIT", error.details()
        return b""


async def test_what_is_read_while_it_is_written_comes_whole(subject: Subject) -> None:
    """Bytes of every value, faster than any reader, none lost and none changed."""
    sandbox = await subject.ready()
    count = 40 * MEBIBYTE
    shell = f"head -c {count} /dev/urandom | tee /tmp/sent; sync"
    digest, size = hashlib.sha256(), 0
    request = exec_service_pb2.ExecRequest(sandbox_id=sandbox, exec_id="flood", spec=exec_pb2.ExecSpec(shell=shell))
    stream = subject.wire.execs.Exec(request, metadata=subject.wire.metadata, timeout=BACKSTOP)
    async for event in stream:
        assert not event.HasField("gap")
        digest.update(event.chunk.data)
        size += len(event.chunk.data)
    assert size == count
    sent = (await subject.output(sandbox, "sha256sum /tmp/sent")).split()[0].decode()
    assert digest.hexdigest() == sent
    await subject.wire.delete(sandbox)


async def ended(subject: Subject, sandbox: str, exec_id: str) -> exec_pb2.ExecResult:
    request = exec_service_pb2.WaitExecRequest(sandbox_id=sandbox, exec_id=exec_id, wait=seconds(BACKSTOP))
    return (await subject.wire.call(subject.wire.execs.WaitExec, request, timeout=BACKSTOP + 30)).exec.result
