"""Every bad input: a clear status with the field named, and nothing half done."""

import secrets

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2, file_service_pb2
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from services.common.peer_status import peer_status
from tests.support.wire import Wire, fields_of, reason_of, seconds

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ABSURD = 10**11


def unique(name: str) -> str:
    return f"{name}-{secrets.token_hex(5)}"


@pytest.fixture
async def sandbox(wire: Wire):
    name = await wire.ready()
    yield name
    await wire.delete(name)


@pytest.mark.parametrize("bad", ["..", "all", "a" * 64, "ünïcode", "A", "a/b", "-a", "a b", "self"])
async def test_bad_sandbox_ids(wire: Wire, bad: str) -> None:
    for attempt in (wire.create(bad), wire.get(bad), wire.delete(bad), wire.wait(bad), wire.run(bad, "true")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attempt
        assert caught.value.code() == INVALID, caught.value
        assert fields_of(caught.value)[0] == "sandbox_id"


@pytest.mark.parametrize("bad", ["..", "", "a" * 65, "ü", "a/b", "a b"])
async def test_bad_exec_ids(wire: Wire, sandbox: str, bad: str) -> None:
    request = exec_service_pb2.StartExecRequest(sandbox_id=sandbox, exec_id=bad, spec=exec_pb2.ExecSpec(shell="true"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(wire.execs.StartExec, request)
    assert (caught.value.code(), fields_of(caught.value)) == (INVALID, ["exec_id"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (sandbox_pb2.SandboxSpec(env={"A=B": "x"}), "spec.env['A=B']"),
        (sandbox_pb2.SandboxSpec(env={"A": "x\0"}), "spec.env['A']"),
        (sandbox_pb2.SandboxSpec(labels={"a b": "x"}), "spec.labels['a b']"),
        (sandbox_pb2.SandboxSpec(image="a" * 513), "spec.image"),
        (sandbox_pb2.SandboxSpec(ttl=seconds(-1)), "spec.ttl"),
        (sandbox_pb2.SandboxSpec(ttl=seconds(0)), "spec.ttl"),
        (sandbox_pb2.SandboxSpec(ttl={"seconds": ABSURD}), "spec.ttl"),
        (sandbox_pb2.SandboxSpec(idle_timeout=seconds(0.5)), "spec.idle_timeout"),
        (sandbox_pb2.SandboxSpec(heartbeat_timeout=seconds(1)), "spec.heartbeat_timeout"),
        (sandbox_pb2.SandboxSpec(start_timeout=seconds(7200)), "spec.start_timeout"),
        (sandbox_pb2.SandboxSpec(working_directory="relative"), "spec.working_directory"),
        (sandbox_pb2.SandboxSpec(priority=1001), "spec.priority"),
        (sandbox_pb2.SandboxSpec(resources={"memory_bytes": 1}), "spec.resources.memory_bytes"),
        (sandbox_pb2.SandboxSpec(resources={"cpu": -1}), "spec.resources.cpu"),
        (sandbox_pb2.SandboxSpec(resources={"gpu": 1}), "spec.resources.gpu"),
        (sandbox_pb2.SandboxSpec(pull_timeout={"seconds": 0}), "spec.pull_timeout"),
        (sandbox_pb2.SandboxSpec(node_selector={"zone": "a"}), "spec.node_selector"),
        (sandbox_pb2.SandboxSpec(runtime_class="gvisor"), "spec.runtime_class"),
        (sandbox_pb2.SandboxSpec(network={"mode": "NETWORK_MODE_OPEN"}), "spec.network.mode"),
        (sandbox_pb2.SandboxSpec(network={"allow_list": "x"}), "spec.network.allow_list"),
        (sandbox_pb2.SandboxSpec(start_argv=["a\0b"]), "spec.start_argv[0]"),
        (sandbox_pb2.SandboxSpec(start_argv=["", "a"]), "spec.start_argv[0]"),
        (sandbox_pb2.SandboxSpec(start_argv=["echo", "x" * 200_000]), "spec.start_argv[1]"),
        (sandbox_pb2.SandboxSpec(start_argv=["echo", "é" * 70_000]), "spec.start_argv[1]"),
        (sandbox_pb2.SandboxSpec(start_argv=["echo", *["é" * 50_000] * 12]), "spec.start_argv"),
        (sandbox_pb2.SandboxSpec(env={"BIG": "x" * 200_000}), "spec.env['BIG']"),
        (sandbox_pb2.SandboxSpec(env={"BIG": "é" * 70_000}), "spec.env['BIG']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_specs(wire: Wire, spec: sandbox_pb2.SandboxSpec, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(
            wire.sandboxes.CreateSandbox, sandbox_service_pb2.CreateSandboxRequest(sandbox_id="bad-spec", spec=spec)
        )
    assert (caught.value.code(), fields_of(caught.value)) == (INVALID, [field]), caught.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.get("bad-spec")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_heartbeat_takes_a_thousand_ids_and_no_more(wire: Wire, sandbox: str) -> None:
    ids = [sandbox, *(f"never-{number}" for number in range(999))]
    told = await wire.call(wire.sandboxes.Heartbeat, sandbox_service_pb2.HeartbeatRequest(sandbox_ids=ids))
    assert sorted(told.missing_sandbox_ids) == sorted(ids[1:])
    for wrong in ([], [*ids, "one-more"]):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.call(wire.sandboxes.Heartbeat, sandbox_service_pb2.HeartbeatRequest(sandbox_ids=wrong))
        assert (caught.value.code(), fields_of(caught.value)) == (INVALID, ["sandbox_ids"])


async def test_a_secret_that_no_command_could_start_with(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create("big-secret", secret_env={"TOKEN": "x" * 200_000})
    assert (caught.value.code(), fields_of(caught.value)) == (INVALID, ["secret_env['TOKEN']"])


async def test_what_is_accepted_starts_commands(wire: Wire) -> None:
    most = (128 << 10) - 1
    env, secret = {"E": "é" * ((most - 2) // 2)}, {"S": "s" * (most - 2)}
    name = await wire.ready(env=env, secret_env=secret, start_argv=["sleep", "1000", "é" * (most // 2)])
    try:
        while True:
            try:
                sizes = await wire.output(name, 'printf "%s %s" "${#E}" "${#S}"')
                break
            except grpc.aio.AioRpcError as error:
                assert reason_of(error) == "SECRET_ENV_PENDING"
        assert sizes.split()[1] == str(most - 2).encode()
    finally:
        await wire.delete(name)


async def test_an_unknown_image_names_the_way_to_get_it(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create("no-image", image="python:3.12")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "orchard image import" in caught.value.details()
    assert "python:3.12" in caught.value.details()


async def test_every_bad_field_is_named_at_once(wire: Wire) -> None:
    spec = sandbox_pb2.SandboxSpec(env={"A=B": "x"}, ttl=seconds(-1), working_directory="x")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(
            wire.sandboxes.CreateSandbox, sandbox_service_pb2.CreateSandboxRequest(sandbox_id="All", spec=spec)
        )
    assert fields_of(caught.value) == ["sandbox_id", "spec.env['A=B']", "spec.ttl", "spec.working_directory"]


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (exec_pb2.ExecSpec(), ["spec.argv"]),
        (exec_pb2.ExecSpec(shell=""), ["spec.shell"]),
        (exec_pb2.ExecSpec(argv={"args": []}), ["spec.argv.args"]),
        (exec_pb2.ExecSpec(argv={"args": [""]}), ["spec.argv.args[0]"]),
        (exec_pb2.ExecSpec(argv={"args": ["echo", "a\0b"]}), ["spec.argv.args[1]"]),
        (exec_pb2.ExecSpec(argv={"args": ["echo", "x" * (131_073)]}), ["spec.argv.args[1]"]),
        (exec_pb2.ExecSpec(argv={"args": ["x" * 1000] * 1200}), ["spec.argv.args"]),
        (exec_pb2.ExecSpec(shell="x" * ((1 << 20) + 1)), ["spec.shell"]),
        (exec_pb2.ExecSpec(shell="a\0b"), ["spec.shell"]),
        (exec_pb2.ExecSpec(shell="true", env={"A=B": ""}), ["spec.env['A=B']"]),
        (exec_pb2.ExecSpec(shell="true", timeout=seconds(-1)), ["spec.timeout"]),
        (exec_pb2.ExecSpec(shell="true", timeout=seconds(0)), ["spec.timeout"]),
        (exec_pb2.ExecSpec(shell="true", timeout={"seconds": ABSURD}), ["spec.timeout"]),
        (exec_pb2.ExecSpec(shell="true", kill_grace=seconds(-1)), ["spec.kill_grace"]),
        (exec_pb2.ExecSpec(shell="true", output_limit_bytes=-1), ["spec.output_limit_bytes"]),
        (exec_pb2.ExecSpec(shell="true", retained_limit_bytes=1), ["spec.retained_limit_bytes"]),
        (exec_pb2.ExecSpec(shell="true", cwd="a\0"), ["spec.cwd"]),
        (exec_pb2.ExecSpec(shell="true", stdin=b"x" * ((512 << 10) + 1)), ["spec.stdin"]),
        (exec_pb2.ExecSpec(argv={"args": ["true"]}, login_shell=True), ["spec.login_shell"]),
    ],
    ids=range(19),
)
async def test_bad_commands(wire: Wire, sandbox: str, spec: exec_pb2.ExecSpec, fields: list[str]) -> None:
    exec_id = unique("bad")
    request = exec_service_pb2.StartExecRequest(sandbox_id=sandbox, exec_id=exec_id, spec=spec)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(wire.execs.StartExec, request)
    assert caught.value.code() == INVALID, caught.value
    assert fields_of(caught.value) == fields
    listed = await wire.call(wire.execs.ListExecs, exec_service_pb2.ListExecsRequest(sandbox_id=sandbox))
    assert exec_id not in {known.exec_id for known in listed.execs}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"shell": "true", "cwd": "/nowhere"}, "CWD_NOT_FOUND"),
        ({"shell": "true", "cwd": "/etc/passwd"}, "CWD_NOT_A_DIRECTORY"),
        ({"argv": {"args": ["no-such-program"]}}, "COMMAND_NOT_FOUND"),
        ({"argv": {"args": ["/no/such/program"]}}, "COMMAND_NOT_FOUND"),
        ({"argv": {"args": ["/etc/passwd"]}}, "COMMAND_NOT_EXECUTABLE"),
        ({"shell": "true", "user": "nobody-of-this-name"}, "USER_NOT_FOUND"),
    ],
)
async def test_commands_that_cannot_start(wire: Wire, sandbox: str, spec: dict, reason: str) -> None:
    request = exec_service_pb2.StartExecRequest(
        sandbox_id=sandbox, exec_id=unique("cannot"), spec=exec_pb2.ExecSpec(**spec), wait=seconds(20)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(wire.execs.StartExec, request)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, reason)


async def test_a_repeated_exec_id_with_another_spec(wire: Wire, sandbox: str) -> None:
    await wire.run(sandbox, "echo one", exec_id="same")
    again = await wire.run(sandbox, "echo one", exec_id="same")
    assert again.exec.result.exit_code == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.run(sandbox, "echo two", exec_id="same")
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ALREADY_EXISTS, "EXEC_ID_REUSED")


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 4097])
async def test_bad_paths(wire: Wire, sandbox: str, path: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.call(wire.files.Stat, file_service_pb2.StatRequest(sandbox_id=sandbox, path=path))
    assert (caught.value.code(), fields_of(caught.value)) == (INVALID, ["path"])


async def test_a_patch_that_leaves_its_target(wire: Wire, sandbox: str) -> None:
    async def requests():
        start = file_service_pb2.ApplyPatchStart(path="/tmp")
        yield file_service_pb2.ApplyPatchRequest(sandbox_id=sandbox, start=start)
        yield file_service_pb2.ApplyPatchRequest(data=b"--- /dev/null\n+++ b/../../etc/evil\n@@ -0,0 +1 @@\n+x\n")
        yield file_service_pb2.ApplyPatchRequest(end=True)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        call = wire.files.ApplyPatch(requests(), metadata=wire.metadata, timeout=110)
        with peer_status(call):
            await call
    assert (caught.value.code(), reason_of(caught.value)) == (INVALID, "PATCH_PATH_ESCAPES")


async def test_a_patch_that_does_not_apply_says_which_hunk_and_why(wire: Wire, sandbox: str) -> None:
    await wire.output(sandbox, "mkdir -p /w && printf 'a\\nb\\nc\\n' > /w/f")

    async def requests():
        yield file_service_pb2.ApplyPatchRequest(sandbox_id=sandbox, start=file_service_pb2.ApplyPatchStart(path="/w"))
        yield file_service_pb2.ApplyPatchRequest(data=b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n-x\n+y\n c\n")
        yield file_service_pb2.ApplyPatchRequest(end=True)

    report = await wire.files.ApplyPatch(requests(), metadata=wire.metadata, timeout=110)
    assert not report.applied
    (hunk,) = report.files[0].hunks
    assert (hunk.number, hunk.applied, hunk.expected_line) == (1, False, 1)
    assert "x" in hunk.error
    assert "b" in hunk.error
    assert await wire.output(sandbox, "cat /w/f") == b"a\nb\nc\n"


async def test_what_is_no_message_at_all(wire: Wire) -> None:
    call = wire.channel.unary_unary("/orchard.exec.v1.ExecService/StartExec")
    for garbage in (b"", b"\xff\xff\xff", b"\x0a\xff", b"\x12\x02ab", b"\x0a\x03\xff\xfe\xfd"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(garbage, metadata=wire.metadata, timeout=110)
        assert caught.value.code() == INVALID, (garbage, caught.value)


async def test_an_oversized_message_is_refused(wire: Wire, sandbox: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.run(sandbox, "x" * (5 << 20))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("key", [None, "Bearer", "Bearer x", "Basic abc", "Bearer ork_1_2"])
async def test_calls_without_a_valid_key(wire: Wire, key: str | None) -> None:
    metadata = (("authorization", key),) if key else ()
    for method, request in (
        (wire.sandboxes.ListSandboxes, sandbox_service_pb2.ListSandboxesRequest()),
        (wire.execs.ListExecs, exec_service_pb2.ListExecsRequest(sandbox_id="any")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request, metadata=metadata, timeout=110)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "method",
    [
        "/orchard.exec.v1.AgentService/SetSecretEnv",
        "/orchard.sandbox.v1.LeaseService/ReportActivity",
        "/orchard.watch.v1.WatchService/WatchSandboxes",
        "/orchard.node.v1.NodeService/GetNode",
    ],
)
async def test_internal_services_cannot_be_reached(wire: Wire, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.channel.unary_unary(method)(b"", metadata=wire.metadata, timeout=110)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
