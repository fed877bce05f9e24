"""A real grpcurl: reflection, and calls as an operator makes them."""

import base64
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.platform import ROOT, PlatformProcess

BUILT = ROOT / "build" / "grpcurl"


@pytest.fixture(scope="module")
def grpcurl() -> str:
    found = str(BUILT) if BUILT.exists() else shutil.which("grpcurl")
    assert found, "grpcurl is missing: run scripts/grpcurl (needs Go)"
    return found


def call(grpcurl: str, platform: PlatformProcess, *arguments: str, key: bool = True) -> str:
    header = ["-H", f"authorization: Bearer {platform.api_key}"] if key else []
    done = subprocess.run([grpcurl, "-plaintext", *header, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reflection_lists_and_describes_every_public_service(grpcurl: str, platform: PlatformProcess) -> None:
    listed = call(grpcurl, platform, platform.endpoint, "list", key=False).split()
    for area, services in {
        "sandbox": ["SandboxService"],
        "exec": ["ExecService", "FileService", "PortService", "EndpointService"],
        "admin": ["KeyService", "ImageService", "UsageService", "VersionService"],
    }.items():
        for service in services:
            assert f"orchard.{area}.v1.{service}" in listed
    assert "orchard.exec.v1.AgentService" not in listed
    described = call(grpcurl, platform, platform.endpoint, "describe", "orchard.exec.v1.ExecService", key=False)
    assert "StartExecRequest" in described


def test_a_sandbox_from_the_shell(grpcurl: str, platform: PlatformProcess) -> None:
    def invoke(method: str, request: dict) -> dict:
        return json.loads(call(grpcurl, platform, "-d", json.dumps(request), platform.endpoint, method))

    invoke("orchard.sandbox.v1.SandboxService/CreateSandbox", {"sandbox_id": "from-grpcurl"})
    waited = call(
        grpcurl,
        platform,
        "-d",
        '{"sandbox_id": "from-grpcurl"}',
        platform.endpoint,
        "orchard.sandbox.v1.SandboxService/WaitSandbox",
    )
    assert "SANDBOX_STATE_READY" in waited
    request = {"sandbox_id": "from-grpcurl", "exec_id": "e1", "spec": {"shell": "echo hello"}, "wait": "10s"}
    reply = invoke("orchard.exec.v1.ExecService/StartExec", request)
    assert base64.b64decode(reply["output"][0]["data"]) == b"hello\n"
    invoke("orchard.sandbox.v1.SandboxService/DeleteSandbox", {"sandbox_id": "from-grpcurl"})


def test_a_verdict_from_the_shell(grpcurl: str, platform: PlatformProcess) -> None:
    """The example of docs/debugging.md."""
    example = next(
        line for line in (ROOT / "docs" / "debugging.md").read_text().splitlines() if '"JUDGEMENT_KIND_' in line
    )
    request = shlex.split(example.strip().removesuffix("\\"))[2]
    reply = json.loads(
        call(grpcurl, platform, "-d", request, platform.endpoint, "orchard.judge.v1.JudgeService/JudgeWhole")
    )
    assert reply["verdict"]["verdict_id"].startswith("vd-")
    assert reply["verdict"]["state"].startswith("VERDICT_STATE_")


def test_health_needs_no_key(grpcurl: str, platform: PlatformProcess) -> None:
    assert json.loads(call(grpcurl, platform, platform.endpoint, "grpc.health.v1.Health/Check", key=False)) == {
        "status": "SERVING"
    }


@pytest.mark.parametrize("service", ["scheduler", "watcher", "trajectories", "judge", "node"])
def test_internal_services_answer_on_their_sockets(grpcurl: str, platform: PlatformProcess, service: str) -> None:
    socket = Path(platform.run, f"{service}.sock")
    listed = subprocess.run(
        [grpcurl, "-plaintext", f"unix://{socket}", "list"], capture_output=True, text=True, timeout=110
    )
    assert "orchard." in listed.stdout, listed.stderr
