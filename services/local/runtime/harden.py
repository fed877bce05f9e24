"""Brings a process that joined a sandbox's namespaces to the state that a container engine gives its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Final

from services.local.runtime import linux

# Bits of linux/capability.h: what root inside a sandbox needs for typical work.
CAPABILITIES: Final = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
_MASK: Final = sum(1 << bit for bit in CAPABILITIES.values())
_LAST_CAPABILITY: Final = 63
# More than the kernel lets any process have (fs.nr_open); one close_range call all the same.
_PAST_LAST_DESCRIPTOR: Final = 1 << 30
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}


def close_others(keep: Iterable[int]) -> None:
    """Close every descriptor but these and the standard three."""
    low = 3
    for descriptor in sorted(set(keep) - {0, 1, 2}):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, _PAST_LAST_DESCRIPTOR)


def harden(keep: Iterable[int], *, filter_program: bytes, no_new_privileges: bool, switch_user: bool) -> None:
    """Drop everything that reaches out of the sandbox. The order matters.

    Args:
        keep: descriptors that stay open.
        filter_program: a seccomp filter (seccomp.program).
        no_new_privileges: nothing started from here gains privileges by set-user-id files.
        switch_user: the namespace has user ids to switch to; without, setgroups is not allowed to anybody.
    """
    close_others(keep)
    os.chdir("/")
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    linux.new_session_keyring()
    if switch_user:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if no_new_privileges:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    # Needs CAP_SYS_ADMIN or no_new_privs: before the capabilities go.
    linux.seccomp(filter_program)
    for capability in range(_LAST_CAPABILITY):
        try:
            present = linux.prctl(linux.PR_CAPBSET_READ, capability)
        except OSError:
            break  # past the kernel's last
        if present and not _MASK >> capability & 1:
            linux.prctl(linux.PR_CAPBSET_DROP, capability)
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    linux.set_capabilities(_MASK)
    # Changing ids may have set it again (sysctl fs.suid_dumpable).
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
