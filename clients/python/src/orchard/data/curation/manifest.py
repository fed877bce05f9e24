"""Datasets: a curation, written, with a manifest by which it can be made again exactly.

A dataset is the output itself, `NAME.manifest.json` (the plan, the hashes of what was chosen and of what was written)
and `NAME.report.jsonl` (a line for each trajectory: kept, or dropped by which step and why). Nothing in them depends on
when or where it was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from orchard.data import sources
from orchard.data.curation.pipeline import Chosen, curate
from orchard.data.curation.plan import Plan
from orchard.data.errors import DataError, Where
from orchard.data.export import Exported, Progress, check_output, export, hash_of_path, write_whole
from orchard.data.nodes import Node, compact, read_document
from orchard.data.registry import codec
from orchard.data.sources import Source

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset that was made.

    Attributes:
        exported: the output.
        chosen: what was kept, and why the rest was not.
        manifest: its file.
        report: its file.
    """

    exported: Exported
    chosen: Chosen
    manifest: Path
    report: Path


def make_dataset(  # noqa: PLR0917 (all but the first three are options)
    source: Source,
    plan: Plan,
    output: Path,
    overwrite: bool = False,
    restart: bool = False,
    like: Path | None = None,
    reading: Callable[[int], None] | None = None,
    writing: Progress | None = None,
) -> Dataset:
    """Choose by a plan and write what was chosen.

    Args:
        source: what to choose from.
        plan: how.
        output: where it is written.
        overwrite: replace a dataset that is there.
        restart: begin again where an earlier one was broken off.
        like: a manifest that this dataset must agree with.
        reading: called with trajectories read.
        writing: called with trajectories and rows written.

    Raises:
        DataError: the plan names no format, the output is there, the dataset differs from the manifest, or what was
            chosen changed before it was written.
    """
    if not plan.format:
        raise DataError("the plan names no format", fix="add export: {format: sft}, or name one")
    # Now, and not once everything was read.
    check_output(codec(plan.format), output, overwrite=overwrite)
    manifest = output.with_name(output.name + ".manifest.json")
    report = output.with_name(output.name + ".report.jsonl")
    wanted = read_document(like) if like else None
    chosen = curate(source, plan.curation, reading)
    if wanted is not None:
        _compare_choice(chosen, wanted)
    kept = sources.Chosen(source, chosen.kept)
    written = export(kept, codec(plan.format), output, plan.options, overwrite, restart, writing)
    value = manifest_of(plan, chosen, written)
    if wanted is not None and wanted.need("output").need("sha256").text() != written.sha256:
        raise DataError(
            f"the output differs from that of {like}, though the same trajectories were chosen",
            where=Where(str(output)),
            fix="use the version, tokenizer and libraries that made it",
        )
    lines = "".join(compact(asdict(fate)) + "\n" for fate in chosen.fates)
    write_whole(report, lines.encode())
    write_whole(manifest, json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")
    return Dataset(written, chosen, manifest, report)


def manifest_of(plan: Plan, chosen: Chosen, written: Exported) -> dict[str, Any]:
    """What a manifest says."""
    pool = "".join(f"{fate.id} {fate.sha256}\n" for fate in chosen.fates)
    tokenizer: Mapping[str, str] = {"counts": plan.curation.counter.name}
    if plan.tokenizer is not None:
        tokenizer = {**tokenizer, "sha256": hash_of_path(plan.tokenizer)}
    return {
        "version": VERSION,
        "plan": plan.document,
        "seed": plan.curation.seed,
        "tokens": tokenizer,
        "pool": {"trajectories": len(chosen.fates), "sha256": hashlib.sha256(pool.encode()).hexdigest()},
        "steps": [asdict(step) for step in chosen.steps],
        "kept": [{"id": name, "sha256": digest} for name, digest in chosen.kept.items()],
        "output": {
            "name": written.output.name,
            "format": plan.format,
            "rows": written.rows,
            "sha256": written.sha256,
            "losses": [asdict(loss) for loss in written.losses],
        },
    }


def _compare_choice(chosen: Chosen, wanted: Node) -> None:
    """Raise DataError for the first trajectory that was not chosen alike."""
    theirs = {one.need("id").text(): one.need("sha256").text() for one in wanted.need("kept").array()}
    kept = chosen.kept
    for name, digest in theirs.items():
        if name not in kept:
            fate = next((fate for fate in chosen.fates if fate.id == name), None)
            why = f"now {fate.step} drops it: {fate.reason}" if fate else "it is not in the source"
            raise DataError(f"{name} was kept, and {why}", where=wanted.where, fix="use the same source, plan and seed")
        if kept[name] != digest:
            raise DataError(f"{name} has changed since", where=wanted.where, fix="use the same source")
    if more := next((name for name in kept if name not in theirs), None):
        raise DataError(f"{more} was not kept then", where=wanted.where, fix="use the same source, plan and seed")
