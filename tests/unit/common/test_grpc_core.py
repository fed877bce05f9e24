"""What a process does before it carries bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ROUNDS = 50
_PROGRAM = f"""
import resource
from services.common.grpc_core import keep_freed_memory

keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({_ROUNDS}):
    messages = [b"x" * (1 << 20) for _ in range(4)]
    messages.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="other allocators have no such limit")
def test_the_memory_of_messages_is_used_for_the_next_ones() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    faults = int(
        subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, check=True).stdout
    )
    # Handed back to the kernel, most of the 1,024 pages of each round would be faults again.
    assert faults < _ROUNDS * 1024 / 10
