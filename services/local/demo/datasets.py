"""Small data sets of one run of the demo: conversations to imitate, and groups with rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orchard
from orchard.data import codec
from orchard.data.export import export
from orchard.data.options import ExportOptions
from orchard.data.server import ServerSource

from services.local.demo.rollouts import LABEL

# A candidate that prints megabytes teaches nobody.
_OPTIONS: Final = ExportOptions(max_tokens=32_768)


@dataclass(frozen=True, slots=True)
class Datasets:
    """What was written.

    Attributes:
        conversations: JSONL, a resolved run a line: messages in OpenAI's form, and which of them have loss.
        groups: JSONL, a task a line: rewards and advantages of its attempts.
        counts: lines of each.
    """

    conversations: Path
    groups: Path
    counts: tuple[int, int]


def write_datasets(connection: Mapping[str, Any], run: str, folder: Path) -> Datasets:
    """Export what a run of the demo kept.

    Args:
        connection: endpoint and api_key of the platform; empty: as the connection profile says.
        run: its name, the label of its trajectories.
        folder: where to.

    Raises:
        OrchardError: it cannot be read.
        OSError: it cannot be written.
    """
    with orchard.SandboxClient(**connection) as client:
        source = ServerSource(client, {"labels": {LABEL: run}})
        sft, groups = (
            export(source, codec(name), folder / file, _OPTIONS, overwrite=True, restart=True)
            for name, file in (("sft", "sft.jsonl"), ("grpo", "groups.jsonl"))
        )
    return Datasets(sft.output, groups.output, (sft.rows, groups.rows))
