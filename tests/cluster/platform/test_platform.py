"""The platform as Pods: by the SDK, through an upgrade, and by the tests of tests/e2e that ask nothing of `orchard up`.

Of those are left out the ones whose limits fit sandboxes that start in milliseconds, and those that kill processes.
One module, since its platform's scheduler ends every sandbox that is not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from orchard import AsyncSandboxClient, Judgement, Network, NotFound, SandboxClient, Step

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.cluster.platform.conftest import Platform, wait_available
from tests.e2e.test_bad_input import (  # noqa: F401 (tests)
    test_a_patch_that_does_not_apply_says_which_hunk_and_why,
    test_a_patch_that_leaves_its_target,
    test_a_repeated_exec_id_with_another_spec,
    test_an_oversized_message_is_refused,
    test_bad_commands,
    test_bad_exec_ids,
    test_bad_paths,
    test_bad_sandbox_ids,
    test_calls_without_a_valid_key,
    test_commands_that_cannot_start,
    test_internal_services_cannot_be_reached,
    test_what_is_no_message_at_all,
)
from tests.e2e.test_channelz import test_of_the_gateway_for_admins_alone  # noqa: F401 (a test)
from tests.e2e.test_grpcurl import (  # noqa: F401 (tests and their fixture)
    grpcurl,
    test_health_needs_no_key,
    test_reflection_lists_and_describes_every_public_service,
)
from tests.e2e.test_judge import (  # noqa: F401 (tests)
    test_a_batch_goes_on_where_it_was_and_its_verdicts_are_calibrated,
    test_a_key_needs_the_scope,
    test_a_trajectory_is_judged_and_keeps_its_verdict,
    test_a_value_curve_becomes_values_of_steps,
    test_an_iterator_that_fails_ends_its_batch_with_its_own_error,
    test_another_tenant_sees_nothing,
    test_bad_input_names_its_field,
    test_each_kind,
    test_items_may_be_made_with_the_client_itself,
)
from tests.e2e.test_reused_ids import (  # noqa: F401 (tests)
    test_every_sandbox_of_an_id_gets_its_own_secret,
    test_what_was_deleted_is_used_no_longer,
)
from tests.e2e.test_sandboxes import (  # noqa: F401 (tests)
    test_a_repeated_create_makes_one_sandbox,
    test_a_sandbox_from_create_to_delete,
    test_an_id_that_lives_is_taken,
    test_lists_filter_and_page,
    test_one_deleted_while_it_is_made_leaves_nothing,
    test_other_tenants_see_nothing,
    test_sandboxes_do_not_see_each_other,
    test_usage_is_added_up,
)
from tests.support.health import NOT_SERVING, SERVING, wait_health
from tests.support.testbed import NAMESPACE
from tests.support.wire import Wire

BACKSTOP = 110


@pytest.fixture(scope="module")
def sandbox(platform: Platform) -> Iterator[str]:
    """One for all tests of what is refused: nothing that they do changes it."""
    with SandboxClient(platform.endpoint, api_key=platform.api_key) as client, client.create(image=BUSYBOX) as sandbox:
        yield sandbox.sandbox_id


def client_of(platform: Platform) -> SandboxClient:
    return SandboxClient(platform.endpoint, api_key=platform.api_key)


def test_create_exec_upload_download_delete(platform: Platform, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_bytes(bytes(range(256)) * 1024)
    with client_of(platform) as client:
        with client.create(image=BUSYBOX, env={"GREETING": "hello"}) as sandbox:
            sandbox.upload(source, "/work")
            result = sandbox.exec("echo $GREETING; sha256sum <deep/file | cut -c1-8", cwd="/work", check=True)
            assert result.output.split() == ["hello", "2312394b"]
            sandbox.download("/work", back)
            pod = pods.pod_name("team", sandbox.sandbox_id)
            assert platform.testbed.get("-n", NAMESPACE, "pod", pod)["status"]["phase"] == "Running"
        platform.testbed.kubectl("-n", NAMESPACE, "wait", "--for=delete", f"pod/{pod}", "--timeout=110s")
    assert (back / "deep/file").read_bytes() == (source / "deep/file").read_bytes()


async def test_a_port_of_a_sandbox_is_one_here(client: AsyncSandboxClient) -> None:
    async with await client.create(BUSYBOX, network=Network.NONE) as sandbox:
        await sandbox.write_file("/srv/hello", b"hello")
        await sandbox.start("httpd -f -p 8080 -h /srv")
        async with sandbox.forward(8080, wait=BACKSTOP) as address, aiohttp.ClientSession(address.url) as session:
            for _ in range(3):
                async with session.get("/hello") as response:
                    assert (response.status, await response.read()) == (200, b"hello")


async def test_trajectories_are_kept_found_and_told(client: AsyncSandboxClient) -> None:
    """Recorded with what a sandbox did, while somebody follows; then packed, listed, exported and deleted."""
    name, label = f"t-{secrets.token_hex(6)}", secrets.token_hex(6)
    async with (
        await client.create(BUSYBOX) as sandbox,
        client.record("task", sandbox=sandbox, trajectory_id=name, labels={"run": label}) as recording,
    ):
        recording.add(Step.user("Say hello."))
        await sandbox.exec("echo hello")
    steps = [step async for step in client.trajectories.follow(name)]
    assert steps[0].text == "Say hello."
    assert "hello" in steps[-1].text
    listed = [one async for one in client.trajectories.list(labels={"run": label})]
    assert [(one.trajectory_id, one.totals.steps) for one in listed] == [(name, len(steps))]
    await client.trajectories.delete(labels={"run": label})
    with pytest.raises(NotFound):
        await client.trajectories.get(name)


async def test_who_did_what_can_be_told(platform: Platform, client: AsyncSandboxClient) -> None:
    key = await client.keys.create("team", name="to be revoked", scopes=["exec"], ttl=3600)
    await client.keys.revoke(key.key.key_id)
    async with asyncio.timeout(BACKSTOP):
        # Entries are written in batches, a moment later.
        while len(found := [entry async for entry in client.audit(target=key.key.key_id)]) < 2:
            await asyncio.sleep(0.1)
    assert [entry.method.rpartition("/")[2] for entry in found] == ["RevokeKey", "CreateKey"]
    assert {(entry.key_id, entry.status) for entry in found} == {(platform.api_key.split("_")[1], "OK")}


def test_a_network_profile_is_the_specs(platform: Platform) -> None:
    fetch = "until timeout 5 wget -q -O - http://any.example/health; do sleep 0.1; done"
    with client_of(platform) as client, client.create(image=BUSYBOX, network=Network.OPEN) as sandbox:
        assert sandbox.exec(fetch, timeout=60, check=True).output == "OK"


def test_a_judge_judges(platform: Platform) -> None:
    """The scripted one, which needs no model: through the gateway, with its answer kept."""
    steps = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    with client_of(platform) as client:
        verdict = client.judge.run(Judgement("outcome", "Add the numbers.", steps))
        assert verdict.value in (0.0, 1.0), verdict
        assert client.judge.answer(verdict.votes[0].answers[0])


def test_images_know_the_authorities_of_the_web(platform: Platform) -> None:
    count = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'])"
    for name in ("gateway", "trajectories", "judge"):
        found = platform.kubectl("exec", f"deployment/{name}", "-c", name, "--", "python3", "-c", count)
        assert int(found) > 50


@pytest.mark.timeout(600, func_only=True)
async def test_gateways_stay_in_their_service_while_postgresql_stands_still(platform: Platform, wire: Wire) -> None:
    sandbox = await wire.ready()
    with paused(platform, "postgres"):
        await wait_health(platform.endpoint, NOT_SERVING, seconds=120)
        # Its readiness is its health, and the kubelet asks both as often.
        unready = ("wait", "--for=condition=Ready=false", "pod", "-l", "app.kubernetes.io/component=trajectories")
        await asyncio.to_thread(platform.kubectl, *unready, "--timeout=110s")
        (gateway,) = json.loads(
            platform.kubectl("get", "pods", "-l", "app.kubernetes.io/component=gateway", "-o", "json")
        )["items"]
        assert {one["type"]: one["status"] for one in gateway["status"]["conditions"]}["Ready"] == "True"
        assert await wire.output(sandbox, "echo on") == b"on\n"
    await wait_health(platform.endpoint, SERVING, seconds=120)
    await wire.delete(sandbox)


@contextlib.contextmanager
def paused(platform: Platform, component: str) -> Iterator[None]:
    """Every process of a Pod stands still."""
    listed = json.loads(platform.kubectl("get", "pods", "-l", f"app.kubernetes.io/component={component}", "-o", "json"))
    (uid,) = (pod["metadata"]["uid"] for pod in listed["items"])
    groups = {file: file.read_text() for file in Path("/proc").glob("[0-9]*/cgroup")}
    pids = [int(file.parent.name) for file, groups_of in groups.items() if uid in groups_of]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(600, func_only=True)
def test_commands_outlive_an_upgrade_of_every_service(platform: Platform, tmp_path: Path) -> None:
    """Each Pod of the services is replaced while a command runs and is read: it runs once, and no byte is lost."""
    with client_of(platform) as client, client.create(image=BUSYBOX) as sandbox:
        script = "echo started >>/runs; n=0; until [ -e /end ]; do n=$((n + 1)); echo $n; sleep 0.05; done; cat /runs"
        read: list[str] = []

        def follow() -> None:
            for chunk in sandbox.exec_stream(script):
                read.append(chunk.text)

        following = threading.Thread(target=follow)
        following.start()
        before = names_of(platform)
        for name in ("watcher", "scheduler", "trajectories", "judge", "gateway"):
            platform.kubectl("rollout", "restart", f"deployment/{name}")
        wait_available(platform.testbed)
        for name in before:
            platform.kubectl("wait", "--for=delete", f"pod/{name}", "--timeout=110s")
        sandbox.write_file("/end", b"")
        following.join(110)
        assert not following.is_alive()
        *numbers, last = "".join(read).split()
        assert numbers == [str(n + 1) for n in range(len(numbers))]
        assert last == "started"
        with client.create(image=BUSYBOX) as another:
            assert another.exec("echo on", check=True).output == "on\n"


def names_of(platform: Platform) -> list[str]:
    selected = "app.kubernetes.io/component in (gateway, scheduler, watcher, trajectories, judge)"
    listed = json.loads(platform.kubectl("get", "pods", "-l", selected, "-o", "json"))
    return [pod["metadata"]["name"] for pod in listed["items"]]
