"""A machine with something mounted below the folders that sandboxes see, as in most containers."""

from collections.abc import Callable

import pytest

from tests.integration.local_node.harness import NodeProcess

pytestmark = pytest.mark.root

# /opt is small and has a file system of its own in it; /etc has the files that container engines mount; /usr is large.
MOUNTS = """
mount -t tmpfs none /opt
mkdir -p /opt/tool/bin /opt/below /opt/closed
echo tool > /opt/tool/bin/file
ln -s tool/bin/file /opt/link
echo hidden > /opt/closed/file
chmod 700 /opt/closed
mount -t tmpfs none /opt/below
echo private > /opt/below/file
echo hidden-host > /opt/below/hostname
mount --bind /opt/below/hostname /etc/hostname
mount -t tmpfs none /usr/src
echo private > /usr/src/file
"""


async def test_sandboxes_start_and_see_nothing_of_it(make_node: Callable[..., NodeProcess], level: str) -> None:
    node = make_node(level)
    node.mounts = MOUNTS
    await node.start()
    facts = await node.describe()
    assert facts.user_ids == level
    box = await node.box()
    assert await box.ok("cat /opt/tool/bin/file /opt/link") == "tool\ntool\n"
    assert await box.ok("hostname; cat /etc/hostname") == "sandbox\nsandbox\n"
    assert await box.ok("id -un; ls / > /dev/null; /usr/bin/env true && echo runs") == "root\nruns\n"
    # What is mounted there, and what others may not read, is the machine's own.
    assert await box.ok("ls -A /opt/below; cat /usr/src/file /opt/closed/file 2>/dev/null; true") == ""
    # What it writes stays its own, wherever that is possible at all.
    await box.ok("echo new > /opt/tool/bin/file; echo new > /etc/new; mkdir /opt/more; rm /opt/link")
    other = await node.box()
    assert await other.ok("cat /opt/link; ls /etc/new /opt/more 2>/dev/null; true") == "tool\n"
    writable = (await box.run("touch /usr/bin/new")).code == 0
    told = [gap for gap in facts.gaps if "/usr" in gap and "read-only" in gap and "/usr/src" in gap]
    assert writable == (level == "shifted")
    assert bool(told) == (not writable), facts.gaps
