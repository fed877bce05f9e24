"""The agent as a whole: who may call it, what it loads, how it ends and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.exec.v1 import agent_service_pb2, exec_pb2

from services.common.telemetry import AGENT_SPAN_KEY
from services.common.tokens import AGENT_TOKEN_KEY, Signer, generate_key
from tests.integration.exec_agent.conftest import (
    ROOT,
    SANDBOX,
    UID,
    AgentProcess,
    Client,
    await_end,
    new_id,
    problem,
    spec,
)

MakeAgent = Callable[..., AgentProcess]


async def test_health_is_for_the_uid_alone_and_open(client: Client) -> None:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=UID), timeout=110)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for other in ("", "uid-2", "orchard.exec.v1.ExecService"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service=other), timeout=110)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_only_a_token_for_this_sandbox_is_accepted(client: Client, shared_agent: AgentProcess) -> None:
    strangers = {
        "none": (),
        "another sandbox": ((AGENT_TOKEN_KEY, shared_agent.signer.agent_token("uid-2")),),
        "another key": ((AGENT_TOKEN_KEY, Signer(generate_key()).agent_token(UID)),),
        "rubbish": ((AGENT_TOKEN_KEY, "x.y.z"),),
    }
    for metadata in strangers.values():
        client.metadata = metadata  # type: ignore[assignment]
        for call in (client.start(spec("true")), client.read("x"), client.stream(spec("true"))):
            with problem() as found:
                await call
            assert found[0].code == grpc.StatusCode.UNAUTHENTICATED
        with problem() as found:
            await client.agent.GetAgent(agent_service_pb2.GetAgentRequest(sandbox_id=SANDBOX), metadata=metadata)
        assert found[0].code == grpc.StatusCode.UNAUTHENTICATED


async def test_another_sandbox_is_not_found(client: Client) -> None:
    client.sandbox_id = "other"
    with problem() as found:
        await client.start(spec("true"))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "SANDBOX_NOT_FOUND")
    client.sandbox_id = "NO GOOD"
    with problem() as found:
        await client.start(spec("true"))
    assert found[0].fields == ("sandbox_id",)


async def test_it_says_what_it_is(make_agent: MakeAgent) -> None:
    gaps = ["no cgroup: memory is not limited"]
    agent = make_agent(ORCHARD_GAPS=json.dumps(gaps), ORCHARD_RESTARTS="3")
    async with agent.client() as client:
        answer = await client.agent.GetAgent(
            agent_service_pb2.GetAgentRequest(sandbox_id=SANDBOX), metadata=client.metadata, timeout=110
        )
    assert (answer.uid, list(answer.gaps), answer.restarts) == (UID, gaps, 3)
    assert len(answer.version.split(".")) == 3


async def set_secret(client: Client, **env: str) -> None:
    await client.agent.SetSecretEnv(
        agent_service_pb2.SetSecretEnvRequest(sandbox_id=SANDBOX, secret_env=env),
        metadata=client.metadata,
        timeout=110,
    )


async def test_a_secret_of_another_sandbox_is_not_taken(make_agent: MakeAgent) -> None:
    agent = make_agent(ORCHARD_EXPECTS_SECRET_ENV="1")
    async with agent.client() as client:
        secret = agent_service_pb2.SetSecretEnvRequest(sandbox_id="another", secret_env={"KEY": "theirs"})
        asked = agent_service_pb2.GetAgentRequest(sandbox_id="another")
        for call in (
            client.agent.SetSecretEnv(secret, metadata=client.metadata, timeout=110),
            client.agent.GetAgent(asked, metadata=client.metadata, timeout=110),
        ):
            with problem() as found:
                await call
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "SANDBOX_NOT_FOUND")
        with problem() as found:
            await client.start(spec("true"))
        assert found[0].reason == "SECRET_ENV_PENDING"


async def test_commands_wait_for_the_secret_environment(make_agent: MakeAgent) -> None:
    agent = make_agent(
        ORCHARD_EXPECTS_SECRET_ENV="1", ORCHARD_START_ARGV=json.dumps(["sh", "-c", "echo start $KEY; sleep 1000"])
    )
    async with agent.client() as client:
        exec_id = new_id()
        for _ in range(2):
            with problem() as found:
                await client.start(spec("true"), exec_id=exec_id)
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "SECRET_ENV_PENDING")
            assert found[0].retry
        await set_secret(client, KEY="one", FROM_CONFIG="secret")
        assert (await client.run(spec(shell="echo $KEY $FROM_CONFIG"), exec_id)).stdout == b"one secret\n"
        assert await client.until_output("start", b"\n") == b"start one\n"
        await set_secret(client, KEY="two")
        assert (await client.run(spec(shell="echo $KEY $FROM_CONFIG"))).stdout == b"two yes\n"
        assert (await client.run(spec(shell="echo $KEY", env={"KEY": "own"}))).stdout == b"own\n"
        with problem() as found:
            await client.agent.SetSecretEnv(
                agent_service_pb2.SetSecretEnvRequest(sandbox_id=SANDBOX, secret_env={"A=": ""}),
                metadata=client.metadata,
            )
        assert found[0].fields == ("secret_env['A=']",)


async def test_the_start_command_is_an_exec(make_agent: MakeAgent) -> None:
    agent = make_agent(ORCHARD_START_ARGV=json.dumps(["sh", "-c", "echo up; exec sleep 1000"]))
    async with agent.client() as client:
        await client.until_output("start", b"up")
        assert (await client.run(spec("true"))).result is not None, "it does not hold the queue"
        while (found := await client.wait("start", 0)).state == exec_pb2.EXEC_STATE_QUEUED:
            pass  # its output may come before the launcher says that it runs
        assert found.state == exec_pb2.EXEC_STATE_RUNNING
        with problem() as problems:
            await client.start(spec("true"), exec_id="start")
        assert problems[0].code == grpc.StatusCode.ALREADY_EXISTS
        await client.signal("start", cancel=True)
        assert (await client.wait("start")).result.ended == exec_pb2.EXEC_END_KILLED


async def test_one_user_only(make_agent: MakeAgent) -> None:
    agent = make_agent(ORCHARD_CAN_SWITCH_USER="0", ORCHARD_USER_GAP="install uidmap to have more users")
    async with agent.client() as client:
        with problem() as found:
            await client.start(spec("true", user="nobody"))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "USER_NOT_AVAILABLE")
        assert "install uidmap" in found[0].message
        own = f"{os.geteuid()}:{os.getegid()}"
        assert (await client.run(spec("id", "-u", user=own))).stdout == f"{os.geteuid()}\n".encode()


@pytest.mark.root
async def test_the_sandboxs_user_is_the_default(make_agent: MakeAgent) -> None:
    agent = make_agent(ORCHARD_USER="nobody")
    async with agent.client() as client:
        assert (await client.run(spec("id", "-un"))).stdout == b"nobody\n"
        assert (await client.run(spec("id", "-un", user="root"))).stdout == b"root\n"


async def test_a_span_comes_back_where_the_caller_traces(client: Client) -> None:
    plain = client.stub.WaitExec
    exec_id = new_id()
    client.metadata = (*client.metadata, ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"))  # type: ignore[assignment]
    call = client.exec_call(spec(shell="echo hello; exit 3"), exec_id)
    async for _ in call:
        pass
    trailing = dict(await call.trailing_metadata())
    span = json.loads(trailing[AGENT_SPAN_KEY])
    assert span["start"] <= span["end"]
    assert span["attributes"] == {
        "orchard.exec_id": exec_id,
        "orchard.sandbox_id": SANDBOX,
        "orchard.exit_code": 3,
        "orchard.ended": "EXITED",
        "orchard.output_bytes": 6,
    }
    client.metadata = client.metadata[:1]  # type: ignore[assignment]
    from tests.integration.exec_agent.test_ends import _wait

    untraced = plain(_wait(exec_id, 0), metadata=client.metadata)
    await untraced
    assert AGENT_SPAN_KEY not in dict(await untraced.trailing_metadata())


def launcher_processes(agent: AgentProcess) -> list[int]:
    """The fork server and its reapers: children of the agent, and theirs."""
    found = [int(p) for p in _children(agent.process.pid)]
    return found + [child for server in found for child in _children(server)]


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


async def test_the_launcher_may_be_killed(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        for _ in range(3):
            assert (await client.run(spec("true"))).result is not None
            for pid in launcher_processes(agent):
                with contextlib.suppress(ProcessLookupError):  # a reaper may end by itself once its command has
                    os.kill(pid, signal.SIGKILL)
                await_end(pid)
            assert (await client.run(spec("echo", "again"))).stdout == b"again\n"


async def test_a_command_whose_reaper_is_killed_is_reported_and_dies(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        exec_id = new_id()
        response = await client.start(spec(shell="echo x; sleep 1000"), wait=0, exec_id=exec_id)
        await client.until_output(exec_id, b"x")
        reaper = int(Path(f"/proc/{response.exec.pid}/stat").read_text().rpartition(") ")[2].split()[1])
        os.kill(reaper, signal.SIGKILL)
        ended = await client.wait(exec_id)
        assert ended.result.ended == exec_pb2.EXEC_END_AGENT_RESTARTED
        await_end(response.exec.pid)
        assert (await client.run(spec("echo", "next"))).stdout == b"next\n"


async def test_a_stopped_reaper_does_not_hold_a_timeout_up(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        for timeout in (0.5, 5.0, 50.0):
            exec_id, command = new_id(), spec("sleep", "1000", timeout=timeout, kill_grace=0.2)
            response = await client.start(command, wait=0, exec_id=exec_id)
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended before we came to look
                reaper = int(Path(f"/proc/{response.exec.pid}/stat").read_text().rpartition(") ")[2].split()[1])
                os.kill(reaper, signal.SIGSTOP)
                break
        else:
            pytest.fail("it ended in no time")
        ended = await client.wait(exec_id)
        assert ended.result.ended == exec_pb2.EXEC_END_TIMED_OUT
        await_end(response.exec.pid)


async def test_a_terminated_agent_ends_cleanly_with_its_commands(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        call = client.exec_call(spec(shell="echo up; exec sleep 1000"), new_id())
        event = await call.read()
        pid = event.started.pid
        await call.read()
        stopped = asyncio.create_task(asyncio.to_thread(agent.stop))
        with problem() as found:
            await call.read()
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.UNAVAILABLE, "AGENT_STOPPING")
        assert await stopped == 0
    await_end(pid)


async def test_a_stopped_launcher_does_not_hold_the_agents_end_up(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await client.run(spec("true"))
        stopped = launcher_processes(agent)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
    assert await asyncio.to_thread(agent.stop) == 0
    for pid in stopped:  # in a sandbox they end with its init
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_second_agent_on_the_same_state_is_refused(make_agent: MakeAgent) -> None:
    agent = make_agent()
    environment = {**agent.environment, "ORCHARD_LISTEN": f"unix:{agent.folder}/other"}
    second = subprocess.run(
        [sys.executable, "-m", "services.exec_agent"], env=environment, cwd=ROOT, capture_output=True, timeout=110
    )
    assert second.returncode == 2
    assert b"another agent" in second.stderr


def test_a_bad_environment_names_the_variable(launcher: None) -> None:
    def run(**environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "services.exec_agent"], env=environment, cwd=ROOT, capture_output=True, timeout=110
        )
        assert done.returncode == 2
        return done.stderr.decode()

    assert "ORCHARD_STATE_DIRECTORY is not set" in run()
    assert "ORCHARD_STATE_DIRECTORY: /nowhere" in run(ORCHARD_STATE_DIRECTORY="/nowhere")
    good = {"ORCHARD_STATE_DIRECTORY": "/tmp", "ORCHARD_PUBLIC_KEYS_FILE": "/dev/null", "ORCHARD_UID": "u"}
    good |= {"ORCHARD_SANDBOX_ID": "s", "ORCHARD_LISTEN": "unix:/nowhere/s"}
    assert "ORCHARD_EXPECTS_SECRET_ENV" in run(**good, ORCHARD_EXPECTS_SECRET_ENV="yes")
    assert "ORCHARD_START_ARGV" in run(**good, ORCHARD_START_ARGV="{")


_LOADED = """
import sys
from services.exec_agent.app import preload
preload()
import services.exec_agent.__main__
print("\\n".join(sys.modules))
"""


def test_it_loads_nothing_that_it_does_not_need() -> None:
    output = subprocess.run([sys.executable, "-c", _LOADED], cwd=ROOT, capture_output=True, check=True, timeout=110)
    loaded = {name.partition(".")[0] for name in output.stdout.decode().split()}
    unwanted = {"pydantic", "sqlalchemy", "opentelemetry", "grpc_channelz", "redis", "psycopg", "kubernetes_asyncio"}
    assert loaded & {*unwanted, "alembic", "typer", "hypothesis"} == set()
    # grpc itself looks for the empty package grpc_reflection.
    assert b"grpc_reflection.v1alpha" not in output.stdout


_FROZEN = """
import importlib.abc, os, sys
from services.common import logs
from services.exec_agent.app import preload, run
from services.exec_agent.settings import AgentConfig

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        os.write(2, f"IMPORT {name}\\n".encode())
        raise ImportError(name)

logs.configure("agent")
preload()
config = AgentConfig.from_environment()
sys.meta_path[:] = [Refuse()]
sys.path.clear()
sys.exit(run(config))
"""


async def test_after_preload_nothing_is_imported(make_agent: MakeAgent) -> None:
    agent = make_agent()
    agent.kill()
    (agent.folder / "s").unlink()
    with (agent.folder / "stderr").open("wb") as stderr:
        frozen = subprocess.Popen([sys.executable, "-c", _FROZEN], env=agent.environment, cwd=ROOT, stderr=stderr)
        agent.process = frozen
        agent.await_ready()
        async with agent.client() as client:
            client.metadata = (*client.metadata, ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"))  # type: ignore[assignment]
            await client.run(spec("true"))
            await client.stream(spec(shell="seq 100000; kill -9 $$", stdin=b"x"))
            await client.start(spec("sleep", "100", timeout=0.1))
            await client.signal(new_id(), cancel=True)
            for bad in (spec("no-such-program"), spec("true", user="nobody-here"), spec("")):
                with problem():
                    await client.start(bad)
            client.metadata = ()  # type: ignore[assignment]
            with problem():
                await client.run(spec("true"))
        assert agent.stop() == 0
    # grpc looks for modules that it can do without while it reports errors; nothing else may be asked for.
    assert "IMPORT" not in (agent.folder / "stderr").read_text()


def test_its_version_is_the_distributions() -> None:
    from importlib.metadata import version

    from services.exec_agent.settings import VERSION

    assert version("orchard-services") == VERSION
