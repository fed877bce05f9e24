"""What a sandbox is like from inside, on each level of user ids, and that there is no way out of it."""

from pathlib import Path

import pytest

from tests.integration.local_node.harness import NodeProcess, gone

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_sandbox_is_made_used_and_removed_without_a_trace(shared: NodeProcess) -> None:
    box = await shared.box(env={"GREETING": "hi"}, working_directory="/tmp")
    assert (await box.ok("echo $GREETING; pwd; id -u")).split() == ["hi", "/tmp", "0"]
    await box.ok("mkdir -p a/b/c && chmod 000 a/b a && echo x > /tmp/y")
    init = box.init_pid
    await shared.delete(box.uid)
    await gone(init)
    assert not box.folder.exists()
    assert not (shared.run / "a" / box.uid).exists()
    assert not list((shared.data / "node" / "journal").glob(f"{box.uid}*"))
    assert not list(Path("/sys/fs/cgroup").glob(f"*/*/{box.uid}"))
    # Others of the machine's come and go with tests that run beside this one.
    mounts = Path("/proc/self/mounts").read_text()
    assert not [line for line in mounts.splitlines() if box.uid in line or str(shared.data) in line]
    assert box.uid not in await shared.snapshot()
    await shared.delete(box.uid)  # one that is not there is no error


async def test_the_environment_and_home_of_commands(shared: NodeProcess) -> None:
    box = await shared.box()
    lines = (await box.ok("pwd; echo $HOME; echo $LANG; command -v ls; hostname; cat /etc/hostname")).split()
    assert lines == ["/root", "/root", "C.UTF-8", "/usr/bin/ls", "sandbox", "sandbox"]
    names = {line.split("=")[0] for line in (await box.ok("env")).splitlines()}
    assert not [name for name in names if name.startswith(("ORCHARD", "PYTHON", "VIRTUAL", "GRPC"))]
