"""What a sandbox may do on its node, and who may call its agent: seen from within, on a real node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.common import pods
from services.common.kubernetes import KubernetesClient
from services.common.tokens import PublicKeysFile, Signer, generate_key, public_pem
from services.scheduler.injection import Delivery
from services.scheduler.pod_api import PodApi
from services.scheduler.pod_keys import PodKeys
from services.scheduler.throttle import Throttle
from tests.cluster.sandboxes import KEY, PROFILE, Sandbox, start
from tests.integration.exec_agent.conftest import Client, problem, spec
from tests.support.testbed import NAMESPACE, Testbed

# capabilities(7), by the bits that /proc shows.
BITS = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
TOKENS = "/var/run/secrets/kubernetes.io"


@pytest.fixture
def cluster(node: Testbed, agent_image: str) -> Iterator[Testbed]:
    yield node
    node.clear()


async def status_of(client: Client) -> dict[str, str]:
    output = await client.run(spec("cat", "/proc/self/status"))
    return dict(line.split(":\t", 1) for line in output.stdout.decode().splitlines())


async def test_commands_are_confined(cluster: Testbed) -> None:
    async with start(cluster).client() as client:
        status = await status_of(client)
        allowed = sum(1 << bit for bit in BITS.values())
        for held in ("CapEff", "CapPrm", "CapBnd"):
            assert int(status[held], 16) == allowed, held
        assert status["Seccomp"] == "2"  # a filter (proc(5))
        assert status["NoNewPrivs"] == "1"
        for refused in ("mount -t tmpfs none /tmp", "unshare -m true", "mknod /tmp/disk b 8 0", f"ls {TOKENS}"):
            output = await client.run(spec(shell=f"exec {refused}"))
            assert output.result is not None
            assert output.result.exit_code != 0, refused
        env = (await client.run(spec("env"))).stdout.decode()
        assert "KUBERNETES" not in env
        assert "SERVICE_HOST" not in env


async def test_the_nodes_limits_hold(cluster: Testbed) -> None:
    sandbox = start(cluster)
    async with sandbox.client():
        # podPidsLimit of testbed/config/kubelet.yaml, and the memory of the sandbox's terms.
        assert limit_of(sandbox, "pids", "pids.max") == 4096
        assert limit_of(sandbox, "memory", "memory.limit_in_bytes", "memory.max") == 256 << 20


def limit_of(sandbox: Sandbox, controller: str, *names: str) -> int:
    """A limit of the whole Pod, by control groups of version 1 or 2."""
    groups = Path("/sys/fs/cgroup")
    found = [*groups.glob(f"{controller}/**/pod{sandbox.uid}"), *groups.glob(f"kubepods*/**/pod{sandbox.uid}")]
    (file,) = [found[0] / name for name in names if (found[0] / name).exists()]
    return int(file.read_text())


@pytest.mark.parametrize("delivery", list(Delivery))
async def test_restricted_sandboxes_run_where_nothing_else_is_admitted(cluster: Testbed, delivery: Delivery) -> None:
    level = "pod-security.kubernetes.io/enforce"
    cluster.kubectl("label", "--overwrite", "namespace", NAMESPACE, f"{level}=restricted")
    try:
        with pytest.raises(AssertionError, match="violates PodSecurity"):
            start(cluster)
        sandbox = start(cluster, delivery, profile=replace(PROFILE, restricted=True))
        async with sandbox.client() as client:
            status = await status_of(client)
            assert status["Uid"].split() == ["1000"] * 4
            assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
            assert (await client.run(spec(shell="echo work >/tmp/file && cat /tmp/file"))).stdout == b"work\n"
            assert (await client.run(spec(shell="exec touch /etc/file"))).result.exit_code != 0
    finally:
        cluster.kubectl("label", "--overwrite", "namespace", NAMESPACE, f"{level}=baseline")


# A kubelet shows what changed when it next looks after the Pod: at once, or a minute and a half later.
@pytest.mark.timeout(600, func_only=True)
async def test_keys_are_rotated_in_running_pods(cluster: Testbed, tmp_path: Path) -> None:
    """Old; old and new; new alone: as docs/security.md has it, with the scheduler's rights."""
    new = generate_key()
    old_pem, new_pem = public_pem(KEY), public_pem(new)
    path = tmp_path / "public-keys.pem"
    path.write_bytes(old_pem)
    sandbox = start(cluster)
    api = PodApi(await KubernetesClient.connect(cluster.kubeconfig), NAMESPACE, Throttle(100, 100))
    shown: list[str] = []
    showing = asyncio.create_task(PodKeys(PublicKeysFile(path), api, shown.append).run(look_seconds=0.1))
    try:
        async with sandbox.client() as by_old, sandbox.client(Signer(new)) as by_new:
            await refused(by_new)
            path.write_bytes(old_pem + new_pem)
            await until_accepted(by_new)
            assert (await by_old.run(spec("echo", "still"))).stdout == b"still\n"
            path.write_bytes(new_pem)
            await until_refused(by_old)
            assert (await by_new.run(spec("echo", "on"))).stdout == b"on\n"
        assert shown[-1] == new_pem.decode()
        assert annotation(cluster, sandbox) == new_pem.decode()
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        await api.close()


def annotation(cluster: Testbed, sandbox: Sandbox) -> str:
    found = json.loads(cluster.kubectl("-n", NAMESPACE, "get", "pod", sandbox.pod, "-o", "json"))
    return str(found["metadata"]["annotations"][pods.PUBLIC_KEYS])


async def refused(client: Client) -> None:
    with problem() as found:
        await client.run(spec("true"))
    assert found[0].code is grpc.StatusCode.UNAUTHENTICATED


async def until_accepted(client: Client) -> None:
    while not await accepted(client):
        await asyncio.sleep(0.2)


async def until_refused(client: Client) -> None:
    while await accepted(client):
        await asyncio.sleep(0.2)


async def accepted(client: Client) -> bool:
    try:
        await client.run(spec("true"))
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        return False
    return True
