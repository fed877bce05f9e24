"""The agent in real Pods, brought in both ways, whatever the image is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.exec.v1 import exec_pb2

from services.common import pods
from services.common.tokens import Signer, generate_key
from services.scheduler.injection import Delivery, probe_spec
from tests.cluster.conftest import AGENT, BUSYBOX
from tests.cluster.sandboxes import KEY, as_scheduler, start
from tests.integration.exec_agent.conftest import BACKSTOP, Client, problem, spec
from tests.support.testbed import NAMESPACE, Testbed, static_busybox, write_image

SCRATCH = "orchard.test/scratch:1"
WITH_USER = "orchard.test/with-user:1"
ENV_WITH_USER = {
    "PATH": "/opt/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/lib",
    "LD_PRELOAD": "/opt/odd.so",
    "PYTHONPATH": "/opt/modules",
    "ORCHARD_UID": "the image may use any name",
}


@pytest.fixture(scope="module")
def images(node: Testbed, agent_image: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One with nothing but a static program, one with an environment, a directory and a user of its own."""
    folder = tmp_path_factory.mktemp("images")
    tool = folder / "scratch/tool"
    tool.mkdir(parents=True)
    (tool / "cat").write_bytes(static_busybox().read_bytes())
    (tool / "cat").chmod(0o755)
    node.import_image(write_image(folder / "scratch.tar", SCRATCH, folder / "scratch"))
    root = folder / "with-user"
    for name in ("bin", "etc", "srv/app", "home/me"):
        (root / name).mkdir(parents=True)
    for name in ("sh", "env", "id", "pwd", "cat"):
        (root / "bin" / name).write_bytes(static_busybox().read_bytes())
        (root / "bin" / name).chmod(0o755)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nme:x:1234:1235::/home/me:/bin/sh\n")
    archive = folder / "with-user.tar"
    node.import_image(write_image(archive, WITH_USER, root, env=ENV_WITH_USER, workdir="/srv/app", user="me"))


@pytest.fixture
def cluster(node: Testbed, images: None) -> Iterator[Testbed]:
    yield node
    node.clear()


@pytest.mark.parametrize("delivery", list(Delivery))
@pytest.mark.parametrize("image", [BUSYBOX, SCRATCH])
async def test_an_agent_answers_in_any_image(cluster: Testbed, image: str, delivery: Delivery) -> None:
    sandbox = start(cluster, delivery, image, env={"PATH": "/bin:/tool"})
    async with sandbox.client() as client:
        assert (await client.run(spec("cat", "/proc/self/comm"))).stdout == b"cat\n"
        if image == SCRATCH:
            with problem() as found:
                await client.run(spec(shell="true"))
            assert found[0].reason == "SHELL_NOT_FOUND"
            return
        # Nothing inside can change what the agent is made of.
        written = await client.run(spec(shell=f"echo >{pods.PAYLOAD_FOLDER}/runtime/app/__main__.py"))
        assert b"Read-only file system" in written.stderr


async def test_environment_directory_and_user_of_the_image_apply(cluster: Testbed) -> None:
    async with start(cluster, image=WITH_USER).client() as client:
        env = parsed((await client.run(spec("/bin/env", "-0"))).stdout)
        assert env == {**ENV_WITH_USER, "HOME": "/home/me", "HOSTNAME": "sandbox"}
        assert (await client.run(spec(shell="id -u; id -g; pwd"))).stdout == b"1234\n1235\n/srv/app\n"
        with problem() as found:
            await client.run(spec("id", user="root"))
        assert found[0].reason == "USER_NOT_AVAILABLE"


async def test_environment_directory_user_and_start_command_of_the_spec_are_above_the_images(cluster: Testbed) -> None:
    sandbox = start(
        cluster,
        image=WITH_USER,
        env={"PATH": "/bin", "OF_SPEC": "$(HOSTNAME) $$"},
        user="root",
        working_directory="/home/me",
        start_argv=["/bin/sh", "-c", "pwd; id -u; exec cat"],
    )
    async with sandbox.client() as client:
        env = parsed((await client.run(spec("/bin/env", "-0"))).stdout)
        assert (env["PATH"], env["OF_SPEC"], env["HOME"]) == ("/bin", "$(HOSTNAME) $$", "/root")
        assert (await client.run(spec(shell="id -u; pwd"))).stdout == b"0\n/home/me\n"
        assert (await client.run(spec("id", "-u", user="me"))).stdout == b"1234\n"
        assert await client.until_output("start", b"0\n") == b"/home/me\n0\n"


def parsed(output: bytes) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in output.decode().split("\0") if entry)


async def test_an_agent_refuses_what_is_meant_for_another_sandbox(cluster: Testbed) -> None:
    one, other = start(cluster), start(cluster)
    async with one.client(), other.client(), grpc.aio.insecure_channel(one.address) as channel:
        # Of another sandbox, of somebody who is no gateway, and none.
        for token in (Signer(KEY).agent_token(other.uid), Signer(generate_key()).agent_token(one.uid), ""):
            with problem() as found:
                await Client(channel, token, one.name).run(spec("true"))
            assert found[0].code is grpc.StatusCode.UNAUTHENTICATED
        request = health_pb2.HealthCheckRequest(service=other.uid)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=BACKSTOP)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_command_that_kills_all_it_can_leaves_an_agent_that_answers(cluster: Testbed) -> None:
    sandbox = start(cluster)
    async with sandbox.client() as client:
        await client.run(spec(shell="echo kept >/file"))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await client.run(spec(shell="kill -9 -1"))
        runs = ("--for=jsonpath={.status.phase}=Running", f"pod/{sandbox.pod}", "--timeout=110s")
        sandbox.testbed.kubectl("-n", NAMESPACE, "wait", *runs)
    async with sandbox.client() as client:
        assert (await client.run(spec("cat", "/file"))).stdout == b"kept\n"
    assert sandbox.container()["restartCount"] == 0


async def test_out_of_memory_is_said_of_the_command_or_of_the_whole_sandbox(cluster: Testbed) -> None:
    sandbox = start(cluster)
    async with sandbox.client() as client:
        try:
            output = await client.run(spec(shell="exec awk 'BEGIN { while (1) s = s \"0123456789abcdef\" s }'"))
        except grpc.aio.AioRpcError:
            failed = ("--for=jsonpath={.status.phase}=Failed", f"pod/{sandbox.pod}", "--timeout=110s")
            await asyncio.to_thread(as_scheduler, cluster, "wait", *failed)
            assert sandbox.container()["state"]["terminated"]["reason"] == "OOMKilled"
            return
        assert output.result is not None
        assert output.result.ended == exec_pb2.EXEC_END_OUT_OF_MEMORY
        assert (await client.run(spec("echo", "on"))).stdout == b"on\n"


async def test_a_pod_that_is_deleted_ends_in_order(cluster: Testbed) -> None:
    sandbox = start(cluster)
    async with sandbox.client() as client:
        await client.start(spec(shell="trap '' TERM; sleep 1000"), wait=0)
        # Nothing else than its end is waited for: with this grace a kill would come long after this test.
        watching = as_scheduler(
            cluster, "delete", f"pod/{sandbox.pod}", "--grace-period=3600", "--wait=true", "--timeout=110s"
        )
    assert "deleted" in watching


def test_the_probe_tells_that_image_volumes_work(cluster: Testbed) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": probe_spec(AGENT, "Never")}
    as_scheduler(cluster, "create", "--validate=false", "-f", "-", stdin=json.dumps(pod))
    as_scheduler(cluster, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/probe", "--timeout=110s")
