"""`orchard forward` and `orchard expose`, as a user runs them."""

from __future__ import annotations

import functools
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import orchard
import pytest

from tests.support.platform import PlatformProcess, running_platform
from tests.support.programs import programs

BACKSTOP = 110.0
SERVER = Path(__file__).parents[1] / "support" / "port_server.py"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    environment = {"ORCHARD_GATEWAY_ENDPOINTS": "llm=127.0.0.1:9"}
    with running_platform(tmp_path_factory.mktemp("ports"), environment=environment) as platform:
        yield platform


@pytest.fixture
def sandbox(platform: PlatformProcess) -> Iterator[orchard.Sandbox]:
    """One that serves HTTP at 80, and has no network."""
    with (
        orchard.SandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client,
        client.create(network="none") as sandbox,
    ):
        sandbox.write_file("/srv/port_server.py", SERVER.read_bytes())
        process = sandbox.start(["python3", "/srv/port_server.py", "http", "80"])
        assert next(process.output()).text == "listening\n"
        yield sandbox


@pytest.fixture
def start(platform: PlatformProcess) -> Iterator[Start]:
    """Starts the command line."""
    with programs(platform.client_environment()) as start:
        yield functools.partial(start, "-m", "orchard._cli.main")


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def told_by(process: subprocess.Popen[str]) -> str:
    """The next line of what it says beside its output."""
    assert process.stderr is not None
    return process.stderr.readline().strip()


def rest_after_ctrl_c(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What is still to be read of its output, and of what it says beside that, once it has ended."""
    assert process.stdout is not None and process.stderr is not None
    process.send_signal(signal.SIGINT)
    process.wait(BACKSTOP)
    return process.stdout.read(), process.stderr.read()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=BACKSTOP) as response:
        return bytes(response.read())


def test_ports_until_ctrl_c(start: Start, sandbox: orchard.Sandbox) -> None:
    process = start("forward", sandbox.sandbox_id, ":80", ":81", "-v")
    lines = [line_of(process), line_of(process)]
    addresses = [line.removesuffix(f" -> {port}") for line, port in zip(lines, (80, 81), strict=True)]
    assert all(address.startswith("127.0.0.1:") for address in addresses), lines
    assert get(f"http://{addresses[0]}/hello") == b"/hello"
    assert told_by(process) == "connection 1 to 80: opened"
    assert told_by(process).startswith("connection 1 to 80: ended, ")
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(f"http://{addresses[1]}/")
    told = told_by(process)
    assert told.startswith("connection 1 to 81: broken: nothing listens on port 81") and "[PORT_REFUSED]" in told
    assert rest_after_ctrl_c(process) == ("", "")
    assert process.returncode == 130


def test_failures_are_told_once_without_being_asked(start: Start, sandbox: orchard.Sandbox) -> None:
    process = start("forward", sandbox.sandbox_id, ":81", "--json")
    (address,) = json.loads(line_of(process))
    assert (address["host"], address["sandbox_port"]) == ("127.0.0.1", 81)
    for number in range(2):
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(f"http://127.0.0.1:{address['port']}/")
        if number == 0:
            assert "nothing listens on port 81" in told_by(process)
    assert rest_after_ctrl_c(process)[1] == ""


def test_a_local_port_that_is_taken_is_named(start: Start, sandbox: orchard.Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("forward", sandbox.sandbox_id, f"{port}:80")
        out, err = process.communicate(timeout=BACKSTOP)
    assert (process.returncode, out) == (1, "")
    assert err == (
        f"orchard: port {port} of this machine (127.0.0.1) is taken; choose another, or 0 for a free one "
        "[LOCAL_PORT_IN_USE]\n"
    )


def test_it_ends_with_the_sandbox(start: Start, sandbox: orchard.Sandbox) -> None:
    process = start("forward", sandbox.sandbox_id, ":80")
    assert line_of(process).endswith(" -> 80")
    sandbox.delete()
    _out, err = process.communicate(timeout=BACKSTOP)
    assert process.returncode == 1 and f"sandbox {sandbox.sandbox_id} has ended" in err
    again = start("forward", sandbox.sandbox_id, ":80")
    out, err = again.communicate(timeout=BACKSTOP)
    assert (again.returncode, out) == (1, "") and "has ended" in err


@pytest.mark.parametrize("port", ["http", "80:http", "1:2:3", "0", "70000", "70000:80"])
def test_what_is_no_port_is_named(start: Start, port: str) -> None:
    process = start("forward", "any", port)
    _out, err = process.communicate(timeout=BACKSTOP)
    assert process.returncode == 2 and "port" in err.lower()


def test_endpoints_until_ctrl_c(start: Start, sandbox: orchard.Sandbox) -> None:
    process = start("expose", sandbox.sandbox_id, "llm:8000", "llm")
    assert line_of(process) == "llm -> 127.0.0.1:8000"
    port = int(line_of(process).removeprefix("llm -> 127.0.0.1:"))
    listening = sandbox.exec("cat /proc/net/tcp").stdout
    assert f"0100007F:{8000:04X}" in listening and f"0100007F:{port:04X}" in listening
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=BACKSTOP)
    assert (process.returncode, out, err) == (130, "", "")
    unknown = start("expose", sandbox.sandbox_id, "search")
    _out, err = unknown.communicate(timeout=BACKSTOP)
    assert unknown.returncode == 1 and "there is no endpoint 'search': there are llm" in err
