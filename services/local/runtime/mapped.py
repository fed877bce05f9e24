"""Runs work as root of a user namespace with the maps of a sandbox: how an ordinary user gets at files of its
sub-ids.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from services.local.runtime import linux
from services.local.runtime.namespaces import map_commands
from services.local.runtime.plan import Ids
from services.local.runtime.steps import StartError


def run_mapped(ids: Ids, work: Callable[[], None]) -> int:
    """Run `work` in a child of this single-threaded process, mapped by newuidmap; returns its exit code.

    Raises:
        StartError: the maps are refused.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(go_write)
            linux.unshare(linux.CLONE_NEWUSER)
            os.write(ready_write, b"1")
            if os.read(go_read, 1) == b"1":
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
                work()
                code = 0
        except BaseException:  # noqa: BLE001 (the process ends here)
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    os.close(ready_write)
    os.read(ready_read, 1)
    for command in map_commands(ids, child):
        pid = os.posix_spawnp(command[0], command, dict(os.environ))
        if os.waitpid(pid, 0)[1] != 0:
            os.close(go_write)
            os.waitpid(child, 0)
            raise StartError(f"{command[0]} refused the id map")
    os.write(go_write, b"1")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
