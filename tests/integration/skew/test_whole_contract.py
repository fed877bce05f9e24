"""The calls that the oldest agent lacks, between this build and the one before it, both ways."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from orchard import AsyncSandbox

from tests.integration.client.test_stdin import (  # noqa: F401 (these are the tests)
    test_a_program_is_talked_to,
    test_a_terminal_is_typed_into_and_resized,
    test_another_client_goes_on_where_the_first_one_was,
    test_long_input_goes_in_while_output_comes_out,
    test_long_input_need_not_be_read,
    test_what_is_written_too_late_is_an_error,
    test_writes_that_are_asked_for_together_keep_their_order,
)
from tests.integration.skew.conftest import BACKSTOP, PREVIOUS_AGENT, PREVIOUS_GATEWAY, only

pytestmark = only(PREVIOUS_AGENT, PREVIOUS_GATEWAY)

OLD_CLIENT = """
import sys, orchard
endpoint, key, sandbox_id, tree = sys.argv[1:]
assert orchard.__file__.startswith(tree), orchard.__file__
with orchard.SandboxClient(endpoint, api_key=key) as client:
    sandbox = client.attach(sandbox_id)
    assert sandbox.exec("echo out; echo err >&2; exit 3").exit_code == 3
    assert sandbox.exec("wc -c", input=bytes(3 << 20)).stdout.strip() == str(3 << 20)
    assert b"".join(chunk.data for chunk in sandbox.exec_stream("seq 9")) == b"1\\n2\\n3\\n4\\n5\\n6\\n7\\n8\\n9\\n"
    with sandbox.start("cat", stdin=True) as process:
        process.write("in")
        process.close_stdin()
        assert process.wait().stdout == "in"
    with sandbox.start("sleep 600", concurrent=False) as first:
        second = sandbox.start("cat", stdin=True, concurrent=False)
        second.write("queued")
        second.close_stdin()
        first.cancel()
        assert second.wait().stdout == "queued"
    sandbox.write_file("/tmp/old-client", bytes(2 << 20))
    assert sandbox.read_file("/tmp/old-client") == bytes(2 << 20)
    sandbox.write_file("/tmp/patched", "old\\n")
    assert sandbox.apply_patch("--- a/patched\\n+++ b/patched\\n@@ -1 +1 @@\\n-old\\n+new\\n", path="/tmp").applied
    assert sandbox.read_text("/tmp/patched") == "new\\n"
    sandbox.move("/tmp/patched", "/tmp/moved")
    try:
        sandbox.exec("x", cwd="/missing")
    except orchard.CommandNotStarted as error:
        assert error.reason == "CWD_NOT_FOUND"
print("done")
"""


@pytest.mark.usefixtures("sandbox")
def test_the_client_of_the_earlier_build_works_too(gateway: tuple[str, str], old_tree: Path) -> None:
    source = old_tree / "clients/python/src"
    done = subprocess.run(
        [sys.executable, "-c", OLD_CLIENT, *gateway, "old", str(source)],
        env={"PYTHONPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=BACKSTOP,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


async def test_ports_are_reached(asandbox: AsyncSandbox) -> None:
    server = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    server += "c, _ = s.accept(); c.sendall(c.recv(9).upper()); c.close()"
    async with await asandbox.start([sys.executable, "-c", server]) as process:
        port = int((await anext(process.output())).data)
        async with asandbox.forward(port) as address:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"hello")
            assert await reader.read() == b"HELLO"
            writer.close()
