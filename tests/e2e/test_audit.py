"""The audit log of the whole platform, a killed gateway included."""

import json
import subprocess
import sys

import orchard
import pytest
from orchard import SandboxClient

from tests.support.platform import PlatformProcess, wait_until

METHOD = "orchard.sandbox.v1.SandboxService/"
BACKSTOP = 110


def audit(platform: PlatformProcess, *arguments: str) -> list[dict[str, str]]:
    run = subprocess.run(
        [sys.executable, "-m", "orchard._cli.main", "audit", "--json", *arguments],
        env=platform.client_environment(),
        capture_output=True,
        timeout=BACKSTOP,
    )
    assert run.returncode == 0, run.stderr
    return list(json.loads(run.stdout))


def test_who_made_and_ended_a_sandbox_can_be_told(platform: PlatformProcess) -> None:
    with SandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        made = client.keys.create("audited", name="reader", scopes=["sandboxes:read"])
        with client.create(detach=True) as sandbox:
            sandbox.exec("true")
        with (
            SandboxClient(platform.endpoint, api_key=made.secret) as reader,
            pytest.raises(orchard.PermissionDenied, match="sandboxes:write"),
        ):
            reader.create(sandbox_id="not-mine")
        client.get(sandbox.sandbox_id).delete()
        client.keys.revoke(made.key.key_id)
    wait_until(lambda: len(audit(platform, "--target", made.key.key_id)) == 2, "both changes of the key")
    of_sandbox = audit(platform, "--target", sandbox.sandbox_id)
    assert [entry["method"] for entry in of_sandbox] == [METHOD + "DeleteSandbox", METHOD + "CreateSandbox"]
    assert {entry["key_id"] for entry in of_sandbox} == {platform.api_key.split("_")[1]}
    assert {entry["client_address"] for entry in of_sandbox} == {"127.0.0.1"}
    (denied,) = audit(platform, "--tenant", "audited", "--status", "permission_denied")
    assert (denied["key_id"], denied["method"]) == (made.key.key_id, METHOD + "CreateSandbox")
    # Commands have none, unless the deployment asks for them.
    assert audit(platform, "--method", "StartExec") == []


def test_a_killed_gateway_loses_no_more_than_its_last_batch(platform: PlatformProcess) -> None:
    made: list[str] = []
    with SandboxClient(platform.endpoint, api_key=platform.api_key) as client:

        def make() -> None:
            made.append(client.keys.create("killed", scopes=["exec"]).key.key_id)

        def written() -> set[str]:
            return {entry.target for entry in client.audit(method="CreateKey")} & set(made)

        make()
        wait_until(lambda: bool(make() or written()), "the first batch to be written")
        for _ in range(20):
            make()
        before = written()
        killed = platform.kill_service("gateway")
        platform.wait_ready("gateway", not_pid=killed)
        after = written()
    assert before <= after
    # What is missing is the end alone: what came behind the last batch.
    assert sorted(after, key=made.index) == made[: len(after)]
