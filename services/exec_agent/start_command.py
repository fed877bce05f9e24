"""The command that a sandbox was created with: it runs beside all others, under an id of its own."""

from __future__ import annotations

from typing import Final

from services.exec_agent.model import DEFAULT_RETAINED, Command

START_EXEC_ID: Final = "start"
_KILL_GRACE_SECONDS: Final = 5.0


def start_command(argv: tuple[str, ...]) -> Command:
    """The command of a sandbox's `start_argv`."""
    return Command(
        spec_hash="start",
        argv=argv,
        env={},
        timeout=None,
        queue_timeout=None,
        concurrent=True,
        retained_limit=DEFAULT_RETAINED,
        kill_grace=_KILL_GRACE_SECONDS,
    )
