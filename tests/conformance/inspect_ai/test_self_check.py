"""Inspect's own suite of what a sandbox provider must do."""

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403


@pytest.fixture
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    # As Inspect finds it: by its entry point.
    provider = registry_find_sandboxenv("orchard")
    # Not root, whom no permission of a file stops.
    config = provider.config_deserialize({"user": "nobody", "working_directory": "/var/tmp/sample"})
    environments = await provider.sample_init("self check", config, {})
    yield environments["default"]
    await provider.sample_cleanup("self check", config, environments, False)
