"""What every runtime must do, through the whole platform: import the tests, and define the fixture `subject`.

    from tests.support.runtime_suite import *  # noqa: F403

Commands are those of busybox and of any Linux: images differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2, file_service_pb2, port_service_pb2
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from services.common.peer_status import peer_status
from tests.support.attached import Attached
from tests.support.wire import Wire, fields_of, reason_of, seconds

READY = sandbox_pb2.SANDBOX_STATE_READY
FAILED = sandbox_pb2.SANDBOX_STATE_FAILED
DELETED = sandbox_pb2.SANDBOX_STATE_DELETED
BACKSTOP = 110.0
# Answers with what it was sent, each connection to its end.
ECHO_SERVER = """
if command -v python3 >/dev/null; then
    exec python3 -c "
import socketserver as s
class Echo(s.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
s.ThreadingTCPServer.allow_reuse_address = True
s.ThreadingTCPServer(('127.0.0.1', {port}), Echo).serve_forever()"
fi
exec nc -ll -p {port} -e cat
"""


@dataclass(frozen=True)
class Subject:
    """A platform with one runtime.

    Attributes:
        wire: to the platform.
        endpoint: of the platform, for clients.
        api_key: of a user of it.
        image: of sandboxes; empty: the runtime has a root of its own.
        missing_image: an image that cannot be had.
        refuses_missing: the create of one is NOT_FOUND; else its sandbox is FAILED with IMAGE_PULL.
        restart_owner: kill -9 what owns the sandboxes and wait for its successor; None: nothing here does.
        remove_behind: take a sandbox away behind the platform's back.
        seen_outside: everything of a sandbox that can be seen on its machine from outside, and all that is stored.
        offered: a port of this machine that the platform offers as the endpoint "echo", for a test to serve.
        network_is_filtered: without a network there is an interface whose packets go nowhere.
    """

    wire: Wire
    endpoint: str
    api_key: str
    image: str
    missing_image: str
    refuses_missing: bool
    restart_owner: Callable[[], Awaitable[None]] | None
    remove_behind: Callable[[sandbox_pb2.Sandbox], Awaitable[None]]
    seen_outside: Callable[[sandbox_pb2.Sandbox], Iterator[bytes]]
    offered: int
    network_is_filtered: bool = False

    async def ready(self, **spec: Any) -> str:
        """A new sandbox that is READY; its id."""
        created = await self.wire.create(**{"image": self.image, **spec})
        last = (await self.wire.wait(created.sandbox_id, timeout=BACKSTOP))[-1]
        assert last.state == READY, last
        return created.sandbox_id

    async def output(self, sandbox_id: str, shell: str) -> bytes:
        """What a command writes, tried again while the platform says so: a secret or a fresh agent is on its way."""
        async with asyncio.timeout(BACKSTOP):
            while True:
                try:
                    return await self.wire.output(sandbox_id, shell)
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.05)

    async def end(self, sandbox_id: str) -> sandbox_pb2.Sandbox:
        """How it ended, once it has."""
        return (await self.wire.wait(sandbox_id, until_terminal=True, timeout=BACKSTOP))[-1]


async def test_ready_means_that_its_own_agent_answers(subject: Subject) -> None:
    one, other = await asyncio.gather(subject.ready(env={"WHO": "one"}), subject.ready(env={"WHO": "other"}))
    assert await subject.wire.output(one, "echo $WHO") == b"one\n"
    assert await subject.wire.output(other, "echo $WHO") == b"other\n"
    await asyncio.gather(subject.wire.delete(one), subject.wire.delete(other))


async def test_its_states_come_in_order_and_a_delete_may_be_repeated(subject: Subject) -> None:
    created = await subject.wire.create(image=subject.image)
    states = [one.state for one in await subject.wire.wait(created.sandbox_id, timeout=BACKSTOP)]
    assert states == sorted(states) and states[-1] == READY
    await asyncio.gather(*(subject.wire.delete(created.sandbox_id) for _ in range(3)))
    end = await subject.end(created.sandbox_id)
    assert (end.state, end.reason) == (DELETED, sandbox_pb2.SANDBOX_REASON_REQUESTED)
    assert (await subject.wire.delete(created.sandbox_id)).state == DELETED


async def test_a_repeated_create_is_one_sandbox(subject: Subject) -> None:
    request_id = f"r-{secrets.token_hex(6)}"
    made = await asyncio.gather(*(subject.wire.create(request_id=request_id, image=subject.image) for _ in range(5)))
    assert len({one.sandbox_id for one in made}) == 1
    await subject.wire.delete(made[0].sandbox_id)


async def test_streams_and_exit_codes_are_what_they_were(subject: Subject) -> None:
    sandbox = await subject.ready()
    reply = await subject.wire.run(sandbox, "printf 'out\\377'; printf 'err\\376' >&2; exit 7")
    streams = dict.fromkeys((exec_pb2.OUTPUT_STREAM_STDOUT, exec_pb2.OUTPUT_STREAM_STDERR), b"")
    for chunk in reply.output:
        streams[chunk.stream] += chunk.data
    assert list(streams.values()) == [b"out\377", b"err\376"]
    assert (reply.exec.result.ended, reply.exec.result.exit_code) == (exec_pb2.EXEC_END_EXITED, 7)
    killed = (await subject.wire.run(sandbox, "kill -9 $$")).exec.result
    assert (killed.ended, killed.signal) == (exec_pb2.EXEC_END_SIGNALLED, 9)
    await subject.wire.delete(sandbox)


async def test_a_timeout_ends_the_whole_tree_and_nothing_else(subject: Subject) -> None:
    sandbox = await subject.ready()
    await subject.wire.run(sandbox, "sleep 98761 >/dev/null 2>&1 &")
    tree = "sleep 98762 & setsid sleep 98763 & (setsid sleep 98764 &) ; wait"
    reply = await subject.wire.run(sandbox, tree, timeout=seconds(1), wait=60)
    assert reply.exec.result.ended == exec_pb2.EXEC_END_TIMED_OUT
    # The pattern does not match itself.
    look = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep '9876[0-9]'"
    # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
    async with asyncio.timeout(BACKSTOP):
        while (found := (await subject.wire.output(sandbox, look)).split()) != [b"98761"]:
            assert b"98761" in found
    await subject.wire.delete(sandbox)


async def test_files_keep_every_byte(subject: Subject) -> None:
    sandbox = await subject.ready()
    content = secrets.token_bytes(3 << 20)

    def parts() -> Iterator[Any]:
        start = file_service_pb2.WriteFileStart(path="/tmp/deep/er/file", make_parents=True)
        yield file_service_pb2.WriteFileRequest(sandbox_id=sandbox, start=start)
        for offset in range(0, len(content), 1 << 19):
            yield file_service_pb2.WriteFileRequest(data=content[offset : offset + (1 << 19)])
        yield file_service_pb2.WriteFileRequest(end=True)

    wire = subject.wire
    await wire.files.WriteFile(parts(), metadata=wire.metadata, timeout=BACKSTOP)
    inside = (await wire.output(sandbox, "sha256sum /tmp/deep/er/file")).split()[0]
    assert inside.decode() == hashlib.sha256(content).hexdigest()
    request = file_service_pb2.ReadFileRequest(sandbox_id=sandbox, path="/tmp/deep/er/file")
    call = wire.files.ReadFile(request, metadata=wire.metadata, timeout=BACKSTOP)
    assert b"".join([response.data async for response in call]) == content
    await wire.delete(sandbox)


async def test_a_terminal_is_one(subject: Subject) -> None:
    """A device of the sandbox's own, with its keys, its size and its last bytes; a lost connection loses none."""
    sandbox = await subject.ready()
    size = exec_pb2.WindowSize(rows=31, columns=99)
    command = exec_pb2.ExecSpec(shell="PS1='ready> ' exec sh -i", tty=exec_pb2.Tty(size=size, term="vt100"))
    wire, exec_id = subject.wire, f"e-{secrets.token_hex(6)}"
    async with Attached(wire.execs, wire.metadata, sandbox, exec_id, command) as shell:
        await shell.until(b"ready> ")
        await shell.write(b"echo $(stty size) $TERM $(tty)\n")
        await shell.until(b"31 99 vt100 /dev/pts/")
        await shell.write(b"sh -c 'echo slee\"\"ping; exec sleep 98766'\n")
        await shell.until(b"sleeping\r\n")
        await shell.write(b"\x03")
        await shell.until(b"ready> ", after=shell.output.index(b"sleeping\r\n"))
    async with Attached(wire.execs, wire.metadata, sandbox, exec_id, offset=len(shell.output)) as again:
        await again.resize(40, 120)
        await again.write(b"stty size; seq 1000; exit 9\n")
        result = await again.exit()
    assert b"40 120\r\n" in again.output
    assert again.output.endswith(b"".join(b"%d\r\n" % number for number in range(1, 1001)))
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_EXITED, 9)
    await wire.delete(sandbox)


async def test_input_arrives_byte_for_byte(subject: Subject) -> None:
    sandbox = await subject.ready()
    wire, exec_id, content = subject.wire, f"e-{secrets.token_hex(6)}", secrets.token_bytes(3 << 20)
    await wire.run(sandbox, "sha256sum", exec_id=exec_id, wait=0, stdin_mode=exec_pb2.STDIN_MODE_PIPE)

    def parts(begin: int, *, end: bool) -> Iterator[Any]:
        start = exec_service_pb2.WriteStdinStart(exec_id=exec_id, offset=begin)
        yield exec_service_pb2.WriteStdinRequest(sandbox_id=sandbox, start=start)
        for offset in range(begin, len(content), 1 << 19):
            yield exec_service_pb2.WriteStdinRequest(data=content[offset : offset + (1 << 19)])
        if end:
            yield exec_service_pb2.WriteStdinRequest(end=True)

    for begin, end in ((0, False), (1 << 20, True)):
        call = wire.execs.WriteStdin(parts(begin, end=end), metadata=wire.metadata, timeout=BACKSTOP)
        assert (await call).state.offset == len(content)
    wait = exec_service_pb2.WaitExecRequest(sandbox_id=sandbox, exec_id=exec_id, wait=seconds(60))
    await wire.call(wire.execs.WaitExec, wait)
    read = exec_service_pb2.ReadOutputRequest(sandbox_id=sandbox, exec_id=exec_id)
    call = wire.execs.ReadOutput(read, metadata=wire.metadata, timeout=BACKSTOP)
    output = b"".join([response.chunk.data async for response in call])
    assert output.split()[0].decode() == hashlib.sha256(content).hexdigest()
    await wire.delete(sandbox)


async def test_memory_that_runs_out_is_told(subject: Subject) -> None:
    """Exactly one of the two: the command ends for lack of memory, or the sandbox does."""
    resources = sandbox_pb2.Resources(memory_bytes=256 << 20)
    sandbox, other = await asyncio.gather(subject.ready(resources=resources), subject.ready())
    hungry = "x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done"
    try:
        result = (await subject.wire.run(sandbox, hungry, wait=60)).exec.result
    except grpc.aio.AioRpcError:
        result = None
    if result is not None and result.ended == exec_pb2.EXEC_END_OUT_OF_MEMORY:
        assert await subject.wire.output(sandbox, "echo alive") == b"alive\n"
    else:
        end = await subject.end(sandbox)
        assert (end.state, end.reason) == (FAILED, sandbox_pb2.SANDBOX_REASON_OOM)
    assert await subject.wire.output(other, "echo alive") == b"alive\n"
    await asyncio.gather(subject.wire.delete(sandbox), subject.wire.delete(other))


async def test_without_a_network_there_is_loopback_alone(subject: Subject) -> None:
    sandbox = await subject.ready(network=sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_NONE))
    names = await subject.wire.output(sandbox, "sed -n 's/^ *\\([^:]*\\):.*/\\1/p' /proc/net/dev")
    assert set(names.split()) <= ({b"lo", b"eth0"} if subject.network_is_filtered else {b"lo"})
    await subject.wire.delete(sandbox)


async def test_a_port_is_reached_without_a_network(subject: Subject) -> None:
    sandbox = await subject.ready(network=sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_NONE))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _exchange(subject.wire, sandbox, 8123, b"")
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "PORT_REFUSED")
    serve = ECHO_SERVER.format(port=8123)
    await subject.wire.run(sandbox, serve, wait=0, concurrent=True, no_timeout=True)
    content = secrets.token_bytes(3 << 20)
    assert await _once_it_listens(subject.wire, sandbox, 8123, content) == content
    both = await asyncio.gather(*(_exchange(subject.wire, sandbox, 8123, content[:size]) for size in (70_000, 1)))
    assert both == [content[:70_000], content[:1]]
    await subject.wire.delete(sandbox)


async def _exchange(wire: Wire, sandbox: str, port: int, data: bytes) -> bytes:
    """What a port answers to all of `data`."""

    async def send() -> None:
        for offset in range(0, len(data), 1 << 18):
            await call.write(port_service_pb2.ForwardPortRequest(data=data[offset : offset + (1 << 18)]))
        await call.write(port_service_pb2.ForwardPortRequest(eof=True))

    call = wire.ports.ForwardPort(metadata=wire.metadata, timeout=BACKSTOP)
    start = port_service_pb2.ForwardPortStart(port=port)
    with peer_status(call):
        await call.write(port_service_pb2.ForwardPortRequest(sandbox_id=sandbox, start=start))
        assert (await call.read()).WhichOneof("event") == "opened"
    sending = asyncio.ensure_future(send())
    received = bytearray()
    while (response := await call.read()) is not grpc.aio.EOF:
        received += response.data
    await sending
    return bytes(received)


async def _once_it_listens(wire: Wire, sandbox: str, port: int, data: bytes) -> bytes:
    async with asyncio.timeout(BACKSTOP):
        while True:
            try:
                return await _exchange(wire, sandbox, port, data)
            except grpc.aio.AioRpcError as error:
                assert reason_of(error) == "PORT_REFUSED", error
            await asyncio.sleep(0.05)


async def test_it_is_found_by_its_labels(subject: Subject) -> None:
    mark = secrets.token_hex(6)
    sandbox = await subject.ready(labels={"mark": mark})
    request = sandbox_service_pb2.ListSandboxesRequest(labels={"mark": mark}, page_size=1000)
    listed = await subject.wire.call(subject.wire.sandboxes.ListSandboxes, request)
    assert [one.sandbox_id for one in listed.sandboxes] == [sandbox]
    assert dict(listed.sandboxes[0].spec.labels) == {"mark": mark}
    await subject.wire.delete(sandbox)


async def test_a_secret_reaches_commands_and_nothing_else(subject: Subject) -> None:
    secret, plain = f"s3cr3t-{secrets.token_hex(12)}", f"plain-{secrets.token_hex(12)}"
    created = await subject.wire.create(image=subject.image, secret_env={"TOKEN": secret}, env={"PLAIN": plain})
    ready = (await subject.wire.wait(created.sandbox_id, timeout=BACKSTOP))[-1]
    assert ready.state == READY, ready
    # Its hash alone: what a command writes may be kept.
    told = await subject.output(created.sandbox_id, 'printf %s "$TOKEN" | sha256sum')
    assert told.split()[0].decode() == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in str(await subject.wire.get(created.sandbox_id))
    for seen in subject.seen_outside(ready):
        assert secret.encode() not in seen
    await subject.wire.delete(created.sandbox_id)


async def test_what_owns_it_may_be_killed(subject: Subject) -> None:
    if subject.restart_owner is None:
        return  # it has no owner on this platform but the cluster itself
    sandbox, gone = await asyncio.gather(subject.ready(), subject.ready())
    before = await subject.wire.get(sandbox)
    await subject.wire.output(sandbox, "echo kept >/tmp/mark; sleep 98765 >/dev/null 2>&1 &")
    await subject.restart_owner()
    after = await subject.wire.get(sandbox)
    assert (after.uid, after.state, after.expire_time) == (before.uid, READY, before.expire_time)
    assert await subject.output(sandbox, "cat /tmp/mark") == b"kept\n"
    await subject.wire.delete(gone)
    assert (await subject.end(gone)).reason == sandbox_pb2.SANDBOX_REASON_REQUESTED
    await subject.wire.delete(sandbox)


async def test_what_is_taken_away_by_hand_is_told(subject: Subject) -> None:
    sandbox, other = await asyncio.gather(subject.ready(), subject.ready())
    await subject.remove_behind(await subject.wire.get(sandbox))
    end = await subject.end(sandbox)
    assert (end.state, end.reason) == (FAILED, sandbox_pb2.SANDBOX_REASON_DELETED_EXTERNALLY)
    assert await subject.wire.output(other, "echo alive") == b"alive\n"
    await subject.wire.delete(other)


async def test_an_image_that_cannot_be_had_is_told(subject: Subject) -> None:
    if subject.refuses_missing:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await subject.wire.create(image=subject.missing_image)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert subject.missing_image in str(caught.value.details())
        return
    created = await subject.wire.create(image=subject.missing_image, pull_timeout=seconds(5))
    end = await subject.end(created.sandbox_id)
    assert (end.state, end.reason) == (FAILED, sandbox_pb2.SANDBOX_REASON_IMAGE_PULL)
    assert subject.missing_image in end.message


async def test_what_no_runtime_can_do_is_refused_by_name(subject: Subject) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await subject.wire.create(image=subject.image, working_directory="relative")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert fields_of(caught.value) == ["spec.working_directory"]


async def test_it_ends_when_its_time_is_over(subject: Subject) -> None:
    short = await subject.wire.create(image=subject.image, ttl=seconds(3))
    silent = await subject.wire.create(image=subject.image, heartbeat_timeout=seconds(5))
    kept = await subject.ready()
    for sandbox in (short, silent):
        end = await subject.end(sandbox.sandbox_id)
        assert (end.state, end.reason) == (DELETED, sandbox_pb2.SANDBOX_REASON_EXPIRED)
    assert (await subject.wire.get(kept)).state == READY
    await subject.wire.delete(kept)


async def test_where_commands_start_and_what_they_see(subject: Subject) -> None:
    sandbox = await subject.ready(
        env={"GREETING": "hello"},
        working_directory="/tmp",
        start_argv=["/bin/sh", "-c", "echo $GREETING >started; exec sleep 1000"],
    )
    wait = "until [ -s /tmp/started ]; do :; done; pwd; cat started"
    assert await subject.wire.output(sandbox, wait) == b"/tmp\nhello\n"
    await subject.wire.delete(sandbox)


async def test_the_agent_survives_what_users_kill(subject: Subject) -> None:
    sandbox = await subject.ready()
    try:
        await subject.wire.run(sandbox, "kill -9 -1")
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE, error.details()
    assert await subject.output(sandbox, "echo again") == b"again\n"
    await subject.wire.delete(sandbox)
