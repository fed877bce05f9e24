"""ExecService through a real agent against plain subprocesses: each command has a twin that is told the same.

A state machine starts commands, writes to them, signals, cancels and repeats calls in random order. 300 calls by
default, always the same; `make chaos` makes it 6,000.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from orchard.exec.v1 import exec_pb2
from orchard.exec.v1 import exec_service_pb2 as pb
from orchard.exec.v1.exec_service_pb2_grpc import ExecServiceStub

from services.common.errors import STATUS_DETAILS_KEY
from services.common.tokens import AGENT_TOKEN_KEY
from tests.integration.exec_agent.conftest import BACKSTOP, PATH, SANDBOX, UID, AgentProcess, duration, new_id, spec

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
SETTINGS = settings(
    max_examples=12 * ROUNDS,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_DATA = st.one_of(st.binary(min_size=1, max_size=30), st.just(b"\0\xff\r\n" * 20_000))
_SCRIPTS = (
    "printf out; printf err >&2; exit 3",
    "head -c 100000 /dev/zero; exit 124",
    "kill -TERM $$",
    "kill -KILL $$",
    "echo \"$0\"; pwd >/dev/null; printf '\\377'",
    "exit 255",
)


@dataclass
class Twin:
    """A command that copies its input to its output, and a process of the same that the model holds."""

    exec_id: str
    spec: exec_pb2.ExecSpec
    process: subprocess.Popen[bytes] | None = None  # none while it waits in the queue
    sent: bytes = b""


class Commands(RuleBasedStateMachine):
    """The calls. `stub` and `metadata` are given by the test."""

    stub: ExecServiceStub
    metadata: tuple[tuple[str, str], ...]

    def __init__(self) -> None:
        super().__init__()
        self.living: list[Twin] = []
        self.queue: list[Twin] = []  # the serial ones, of which the first runs
        self.ended: list[tuple[Twin, exec_pb2.ExecResult]] = []

    def teardown(self) -> None:
        for twin in reversed(self.living):
            self.call("SignalExec", exec_id=twin.exec_id, cancel=True)
        for twin in self.living:
            self.wait(twin.exec_id)
            if twin.process is not None:
                twin.process.kill()
                twin.process.communicate(timeout=BACKSTOP)

    def call(self, name: str, **fields: Any) -> Any:
        request = getattr(pb, f"{name}Request")(sandbox_id=SANDBOX, **fields)
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=BACKSTOP)

    def wait(self, exec_id: str) -> exec_pb2.ExecResult:
        answer = self.call("WaitExec", exec_id=exec_id, wait=duration(BACKSTOP)).exec
        assert answer.state == exec_pb2.EXEC_STATE_ENDED
        return answer.result

    def output(self, exec_id: str, offset: int, until: int | None = None) -> bytes:
        """What comes from `offset` on: to the end, or to `until` of a command that goes on."""
        if until is not None and offset >= until:
            return b""
        call = self.call("ReadOutput", exec_id=exec_id, offset=offset)
        data = b""
        for event in call:
            if event.WhichOneof("event") == "chunk":
                assert event.chunk.offset == offset + len(data)
                data += event.chunk.data
            if until is not None and offset + len(data) >= until:
                break
        call.cancel()
        return data

    # Commands that end by themselves.

    @rule(script=st.sampled_from(_SCRIPTS))
    def run(self, script: str) -> None:
        made = spec("sh", "-c", script, concurrent=True, merge_stderr=False)
        exec_id = new_id()
        answer = self.call("StartExec", exec_id=exec_id, spec=made, wait=duration(60))
        wanted = subprocess.run(["sh", "-c", script], capture_output=True, env={"PATH": PATH}, timeout=BACKSTOP)
        assert answer.output_complete
        found = dict.fromkeys((exec_pb2.OUTPUT_STREAM_STDOUT, exec_pb2.OUTPUT_STREAM_STDERR), b"")
        for chunk in answer.output:
            found[chunk.stream] += chunk.data
        assert list(found.values()) == [wanted.stdout, wanted.stderr]
        _assert_same_end(answer.exec.result, wanted.returncode)
        assert self.output(exec_id, 0) == b"".join(chunk.data for chunk in answer.output)

    @rule(script=st.sampled_from(["sleep 1000", "trap '' TERM; sleep 1000 & wait; wait"]))
    def run_out_of_time(self, script: str) -> None:
        made = spec("sh", "-c", script, concurrent=True, timeout=0.05, kill_grace=0.05)
        answer = self.call("StartExec", exec_id=new_id(), spec=made, wait=duration(60))
        assert answer.exec.result.ended == exec_pb2.EXEC_END_TIMED_OUT

    # Commands that live until they are told to end.

    @precondition(lambda self: len(self.living) < 6)
    @rule(concurrent=st.booleans())
    def start(self, concurrent: bool) -> None:
        twin = Twin(new_id(), spec("cat", concurrent=concurrent, stdin_mode=exec_pb2.STDIN_MODE_PIPE))
        answer = self.call("StartExec", exec_id=twin.exec_id, spec=twin.spec)
        assert answer.exec.state != exec_pb2.EXEC_STATE_ENDED
        self.living.append(twin)
        if concurrent:
            self._begin(twin)
        else:
            self.queue.append(twin)
            self._next()

    def _begin(self, twin: Twin) -> None:
        twin.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _next(self) -> None:
        """The first of the queue runs, the others do not."""
        if self.queue and self.queue[0].process is None:
            self._begin(self.queue[0])
            # An echo shows that it has started, and that the one before is gone.
            self._write(self.queue[0], b"first", 0)
            # It may come before the launcher says that it has; a repeat is answered once it does.
            self.call("StartExec", exec_id=self.queue[0].exec_id, spec=self.queue[0].spec)
        states = {found.exec_id: found.state for found in self.call("ListExecs", page_size=1000).execs}
        for position, twin in enumerate(self.queue):
            wanted = exec_pb2.EXEC_STATE_QUEUED if position else exec_pb2.EXEC_STATE_RUNNING
            assert states[twin.exec_id] == wanted

    def _write(self, twin: Twin, data: bytes, back: int, *, end: bool = False) -> exec_pb2.StdinState:
        """Write on from `back` bytes before where we are; the bytes of there are sent once more."""
        offset = len(twin.sent) - back

        def messages() -> Iterator[pb.WriteStdinRequest]:
            start = pb.WriteStdinStart(exec_id=twin.exec_id, offset=offset)
            yield pb.WriteStdinRequest(sandbox_id=SANDBOX, start=start)
            yield pb.WriteStdinRequest(data=twin.sent[offset:] + data)
            if end:
                yield pb.WriteStdinRequest(end=True)

        state = self.stub.WriteStdin(messages(), metadata=self.metadata, timeout=BACKSTOP).state
        twin.sent += data
        assert state.offset == len(twin.sent)
        assert self.output(twin.exec_id, offset, len(twin.sent)) == twin.sent[offset:]
        return state

    def _running(self, choice: int) -> Twin | None:
        running = [twin for twin in self.living if twin.process is not None]
        return running[choice % len(running)] if running else None

    @rule(choice=st.integers(0, 5), data=_DATA, back=st.integers(0, 10))
    def write(self, choice: int, data: bytes, back: int) -> None:
        if twin := self._running(choice):
            self._write(twin, data, min(back, len(twin.sent)))
            assert self.call("GetStdin", exec_id=twin.exec_id).state.offset == len(twin.sent)

    @rule(choice=st.integers(0, 5), ahead=st.integers(1, 1000))
    def write_ahead(self, choice: int, ahead: int) -> None:
        if twin := self._running(choice):
            start = pb.WriteStdinStart(exec_id=twin.exec_id, offset=len(twin.sent) + ahead)
            messages = [pb.WriteStdinRequest(sandbox_id=SANDBOX, start=start), pb.WriteStdinRequest(data=b"x")]
            call = lambda: self.stub.WriteStdin(iter(messages), metadata=self.metadata, timeout=BACKSTOP)  # noqa: E731
            assert _reason(call) == "STDIN_OFFSET_AHEAD"

    @rule(choice=st.integers(0, 5), part=st.floats(0, 1))
    def read(self, choice: int, part: float) -> None:
        if twin := self._running(choice):
            offset = int(part * len(twin.sent))
            assert self.output(twin.exec_id, offset, len(twin.sent)) == twin.sent[offset:]

    @rule(choice=st.integers(0, 5))
    def repeat(self, choice: int) -> None:
        """The same id starts nothing, and with another spec it is an error."""
        if self.living:
            twin = self.living[choice % len(self.living)]
            before = self.call("WaitExec", exec_id=twin.exec_id).exec
            assert self.call("StartExec", exec_id=twin.exec_id, spec=twin.spec).exec.state == before.state
            other = exec_pb2.ExecSpec()
            other.CopyFrom(twin.spec)
            other.argv.args.append("-u")
            call = lambda: self.call("StartExec", exec_id=twin.exec_id, spec=other)  # noqa: E731
            assert _reason(call) == "EXEC_ID_REUSED"

    @rule(choice=st.integers(0, 5), data=_DATA)
    def end(self, choice: int, data: bytes) -> None:
        if twin := self._running(choice):
            assert self._write(twin, data, 0, end=True).closed
            assert twin.process is not None
            assert twin.process.communicate(twin.sent, timeout=BACKSTOP)[0] == twin.sent
            self._ended(twin, twin.process.returncode)

    @rule(choice=st.integers(0, 5), number=st.sampled_from([signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1]))
    def send(self, choice: int, number: signal.Signals) -> None:
        if twin := self._running(choice):
            self.call("SignalExec", exec_id=twin.exec_id, signal=number, request_id="once")
            assert twin.process is not None
            twin.process.send_signal(number)
            twin.process.communicate(timeout=BACKSTOP)
            result = self.wait(twin.exec_id)
            # The platform sent it, and so it says.
            assert (result.ended, -result.signal) == (exec_pb2.EXEC_END_KILLED, twin.process.returncode)
            self._forget(twin, result)

    @rule(choice=st.integers(0, 5))
    def cancel(self, choice: int) -> None:
        if not self.living:
            return
        twin = self.living[choice % len(self.living)]
        if twin.process is None:
            assert _reason(lambda: self.call("SignalExec", exec_id=twin.exec_id, signal=15)) == "EXEC_NOT_STARTED"
        for _ in range(2):
            self.call("SignalExec", exec_id=twin.exec_id, cancel=True)
        result = self.wait(twin.exec_id)
        if twin.process is None:
            assert result.ended == exec_pb2.EXEC_END_NOT_STARTED
        else:
            assert result.ended == exec_pb2.EXEC_END_KILLED
            twin.process.kill()
            twin.process.communicate(timeout=BACKSTOP)
        self._forget(twin, result)

    @rule()
    def cancel_before_it_comes(self) -> None:
        exec_id = new_id()
        self.call("SignalExec", exec_id=exec_id, cancel=True)
        made = self.call("StartExec", exec_id=exec_id, spec=spec("cat", concurrent=True)).exec
        assert made.result.ended == exec_pb2.EXEC_END_NOT_STARTED

    def _ended(self, twin: Twin, returncode: int) -> None:
        result = self.wait(twin.exec_id)
        _assert_same_end(result, returncode)
        assert result.output_bytes == len(twin.sent)
        self._forget(twin, result)

    def _forget(self, twin: Twin, result: exec_pb2.ExecResult) -> None:
        self.living.remove(twin)
        self.ended.append((twin, result))
        if twin in self.queue:
            self.queue.remove(twin)
            self._next()

    @precondition(lambda self: self.ended)
    @rule(choice=st.integers(0, 20), part=st.floats(0, 1), past=st.integers(1, 5))
    def look_back(self, choice: int, part: float, past: int) -> None:
        """What has ended stays as it was: output, result, and a repeat of its start."""
        twin, result = self.ended[choice % len(self.ended)]
        offset = int(part * len(twin.sent))
        assert self.output(twin.exec_id, offset) == twin.sent[offset:]
        assert self.call("StartExec", exec_id=twin.exec_id, spec=twin.spec).exec.result == result
        assert self.call("SignalExec", exec_id=twin.exec_id, cancel=True).exec.result == result
        assert _reason(lambda: self.output(twin.exec_id, len(twin.sent) + past)) == "OFFSET_OUT_OF_RANGE"


def _assert_same_end(result: exec_pb2.ExecResult, returncode: int) -> None:
    if returncode < 0:
        assert (result.ended, result.signal) == (exec_pb2.EXEC_END_SIGNALLED, -returncode)
    else:
        assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_EXITED, returncode)


def _reason(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    info = error_details_pb2.ErrorInfo()
    error: Any = caught.value
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[STATUS_DETAILS_KEY])
    assert any(detail.Unpack(info) for detail in status.details), error
    return info.reason


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_the_agent_does_what_plain_processes_do(make_agent: Callable[..., AgentProcess]) -> None:
    agent = make_agent()
    with grpc.insecure_channel(f"unix:{agent.folder}/s") as channel:

        class Here(Commands):
            stub = ExecServiceStub(channel)
            metadata = ((AGENT_TOKEN_KEY, agent.signer.agent_token(UID)),)

        seed(SEED)(Here)
        run_state_machine_as_test(Here, settings=SETTINGS)  # type: ignore[no-untyped-call]
