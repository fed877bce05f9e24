"""A daemon that cannot have an engine says why, and what to do."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.local_node.harness import PATIENCE, NodeProcess
from tests.support.engine import TestEngine
from tests.support.platform import PlatformProcess


async def refusal(node: NodeProcess) -> str:
    """What a daemon says that does not start."""
    node.spawn()
    assert node.process is not None
    assert await asyncio.to_thread(node.process.wait, PATIENCE) == 2, node.log()
    return node.log()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"DOCKER_HOST": "tcp://127.0.0.1:2375"}, ("DOCKER_HOST is 'tcp://127.0.0.1:2375'", "unix:///")),
        ({"DOCKER_HOST": "unix://relative"}, ("DOCKER_HOST is", "unix:///")),
        ({"ORCHARD_PAYLOAD_FOLDER": "/nonexistent"}, ("/nonexistent", "make payload")),
        ({"DOCKER_HOST": "unix:///nonexistent.sock"}, ("no engine answers at /nonexistent.sock", "start it")),
        ({"ORCHARD_RUNTIME": "podman"}, ("ORCHARD_RUNTIME", "'process' or 'docker'")),
    ],
)
async def test_what_is_wrong_is_named_with_its_fix(
    make_node: Callable[..., NodeProcess], settings: dict[str, str], words: tuple[str, str]
) -> None:
    said = await refusal(make_node(**settings))
    assert all(word in said for word in words), said
    assert "Traceback" not in said


async def test_a_user_who_may_not_use_the_socket_is_told_of_its_group(
    make_node: Callable[..., NodeProcess], engine: TestEngine
) -> None:
    engine.folder.chmod(0o755)
    said = await refusal(make_node(user=65533))
    assert "may not use the engine's socket" in said and "usermod -aG docker" in said


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"ORCHARD_RUNTIME": "kubernetes"}, "knows process and docker"),
        (
            ("--runtime", "docker"),
            {"DOCKER_HOST": "unix:///nonexistent.sock"},
            "no engine answers at /nonexistent.sock",
        ),
    ],
)
def test_orchard_up_says_so_and_ends(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    platform = PlatformProcess(tmp_path, environment=environment)
    os.close(platform.launch(*arguments))
    assert platform.wait_end() == 1
    assert words in platform.output() and "Traceback" not in platform.output()
    platform.wait_nothing_left()
