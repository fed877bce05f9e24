"""The agent, but its rehearsal fails."""

from pathlib import Path

from services.exec_agent.app import AgentConfig, preload, run

__all__ = ["AgentConfig", "preload", "rehearse", "run"]


def rehearse(folder: Path) -> None:
    raise RuntimeError(f"no rehearsal in {folder}")
