"""What a sandbox is as a container, seen from outside by the docker command line."""

import grpc
import pytest
from google.protobuf import timestamp_pb2
from orchard.exec.v1 import exec_pb2
from orchard.node.v1 import node_service_pb2
from orchard.sandbox.v1 import sandbox_pb2

from services.local.docker.container import annotations_of
from services.local.node.servicer import rebuilt
from tests.integration.local_docker.test_lifecycle import failure
from tests.integration.local_node.harness import PATIENCE, RUNNING, NodeProcess
from tests.support.engine import BUSYBOX, TestEngine
from tests.support.testbed import busybox_root

IMAGE_USER = "orchard.test/user:1"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def container_of(engine: TestEngine, uid: str) -> dict:
    (found,) = engine.containers(f"label=dev.orchard.uid={uid}")
    return engine.inspect(found)


async def test_it_is_confined(shared: NodeProcess, engine: TestEngine) -> None:
    resources = sandbox_pb2.Resources(cpu=0.5, memory_bytes=128 << 20, shm_bytes=1 << 20, pids=50)
    box = await shared.box(image=BUSYBOX, resources=resources)
    host = container_of(engine, box.uid)["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (500_000_000, 128 << 20, 128 << 20)
    assert (host["ShmSize"], host["PidsLimit"], host["NetworkMode"]) == (1 << 20, 50, "none")
    assert (host["Privileged"], host["CapDrop"], host["SecurityOpt"]) == (False, ["ALL"], ["no-new-privileges"])
    assert host["RestartPolicy"]["Name"] == "no"
    status = dict(line.split(":\t", 1) for line in (await box.ok("cat /proc/self/status")).splitlines())
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    # The twelve that typical work needs (capabilities(7)), SYS_ADMIN, NET_ADMIN and MKNOD not among them.
    of_work = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31)
    assert int(status["CapBnd"], 16) == sum(1 << number for number in of_work)
    assert (await box.ok("ls /sys/class/net")).split() == ["lo"]
    assert (await box.ok("df -k /dev/shm | tail -1")).split()[1] == "1024"
    for path in ("/.orchard/agent/x", "/.orchard/config/x"):
        assert "Read-only file system" in (await box.run(f"touch {path}")).output


async def test_without_limits_there_are_the_defaults(shared: NodeProcess, engine: TestEngine) -> None:
    box = await shared.box(image=BUSYBOX)
    host = container_of(engine, box.uid)["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["ShmSize"], host["PidsLimit"]) == (0, 0, 64 << 20, 4096)


async def test_processes_are_bounded(shared: NodeProcess) -> None:
    box = await shared.box(image=BUSYBOX, resources=sandbox_pb2.Resources(pids=40))
    bomb = "i=0; while [ $i -lt 100 ]; do sleep 100 & i=$((i+1)); done; wait"
    ended = await box.run(f"sh -c '{bomb}'")
    assert ended.code != 0 and "fork" in ended.output
    await box.healthy()


async def test_memory_that_runs_out_is_told(shared: NodeProcess) -> None:
    """Exactly one of the two: the command ends for lack of memory, or the sandbox does."""
    box = await shared.box(image=BUSYBOX, resources=sandbox_pb2.Resources(memory_bytes=128 << 20))
    try:
        ended = await box.run("tail /dev/zero")
    except grpc.aio.AioRpcError:
        ended = None
    if ended is not None and ended.end == exec_pb2.EXEC_END_OUT_OF_MEMORY:
        assert (await box.ok("echo alive")).strip() == "alive"
    else:
        # Its agent went before the node heard of the end.
        assert (await failure(shared, box.uid))[0] == sandbox_pb2.SANDBOX_REASON_OOM


async def test_its_labels_rebuild_its_record(shared: NodeProcess, engine: TestEngine) -> None:
    request = node_service_pb2.CreateSandboxRequest(
        tenant="t",
        sandbox_id="alpha",
        request_id="r",
        spec_hash="h",
        spec=sandbox_pb2.SandboxSpec(image=BUSYBOX, env={"A": "b" * 100_000}, labels={"team": "blue"}),
        expire_time=timestamp_pb2.Timestamp(seconds=4_000_000_000),
        create_time=timestamp_pb2.Timestamp(seconds=1_700_000_000, nanos=5_000_000),
        expects_secret_env=True,
    )
    made = (await shared.stub.CreateSandbox(request, timeout=PATIENCE)).sandbox
    await shared.until(made.uid, RUNNING)
    creation = rebuilt(annotations_of(container_of(engine, made.uid)["Config"]["Labels"]))
    assert (creation.tenant, creation.request_id, creation.spec_hash) == ("t", "r", "h")
    assert sandbox_pb2.SandboxSpec.FromString(creation.spec) == request.spec
    assert (creation.create_time, creation.expire_time) == (1_700_000_000.005, 4_000_000_000)
    assert creation.request.sandbox_id == "alpha"
    assert creation.request.expects_secret_env


async def test_what_the_image_says_applies(shared: NodeProcess, engine: TestEngine) -> None:
    root = engine.folder / "with-user"
    busybox_root(root)
    changes = ("ENV PATH=/bin LD_PRELOAD=/nothing.so MARK=image", "USER nobody", "WORKDIR /srv/work", "VOLUME /kept")
    engine.make_image(IMAGE_USER, root, *changes, 'ENTRYPOINT ["/bin/false"]')
    box = await shared.box(image=IMAGE_USER)
    assert (await box.ok("id -un; pwd; echo $MARK; echo $LD_PRELOAD; echo $HOME")).splitlines() == [
        *("nobody", "/srv/work", "image", "/nothing.so", "/")
    ]
    assert (await box.ok("id -u", user="root")).strip() == "0"
    mine = await shared.box(image=IMAGE_USER, user="root", working_directory="/tmp", env={"MARK": "spec"})
    assert (await mine.ok("id -un; pwd; echo $MARK")).splitlines() == ["root", "/tmp", "spec"]
    assert box.uid not in await box.ok("ls /.orchard/state 2>&1 || true")


async def test_an_open_network_leads_out_and_none_does_not(shared: NodeProcess) -> None:
    opened = await shared.box(image=BUSYBOX, network=sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_OPEN))
    gateway = (await opened.ok("ip route | sed -n 's/default via \\([^ ]*\\).*/\\1/p'")).strip()
    assert "refused" in (await opened.run(f"nc -w 5 {gateway} 1 </dev/null")).output
    closed = await shared.box(image=BUSYBOX)
    assert (await closed.ok("ip route")).strip() == ""
    assert "unreachable" in (await closed.run(f"nc -w 5 {gateway} 1 </dev/null")).output


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({"image": ""}, "spec.image", "name an image"),
        ({"image": "Not//A:Name"}, "spec.image", "must be an image's name"),
        ({"image": "../../containers/json?a="}, "spec.image", "must be an image's name"),
        ({"network": sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_HOST)}, "spec.network.mode", "NONE and OPEN"),
        ({"network": sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_DNS_ONLY)}, "spec.network.mode", "cluster"),
        ({"resources": sandbox_pb2.Resources(gpu=1)}, "spec.resources.gpu", "use a cluster"),
        ({"resources": sandbox_pb2.Resources(disk_bytes=1 << 30)}, "spec.resources.disk_bytes", "leave it out"),
        ({"resources": sandbox_pb2.Resources(memory_bytes=32 << 20)}, "spec.resources.memory_bytes", ""),
        ({"image_pull_secret": "a"}, "spec.image_pull_secret", "for clusters"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(shared: NodeProcess, fields: dict, field: str, fix: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await shared.create(**{"image": BUSYBOX, **fields})
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.value.details() and fix in error.value.details()


async def test_images_are_the_engines_own(shared: NodeProcess) -> None:
    calls = (
        lambda: shared.stub.ListImages(node_service_pb2.ListImagesRequest(), timeout=PATIENCE),
        lambda: shared.stub.RemoveImage(node_service_pb2.RemoveImageRequest(name="a"), timeout=PATIENCE),
        lambda: aiter(
            shared.stub.ImportImage(node_service_pb2.ImportImageRequest(name="a", source_path="/tmp"), timeout=PATIENCE)
        ).__anext__(),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call()
        assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "docker" in error.value.details()
