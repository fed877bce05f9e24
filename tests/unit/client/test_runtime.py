"""The SDK's copy of gRPC's core is loaded with settings of its own, and leaves no trace of them."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os
before = dict(os.environ)
import orchard
orchard.SandboxClient
from orchard._client import transport
print(dict(os.environ) == before)
"""


def load(**environment: str) -> tuple[str, str]:
    """What a program that loads the SDK prints, and what gRPC complains about."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | environment, capture_output=True, text=True, check=True, timeout=110
    )
    return done.stdout.strip(), done.stderr


def test_the_environment_stays_as_it_was_and_the_core_knows_every_setting() -> None:
    assert load() == ("True", "")


def test_experiments_of_the_users_own_win() -> None:
    unchanged, complaints = load(GRPC_EXPERIMENTS="the_users_own", GRPC_ENABLE_FORK_SUPPORT="1")

    assert unchanged == "True"
    assert "Unknown experiment: the_users_own" in complaints
    assert complaints.count("Unknown experiment") == 1
