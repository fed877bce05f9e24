"""There is no way out of a sandbox: every one of these worked against some runtime. Each runs on each level of user
ids.
"""

import asyncio
import shutil
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.local_node.harness import Box, NodeProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 29, 31}  # of linux/capability.h: see harden.py


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(shared: NodeProcess) -> AsyncIterator[Box]:
    box = await shared.box()
    # Tools that the attacks are written in.
    await box.ok("command -v python3 && command -v perl")
    yield box
    await shared.delete(box.uid)


async def python(box: Box, code: str, **fields: object) -> str:
    """Run Python inside; it prints what happened."""
    marker = uuid.uuid4().hex
    return await box.ok(f"/usr/bin/python3 - <<'{marker}'\n{code}\n{marker}", **fields)


async def test_nothing_of_the_host_user_is_visible(shared: NodeProcess, box: Box) -> None:
    listing = await box.ok("ls -A /home /root /mnt /srv /media /tmp /run 2>&1")
    assert {line for line in listing.split() if not line.endswith(":")} <= {"lock"}
    private = (shared.data, shared.run, "/etc/ssh", "/var/run/docker.sock", "/etc/sudoers", "/var/lib/docker")
    for path in private:
        assert (await box.run(f"test -e '{path}'")).code != 0, path
    tops = set((await box.ok("ls -A /")).split())
    usual = {
        "bin",
        "boot",
        "dev",
        "etc",
        "home",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "media",
        "mnt",
        "opt",
        "proc",
        "root",
    }
    usual |= {"run", "sbin", "srv", "sys", "tmp", "usr", "var"}
    assert tops <= usual


async def test_accounts_are_the_systems_own(box: Box) -> None:
    people = [
        line for line in (await box.ok("cat /etc/passwd")).splitlines() if 1000 <= int(line.split(":")[2]) < 65534
    ]
    assert people == []
    shadow = (await box.ok("cat /etc/shadow")).splitlines()
    assert shadow
    assert all(line.split(":")[1] == "*" for line in shadow)
    assert (await box.ok("cat /etc/resolv.conf; cat /etc/machine-id")).strip() == ""


async def test_what_others_may_not_read_on_the_host_is_not_there(box: Box) -> None:
    unreadable = [
        path
        for path in Path("/etc").rglob("*")
        if not path.is_symlink() and path.is_file() and not path.stat().st_mode & 0o004
    ]
    synthetic = {"/etc/shadow", "/etc/gshadow"}
    for path in unreadable[:50]:
        if str(path) not in synthetic:
            assert (await box.run(f"test -e '{path}'")).code != 0, path


async def test_the_hosts_files_are_never_changed(shared: NodeProcess) -> None:
    """Whatever the levels allow inside, the host's files keep content, mode and owner."""
    box = await shared.box()
    targets = [Path("/usr/bin/env"), Path("/etc/passwd"), Path("/etc/hosts"), Path("/usr/bin")]
    before = [(p.stat().st_mode, p.stat().st_uid, p.stat().st_mtime_ns, p.stat().st_size) for p in targets]
    for path in targets:
        await box.run(f"chmod 0777 {path}; chown 1:1 {path}; touch {path}; echo x >> {path}; truncate -s 1 {path}")
    await box.run("rm -rf /usr/bin /usr/sbin /etc")
    await shared.delete(box.uid)
    after = [(p.stat().st_mode, p.stat().st_uid, p.stat().st_mtime_ns, p.stat().st_size) for p in targets]
    assert after == before


async def test_writes_stay_inside(shared: NodeProcess) -> None:
    one, two = await shared.box(), await shared.box()
    name = f"orchard-{uuid.uuid4().hex}"
    for folder in ("/root", "/tmp", "/var/tmp", "/home", "/"):
        await one.ok(f"echo x > {folder}/{name}")
        assert not Path(folder, name).exists()
        assert (await two.run(f"test -e {folder}/{name}")).code == 1
    await asyncio.gather(shared.delete(one.uid), shared.delete(two.uid))


async def test_no_process_of_the_host_is_visible(box: Box) -> None:
    pids = [int(name) for name in (await box.ok("ls /proc")).split() if name.isdigit()]
    names = {(await box.run(f"cat /proc/{pid}/comm")).output.strip() for pid in pids[:10]}
    assert len(pids) < 12
    assert (await box.ok("readlink /proc/self/ns/pid")).strip() != str(Path("/proc/self/ns/pid").readlink())
    assert "systemd" not in names


async def test_the_agent_cannot_be_looked_into(shared: NodeProcess, box: Box) -> None:
    """Its memory, environment and descriptors hold the host's folders."""
    result = await python(
        box,
        """
import os
agents = [p for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/comm').read().strip() == 'orchard-agent']
assert len(agents) == 1, agents
pid = agents[0]
for name in ('environ', 'mem', 'maps', 'auxv', 'stack', 'io'):
    try:
        open(f'/proc/{pid}/{name}', 'rb').read(1)
        print('OPEN', name)
    except OSError:
        pass
for name in ('exe', 'cwd', 'root'):
    try:
        print('LINK', name, os.readlink(f'/proc/{pid}/{name}'))
    except OSError:
        pass
for name in ('fd', 'map_files', 'task/' + pid + '/fd'):
    try:
        print('LIST', name, os.listdir(f'/proc/{pid}/{name}'))
    except OSError:
        pass
for number in range(64):
    try:
        os.open(f'/proc/{pid}/fd/{number}', os.O_PATH)
        print('FD', number)
    except OSError:
        pass
print(open(f'/proc/{pid}/cmdline').read().strip(chr(0)))
""",
    )
    assert result.strip() == "orchard-agent"
    assert str(shared.data) not in await box.ok("cat /proc/*/cmdline | tr '\\0' ' '")


async def test_init_cannot_be_looked_into(box: Box) -> None:
    """It holds the lifeline: whoever could open that for writing would outlive the platform with all sandboxes."""
    for name in ("fd/", "environ", "mem", "exe", "root/"):
        assert (await box.run(f"ls /proc/1/{name} && head -c 1 /proc/1/{name}")).code != 0
    assert (
        await box.run("for n in 3 4 5 6 7 8 9 10 11; do (: > /proc/1/fd/$n) && echo OPEN; done; true")
    ).output.count("OPEN") == 0
    assert (await box.run("chmod 0 /proc/1/exe")).code != 0


async def test_the_agent_and_init_cannot_be_traced(box: Box) -> None:
    result = await python(
        box,
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, *[int(p) for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/comm').read().strip() ==
'orchard-agent']):
    for request in (16, 0x4206):  # ATTACH, SEIZE
        print(pid, libc.ptrace(request, pid, 0, 0), ctypes.get_errno())
    buffer = ctypes.create_string_buffer(8)
    iovec = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    print(pid, libc.process_vm_readv(pid, iovec, 1, iovec, 1, 0), ctypes.get_errno())
    print(pid, libc.syscall(438, os.pidfd_open(pid), 3, 0), ctypes.get_errno())  # pidfd_getfd
""",
    )
    answers = [line.split() for line in result.splitlines()]
    assert len(answers) == 8
    assert all(answer[1] == "-1" and answer[2] == "1" for answer in answers), result


async def test_devices(box: Box) -> None:
    names = set((await box.ok("ls -A /dev")).split())
    assert names == {"console", "core", "fd", "full", "null", "ptmx", "pts", "random", "shm"} - {"console"} | {
        *("stderr", "stdin", "stdout", "tty", "urandom", "zero")
    }
    assert (await box.run("mknod /tmp/disk b 254 0 && cat /tmp/disk | head -c 1")).code != 0
    assert (await box.run("mknod /tmp/memory c 1 1 && cat /tmp/memory | head -c 1")).code != 0
    await box.ok("echo x > /dev/null; head -c 8 /dev/urandom > /tmp/r; test $(stat -c %s /tmp/r) = 8")


async def test_mounts_and_namespaces(box: Box) -> None:
    result = await python(
        box,
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    print(name, libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]), ctypes.get_errno())
call('mount', 165, b'none', b'/mnt', b'tmpfs', 0, None)
call('umount', 166, b'/proc', 2)
call('pivot_root', 155, b'/tmp', b'/tmp')
call('open_tree', 428, -100, b'/', 1)
call('fsopen', 430, b'tmpfs', 0)
call('move_mount', 429, -100, b'/tmp', -100, b'/mnt', 0)
call('mount_setattr', 442, -100, b'/', 0, None, 0)
call('setns', 308, 0, 0)
call('unshare user', 272, 0x10000000)
call('unshare mount', 272, 0x20000)
call('unshare all', 272, 0x7e020000)
call('clone user', 56, 0x10000000 | 17, 0, 0, 0, 0)
call('clone3', 435, None, 0)
call('keyctl', 250, 0, -3, 0)
call('add_key', 248, b'user', b'x', b'y', 1, -3)
call('bpf', 321, 0, None, 0)
call('perf', 298, None, 0, -1, -1, 0)
call('userfaultfd', 323, 0)
call('io_uring', 425, 1, None)
call('open_by_handle_at', 304, -100, None, 0)
call('init_module', 175, None, 0, b'')
call('kexec', 246, 0, 0, None, 0)
call('reboot', 169, 0xfee1dead, 672274793, 0, None)
call('swapon', 167, b'/tmp/x', 0)
call('acct', 163, b'/tmp/x')
call('syslog', 103, 3, None, 0)
call('chroot+', 40404, 0)
""",
    )
    for line in result.splitlines():
        name, answer, number = line.rsplit(maxsplit=2)
        assert answer == "-1", line
        assert number == ("38" if name in ("clone3", "chroot+") else "1"), line


async def test_ioctls_that_type_into_terminals(box: Box) -> None:
    result = await python(
        box,
        """
import fcntl, os, pty
master, slave = pty.openpty()
for request in (0x5412, 0x541c):
    try:
        fcntl.ioctl(slave, request, b'x')
        print('TYPED')
    except OSError as error:
        print(error.errno)
""",
    )
    assert result.split() == ["1", "1"]


async def test_proc_and_sys(box: Box) -> None:
    for path in (
        *("/proc/sys/kernel/core_pattern", "/proc/sys/net/ipv4/ip_forward", "/proc/sysrq-trigger"),
        *("/proc/sys/vm/drop_caches", "/proc/sys/kernel/hostname", "/proc/irq/default_smp_affinity"),
    ):
        assert (await box.run(f"echo 1 > {path}")).code != 0, path
    for name in ("keys", "kcore", "slabinfo", "timer_list", "vmallocinfo", "kpagecount", "kmsg", "kallsyms"):
        ended = await box.run(f"head -c 100 /proc/{name}")
        assert ended.code != 0 or ended.output == "", name
    assert (await box.ok("ls -A /sys")).strip() == ""
    assert (await box.run("ls /sys/fs/cgroup")).code != 0


async def test_capabilities_and_filter(box: Box) -> None:
    status = dict(
        line.split(":\t", 1) for line in (await box.ok("cat /proc/self/status")).splitlines() if ":\t" in line
    )
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        mask = int(status[kind], 16)
        assert {bit for bit in range(64) if mask >> bit & 1} == _CAPABILITIES, kind
    assert (status["CapInh"], status["CapAmb"]) == ("0" * 16, "0" * 16)
    assert status["Seccomp"] == "2"


async def test_no_network(shared: NodeProcess, box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
        ended = await box.run(f'/usr/bin/python3 -c "{code}"')
    assert ended.code != 0
    assert "refused" in ended.output
    assert (await box.ok("ls /sys/class/net 2>/dev/null; cat /proc/net/dev")).count(":") == 1  # lo
    # Its own loopback works.
    await python(
        box,
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(s.getsockname()).close()",
    )


async def test_abstract_sockets_of_the_host_are_out_of_reach(box: Box) -> None:
    name = f"orchard-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        result = await box.run(
            f"/usr/bin/python3 -c \"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + '{name}')\""
        )
    assert result.code != 0
    assert "refused" in result.output


async def test_host_network_is_the_hosts(shared: NodeProcess) -> None:
    box = await shared.box(network=sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_HOST))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        await box.ok(f"/usr/bin/python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}), 3)\"")
    # Being there gives no power over it.
    assert (await box.run("ip link set lo down 2>&1 || ifconfig lo down")).code != 0
    assert (await box.run("echo 1 > /proc/sys/net/ipv4/ip_forward")).code != 0
    expected = Path("/etc/resolv.conf").read_text() if Path("/etc/resolv.conf").exists() else ""
    assert await box.ok("cat /etc/resolv.conf") == expected
    await shared.delete(box.uid)


async def test_ipc_is_its_own(box: Box) -> None:
    made = subprocess.run(["ipcmk", "-M", "4096"], capture_output=True, text=True, timeout=110)
    number = made.stdout.split()[-1]
    try:
        assert number not in await box.ok("cat /proc/sysvipc/shm")
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True, timeout=110)


async def test_signals_reach_nobody_outside(box: Box) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        await box.run(f"kill -9 {sleeper.pid}")
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait(110)


async def test_set_user_id_files_gain_nothing_on_the_host(shared: NodeProcess, box: Box) -> None:
    """One that is made inside would be a door for any user of the machine, if its owner there were the host's root."""
    await box.ok("cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id")
    found = list((shared.data / "node" / "sandboxes" / box.uid / "u").rglob("tmp/id"))
    assert len(found) == 1
    assert found[0].stat().st_uid != 0
    # And nobody else gets there.
    assert shared.data.stat().st_mode & 0o077 == 0


async def test_a_chroot_does_not_lead_out(box: Box) -> None:
    result = await python(
        box,
        """
import os
os.makedirs('/tmp/jail', exist_ok=True)
fd = os.open('/', os.O_RDONLY)
os.chroot('/tmp/jail')
os.fchdir(fd)
for _ in range(64):
    os.chdir('..')
os.chroot('.')
print(sorted(os.listdir('/')) == sorted(os.listdir(fd)))
""",
    )
    assert result.strip() == "True"


async def test_users_inside(shared: NodeProcess, box: Box) -> None:
    """Where there are ids to switch to, commands run as any user; else the refusal names the fix."""
    level = (await shared.describe()).user_ids
    await box.ok("touch /tmp/owned && chown 33:33 /tmp/owned")
    owner = (await box.ok("stat -c %u:%g /tmp/owned")).strip()
    if level == "single":
        assert owner == "0:0"
        assert any("uidmap" in gap for gap in (await shared.describe()).gaps)
    else:
        assert owner == "33:33"
        assert (await box.ok("id -u", user="33", cwd="/tmp")).strip() == "33"
        assert (await box.run("cat /etc/shadow", user="33", cwd="/")).code != 0
        assert (await box.run("echo x > /usr/bin/env", user="33", cwd="/")).code != 0


async def test_programs_of_the_host_work(box: Box) -> None:
    assert (await box.ok("python3 -c 'import ssl, sqlite3; print(6 * 7)'")).strip() == "42"
    await box.ok("ls -la / > /dev/null; dpkg -l | head -3 > /dev/null" if shutil.which("dpkg") else "true")
    await box.ok("cd /root && tar -cf x.tar /etc/hosts 2>/dev/null && mkdir y && tar -xf x.tar -C y")


async def test_shared_memory_has_its_size(shared: NodeProcess) -> None:
    box = await shared.box(resources=sandbox_pb2.Resources(shm_bytes=8 << 20))
    assert (await box.ok("df -B1 --output=size /dev/shm | tail -1")).strip() == str(8 << 20)
    assert (await box.run("dd if=/dev/zero of=/dev/shm/x bs=1M count=9")).code != 0
    await shared.delete(box.uid)
