"""Rows of trainers against their definitions, field by field; prints how many of each fit.

verl's AgentLoopOutput is taken from the installed package (its module needs all of verl, so the two classes alone are
compiled). slime and prime-rl are on no package index: their fields and types are stated here, from `Sample.to_dict` and
`Sample.from_dict` in slime/utils/types.py, and from `TrainingSample` in src/prime_rl/transport/types.py.

Usage: fit_rows.py FOLDER
"""

import ast
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Literal, Optional

import msgspec
import pydantic

folder = Path(sys.argv[1])


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def agent_loop_output() -> type[pydantic.BaseModel]:
    file = next(
        one
        for one in importlib.metadata.files("verl") or ()
        if str(one).endswith("experimental/agent_loop/agent_loop.py")
    )
    tree = ast.parse(Path(str(file.locate())).read_text())
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in {"AgentLoopMetrics", "AgentLoopOutput"}
    ]
    assert len(wanted) == 2
    names: dict[str, Any] = {"BaseModel": pydantic.BaseModel, "Any": Any, "Optional": Optional}
    exec(compile(ast.Module(wanted, []), "verl", "exec"), names)
    return names["AgentLoopOutput"]


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    """slime's Sample, as far as rows have it."""

    group_index: int
    index: int
    rollout_id: int
    prompt: str | list[dict[str, Any]]
    tokens: list[int]
    response: str
    response_length: int
    label: str | None
    reward: float
    loss_mask: list[Literal[0, 1]]
    rollout_log_probs: list[float] | None
    weight_versions: list[str]
    status: Literal["pending", "completed", "truncated", "aborted", "failed"]
    remove_sample: bool
    metadata: dict[str, Any]
    train_metadata: dict[str, Any] | None


class TrainingAdvantage(msgspec.Struct, forbid_unknown_fields=True):
    """prime-rl's channel of a loss."""

    loss: str
    values: list[float]
    mask: list[bool]


class TrainingSample(msgspec.Struct, forbid_unknown_fields=True):
    """prime-rl's sample."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[TrainingAdvantage]
    reward: float | None = None


def check_verl() -> int:
    output = agent_loop_output()
    for row in rows("verl"):
        assert set(row) <= set(output.model_fields), set(row) - set(output.model_fields)
        made = output.model_validate(row, strict=True)
        assert set(row["metrics"]) <= set(type(made.metrics).model_fields)
        assert len(made.response_ids) == len(made.response_mask) == len(made.response_logprobs)
        assert set(made.response_mask) <= {0, 1}
        assert made.prompt_ids
    return len(rows("verl"))


def check_slime() -> int:
    for row in rows("slime"):
        made = msgspec.convert(row, Sample)
        assert len(made.loss_mask) == len(made.rollout_log_probs) == made.response_length
        assert 0 < made.response_length < len(made.tokens)
        assert not made.remove_sample
    indices = [row["index"] for row in rows("slime")]
    assert indices == list(range(len(indices)))
    return len(indices)


def check_prime_rl() -> int:
    for row in rows("prime-rl"):
        made = msgspec.convert(row, TrainingSample)
        aligned = [made.mask, made.logprobs, made.temperatures, *(one.values for one in made.advantages)]
        assert {len(one) for one in aligned} == {len(made.token_ids)}
        assert all(one.mask == made.mask for one in made.advantages)
    return len(rows("prime-rl"))


print(json.dumps({"verl": check_verl(), "slime": check_slime(), "prime-rl": check_prime_rl()}))
