"""The agent, but its rehearsal leaves a thread: what is forked from such a process cannot join a sandbox."""

import threading
from pathlib import Path

from services.exec_agent.app import AgentConfig, preload, run

__all__ = ["AgentConfig", "preload", "rehearse", "run"]


def rehearse(folder: Path) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
