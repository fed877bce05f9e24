"""Where the launcher could not be built, Python processes do its work: the same tests, and what is told of it."""

# ruff: noqa: F401, F403 (the tests of other modules run here with another agent)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from orchard.exec.v1 import agent_service_pb2

from services.exec_agent.launcher import GAP
from tests.integration.exec_agent.conftest import SANDBOX, AgentProcess, Client, new_agent
from tests.integration.exec_agent.test_agent import (
    test_a_command_whose_reaper_is_killed_is_reported_and_dies,
    test_a_stopped_reaper_does_not_hold_a_timeout_up,
    test_a_terminated_agent_ends_cleanly_with_its_commands,
    test_the_launcher_may_be_killed,
    test_the_start_command_is_an_exec,
)
from tests.integration.exec_agent.test_attached import *
from tests.integration.exec_agent.test_commands import *
from tests.integration.exec_agent.test_ends import *
from tests.integration.exec_agent.test_output import *
from tests.integration.exec_agent.test_queue import *
from tests.integration.exec_agent.test_restarts import (
    test_a_killed_agent_runs_nothing_twice,
    test_commands_that_ran_end_with_what_they_had_written,
)
from tests.integration.exec_agent.test_stdin import *
from tests.integration.exec_agent.test_terminals import *

NOWHERE = {"ORCHARD_LAUNCHER": "/nowhere/launcher"}


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[AgentProcess]:
    with new_agent(**NOWHERE) as agent:
        yield agent


@pytest.fixture
def make_agent() -> Iterator[Callable[..., AgentProcess]]:
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(new_agent(**NOWHERE, **settings))


async def test_it_says_what_is_missing(client: Client) -> None:
    answer = await client.agent.GetAgent(
        agent_service_pb2.GetAgentRequest(sandbox_id=SANDBOX), metadata=client.metadata, timeout=110
    )
    assert list(answer.gaps) == [GAP]
    assert "scripts/build-launcher" in GAP
