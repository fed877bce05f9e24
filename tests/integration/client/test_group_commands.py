"""`orchard groups` against the real platform."""

from __future__ import annotations

import secrets

import pytest
from orchard import RolloutPlan, SandboxClient, Task

from tests.integration.client.cli import Cli


@pytest.fixture
def name() -> str:
    return f"g-{secrets.token_hex(6)}"


def lines(cli: Cli, *arguments: str) -> list[str]:
    code, out, err = cli("groups", *arguments)
    assert (code, err) == (0, b"")
    return out.decode().splitlines()


def test_a_group_from_its_first_sample_to_its_verdict(cli: Cli, client: SandboxClient, name: str) -> None:
    begin = ("create", name, "--instance", "i-1", "--dataset", name, "--stride", "4")
    assert lines(cli, *begin) == ["0", "1", "2", "3"]
    assert lines(cli, "claim", name, "--count", "2", "--worker", "w", "--request-id", name) == [
        f"{name} 0 i-1",
        f"{name} 1 i-1",
    ]
    # Whoever did not get the answer asks again; what is claimed is not to start.
    again = cli.json("groups", "claim", name, "--count", "2", "--worker", "w", "--request-id", name)
    assert [(one["group_id"], one["index"], one["task"]["instance_id"]) for one in again] == [
        (name, 0, "i-1"),
        (name, 1, "i-1"),
    ]
    assert lines(cli, *begin) == ["2", "3"]
    assert lines(cli, "report", name, "0", "--reward", "1", "--trajectory", "tr-1") == []
    assert lines(cli, "report", name, "1", "--unscored", "the sandbox was lost") == []
    assert lines(cli, "report", name, "2", "--reward", "0") == []
    assert lines(cli, "report", name, "3", "--reward", "0") == ["start 4 5 6 7"]
    assert lines(cli, "list", "--dataset", name, "--open", "--quiet") == [name]
    for index in (4, 5, 6):
        assert lines(cli, "report", name, str(index), "--reward", "0") == []
    # Shaped: a reward above 0 for what was no success.
    assert lines(cli, "report", name, "7", "--reward", "0.5", "--outcome", "negative") == ["closed keep"]
    shown = "\n".join(lines(cli, "show", name))
    for text in (
        name,
        "closed",
        "keep",
        "i-1",
        "tr-1",
        "the sandbox was lost",
        "positive",
        "negative",
        "unscored",
        "+1.",
    ):
        assert text in shown
    found = cli.json("groups", "show", name)
    assert found == cli.json("groups", "report", name, "7", "--reward", "0.5", "--outcome", "negative")["group"]
    assert (found["closed"], found["keep"], len(found["samples"]), len(found["members"])) == (True, True, 8, 4)
    assert client.trajectories.groups.get(name).plan == RolloutPlan(stride=4)


def test_lists_go_by_state_dataset_and_limit(cli: Cli, client: SandboxClient, name: str) -> None:
    groups = client.trajectories.groups
    for number in range(3):
        groups.create(f"{name}-{number}", task=Task("i", name), plan=RolloutPlan(1, 1, 1, 0.0, 1.0))
    groups.report(f"{name}-1", 0, reward=0.0)
    assert lines(cli, "list", "--dataset", name, "--quiet") == [f"{name}-{number}" for number in (2, 1, 0)]
    assert lines(cli, "list", "--dataset", name, "--quiet", "--limit", "1") == [f"{name}-2"]
    assert lines(cli, "list", "--dataset", name, "--quiet", "--closed") == [f"{name}-1"]
    assert lines(cli, "list", "--dataset", name, "--quiet", "--open") == [f"{name}-2", f"{name}-0"]
    shown = "\n".join(lines(cli, "list", "--dataset", name))
    assert all(text in shown for text in ("STARTED", "1 of 1", "open", "closed", "drop: "))
    (first, *_) = cli.json("groups", "list", "--dataset", name, "--dataset", "other")
    assert (first["group_id"], first["closed"], first["keep"]) == (f"{name}-2", False, None)


def test_mistakes_are_told_with_their_fix(cli: Cli, name: str) -> None:
    for code, arguments, text in (
        (1, ("show", name), "orchard groups list"),
        (1, ("claim", name), "orchard groups list"),
        (2, ("create", name, "--maximum", "2"), "maximum"),
        (2, ("create", "a b"), "group_id"),
        (2, ("report", name, "0"), "--reward"),
        (2, ("report", name, "0", "--reward", "1", "--unscored", "why"), "--reward"),
        (2, ("report", name, "0", "--unscored", "why", "--outcome", "negative"), "--outcome"),
        (2, ("claim", "--count", "0"), "--count"),
        (2, ("claim", "--lease", "soon"), "--lease"),
        (2, ("claim", "--lease", "30d"), "lease"),
    ):
        got, out, err = cli("groups", *arguments)
        assert (got, out) == (code, b""), arguments
        assert text in err.decode(), arguments
