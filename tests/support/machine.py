"""What a machine holds that a node changes: taken before and after, the two must be the same."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

SETTINGS = (
    *("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "vm/panic_on_oom"),
    *("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet"),
)
FOLDERS = (
    "/var/lib/cni",
    "/var/log/containers",
    "/var/log/pods",
    "/run/containerd/s",
    "/run/netns",
    "/opt",
    "/usr/libexec",
    "/etc",
)
RULE = re.compile(r"-A |:(?!\w+ ACCEPT)")
"""Of iptables-save, a rule or a chain of somebody's own; tables and chains that are always there mean nothing."""


def snapshot() -> set[str]:
    """One line for every rule, link, mount, set, control group, kernel setting and file that is there."""
    return {
        *(f"setting {name} {Path('/proc/sys', name).read_text().strip()}" for name in SETTINGS),
        *(f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        *(f"link {line.split()[0].partition('@')[0]}" for line in output("ip", "-brief", "link")),
        *(f"route {line}" for line in output("ip", "route")),
        *(f"routing {line}" for line in output("ip", "rule")),
        *(f"rule {line}" for line in output("iptables-save") if RULE.match(line)),
        *(f"rule6 {line}" for line in output("ip6tables-save") if RULE.match(line)),
        *(f"set {line}" for line in output("ipset", "list", "-name")),
        *(f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob("*/kubepods")),
        *(f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob("kubepods*")),
        *(f"file {path}" for folder in FOLDERS for path in below(Path(folder))),
    }


def output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def below(folder: Path) -> Iterator[Path]:
    """The folder and what is in it, two levels deep."""
    for pattern in (".", "*", "*/*"):
        yield from folder.glob(pattern) if pattern != "." else [folder] if folder.exists() else []
