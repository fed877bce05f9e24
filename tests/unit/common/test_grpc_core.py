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


_AFTER_WORK = """
import asyncio, threading
from services.common import grpc_core

kept = []

def work():
    # In the thread's own arena, below something small that stays.
    blocks = [b"x" * (1 << 20) for _ in range(24)]
    kept.append([b"y" * 1000 for _ in range(100)])
    blocks.clear()

async def main():
    grpc_core._IDLE_SECONDS = 0.01
    before = grpc_core._own_bytes()
    giving = asyncio.ensure_future(grpc_core.give_freed_memory_back())
    await asyncio.sleep(0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = grpc_core._own_bytes() - before
    while grpc_core._own_bytes() - before > grpc_core._IDLE_BYTES:
        await asyncio.sleep(0.01)
    print(giving.done(), held)

grpc_core.keep_freed_memory()
asyncio.run(asyncio.wait_for(main(), 60))
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="other allocators have no such limit")
def test_the_memory_of_messages_is_used_for_the_next_ones() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    faults = int(
        subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, check=True).stdout
    )
    # Handed back to the kernel, most of the 1,024 pages of each round would be faults again.
    assert faults < _ROUNDS * 1024 / 10


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="other allocators have no such limit")
def test_a_process_that_is_one_of_many_gives_it_back_after_its_work() -> None:
    said = subprocess.run([sys.executable, "-c", _AFTER_WORK], capture_output=True, text=True, check=True).stdout
    ended, held = said.split()
    assert ended == "False", "it goes on looking"
    assert int(held) > 32 << 20, "there was something to give back"
