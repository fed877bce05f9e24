"""Clients after a real fork: the child opens its own connections, the parent notices nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from orchard import SandboxClient, SandboxState

Program = Callable[..., "subprocess.Popen[str]"]

SYNC = """
import multiprocessing, sys, threading
from orchard import SandboxClient

def work(sandbox, client, queue, number):
    try:
        own = client.create()
        queue.put((number, sandbox.exec(f"echo {number}", concurrent=True).stdout.strip(), own.exec("echo own").ok))
    except BaseException as error:
        queue.put((number, repr(error), False))
        raise

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with SandboxClient() as client, client.create(labels={"test": "fork"}) as sandbox:
        streamed = []
        command = "echo first; until test -e /tmp/done; do sleep 0.02; done; echo last"
        stream = sandbox.exec_stream(command, concurrent=True)
        started = threading.Event()
        def read():
            for chunk in stream:
                streamed.append(chunk.text)
                started.set()
        reader = threading.Thread(target=read)
        reader.start()
        started.wait(110)
        queue = context.SimpleQueue()
        children = [context.Process(target=work, args=(sandbox, client, queue, n)) for n in range(3)]
        for child in children:
            child.start()
        print(sorted(queue.get() for _ in children))
        for child in children:
            child.join(110)
        print([child.exitcode for child in children])
        # The stream that was open during the forks goes on, and nothing of the parent's was deleted.
        sandbox.write_file("/tmp/done", "")
        reader.join(110)
        print("".join(streamed).split(), stream.result.ok)
        print(sandbox.exec("echo parent").stdout.strip())
"""

ASYNC = """
import asyncio, os, sys
from orchard import AsyncSandboxClient

async def child(client, sandbox_id):
    sandbox = client.attach(sandbox_id)
    result = await sandbox.exec("echo child", concurrent=True)
    async with client.create() as own:
        return result.stdout == "child\\n" and (await own.exec("true")).ok

async def main():
    async with AsyncSandboxClient() as client, client.create() as sandbox:
        running = asyncio.create_task(sandbox.exec("until test -e /tmp/done; do sleep 0.02; done; echo end"))
        await sandbox.exec("true", concurrent=True)
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = 0 if asyncio.run(child(client, sandbox.sandbox_id)) else 2
                finally:
                    os._exit(code)
            print(os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]))
        await sandbox.write_file("/tmp/done", "")
        print((await running).stdout.strip())

asyncio.run(main())
"""

LEAVES = """
import os, sys
from orchard import SandboxClient
with SandboxClient() as client, client.create() as sandbox:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # through the blocks and the end of the program: the sandbox is the parent's
    os.waitpid(pid, 0)
    print(sandbox.exec("echo still here").stdout.strip())
"""


def run(program: Program, source: str) -> list[str]:
    out, err = program(source).communicate(timeout=100)
    assert err == ""
    return out.splitlines()


def test_synchronous_client_in_forked_workers(program: Program, client: SandboxClient) -> None:
    assert run(program, SYNC) == [
        "[(0, '0', True), (1, '1', True), (2, '2', True)]",
        "[0, 0, 0]",
        "['first', 'last'] True",
        "parent",
    ]


def test_asynchronous_client_after_a_fork_within_the_loop(program: Program) -> None:
    assert run(program, ASYNC) == ["0", "0", "end"]


def test_a_child_that_leaves_the_block_deletes_nothing_of_the_parent(program: Program) -> None:
    assert run(program, LEAVES) == ["still here"]


def test_nothing_is_left(client: SandboxClient) -> None:
    living = [info for info in client.list(labels={"test": "fork"}) if info.state is SandboxState.READY]
    assert living == []
