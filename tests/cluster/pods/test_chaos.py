"""What may be killed on a cluster: no sandbox dies or is left over, no command runs twice, no byte is lost.

A round each by default; `make chaos` makes it twenty, in an order that its seed gives.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import AsyncIterator

import orchard
import pytest

from services.common import pods
from tests.cluster.pods.faults import API_SERVER, CHOSEN, KINDS, Fault, gateway
from tests.cluster.pods.load import RIGHT_SECONDS, Command, Load
from tests.support.pod_platform import TENANT, PodPlatform
from tests.support.testbed import NAMESPACE

ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 if ROUNDS == 1 else 7200, func_only=True)]


@pytest.fixture(scope="module")
def steady() -> dict[str, str]:
    """Sandboxes that live through every test of this module; their uids, by id."""
    return {}


@pytest.fixture
async def load(
    platform: PodPlatform, client: orchard.AsyncSandboxClient, steady: dict[str, str]
) -> AsyncIterator[Load]:
    yield Load(platform, client, steady)


@pytest.mark.parametrize("fault", CHOSEN)
async def test_a_fault_under_load(platform: PodPlatform, load: Load, fault: Fault) -> None:
    rng = random.Random(f"{SEED} {fault.__name__}")
    for number in range(ROUNDS):
        await load.begin()
        victim = await load.create() if fault in API_SERVER else None
        async with fault(platform, rng):
            load.go_on()
            if fault is not gateway:
                await load.commands_answer()
        await platform.serving()
        right = ""
        if victim is not None:
            # From when it answers again; what follows waits for the cluster's own parts too, which ask less often.
            seconds = await load.records_right(victim)
            right = f"records after {seconds:.1f} s, all "
            assert seconds < 4 * RIGHT_SECONDS  # what it takes on a quiet machine is printed
        print(f"{fault.__name__}, round {number + 1}: {right}right after {await load.ends_well():.1f} s")


@pytest.mark.full
async def test_two_faults_at_once(platform: PodPlatform, load: Load) -> None:
    rng = random.Random(SEED)
    for number in range(ROUNDS):
        faults = [rng.choice(kind) for kind in rng.sample(KINDS, 2)]
        await load.begin()
        async with contextlib.AsyncExitStack() as stack:
            for fault in faults:
                await stack.enter_async_context(fault(platform, rng))
            load.go_on()
        await platform.serving()
        names = " and ".join(fault.__name__ for fault in faults)
        print(f"{names}, round {number + 1}: right after {await load.ends_well():.1f} s")


async def test_a_pod_that_is_deleted_by_hand(platform: PodPlatform, load: Load) -> None:
    for number in range(ROUNDS):
        # By turns: the suite of all runtimes has the one without force too.
        force = ["--force", "--grace-period=0"] if number % 2 == 0 else []
        await load.begin()
        victim = await load.create()
        command = Command(victim)
        await command.writes()
        load.go_on()
        pod = pods.pod_name(TENANT, victim.sandbox_id)
        platform.testbed.kubectl("-n", NAMESPACE, "delete", "pod", pod, "--wait=false", *force)
        ended = await victim.wait_ended(120)
        assert (ended.state, ended.reason) == (orchard.SandboxState.FAILED, "DELETED_EXTERNALLY")
        # What became of the sandbox is no result of the command.
        assert isinstance(await command.interrupted(), orchard.SandboxLost)
        print(f"a Pod deleted by hand, round {number + 1}: right after {await load.ends_well():.1f} s")
        with pytest.raises(orchard.SandboxLost):
            await victim.exec(f"echo {secrets.token_hex(2)}")


async def test_at_the_end_nothing_is_left(load: Load) -> None:
    await load.close()
