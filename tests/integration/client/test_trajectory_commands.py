"""`orchard trajectories` against the real platform."""

from __future__ import annotations

import secrets

import pytest
from orchard import Body, Reward, SandboxClient, Step, Task, ToolCall

from tests.integration.client.cli import Cli
from tests.support.platform import wait_until

LONG = "a long line of text\n" * 5000


@pytest.fixture
def dataset(client: SandboxClient) -> str:
    """Three trajectories: resolved, unresolved and one that is still open."""
    dataset = f"d-{secrets.token_hex(6)}"
    for number, model in enumerate(("small", "large", "large")):
        trajectory = client.trajectories.create(
            Task(f"i-{number}", dataset), trajectory_id=f"{dataset}-{number}", model=model, labels={"n": str(number)}
        )
        trajectory.append(
            Step.user(["Fix it.", Body(b"\x89PNG", "image/png")]),
            Step.assistant("I look.", reasoning="hm", tool_calls=[ToolCall("c", "exec", '{"command": "ls"}')]),
            Step.tool("c", LONG, name="exec"),
        )
        if number < 2:
            trajectory.seal()
            reward = Reward.scored(number, judge="tests")
            client.trajectories.annotate(trajectory.trajectory_id, rewards=reward)
    return dataset


def test_lists_go_by_filter_order_and_limit(cli: Cli, dataset: str) -> None:
    def ids(*arguments: str) -> list[str]:
        code, out, err = cli("trajectories", "list", "--dataset", dataset, "--quiet", *arguments)
        assert (code, err) == (0, b"")
        return out.decode().split()

    names = [f"{dataset}-{number}" for number in range(3)]
    assert ids() == names[::-1]
    assert ids("--ascending", "--limit", "2") == names[:2]
    assert ids("--order", "outcome", "--outcome", "scored") == [names[1], names[0]]
    assert ids("--model", "small", "--model", "large", "--status", "open") == [names[2]]
    assert ids("--label", "n=1", "--since", "1h", "--outcome-least", "1", "--turns-most", "1") == [names[1]]
    shown = cli("trajectories", "list", "--dataset", dataset)[1].decode()
    assert all(text in shown for text in (*names, "i-0", "completed", "open", "large"))
    (first, *_rest) = cli.json("trajectories", "list", "--dataset", dataset, "--ascending")
    assert (first["trajectory_id"], first["outcome"]["value"], first["status"]) == (names[0], 0.0, "completed")
    code, _out, err = cli("trajectories", "list", "--order", "age")
    assert code == 2
    assert b"'age' is none of created, outcome, turns, tokens, cost" in err


def test_one_is_shown_with_its_steps(cli: Cli, dataset: str) -> None:
    name = f"{dataset}-1"
    code, out, err = cli("trajectories", "show", name)
    shown = out.decode()
    assert (code, err) == (0, b"")
    wanted = ("completed", "outcome 1 (tests)", "Fix it.", "<image/png, 4 B>", 'exec({"command": "ls"})', "<text/plain")
    assert [text for text in wanted if text not in shown] == []
    assert LONG.strip() in cli("trajectories", "show", name, "--full")[1].decode()
    assert "Fix it." not in cli("trajectories", "show", name, "--no-steps")[1].decode()
    found = cli.json("trajectories", "show", name, "--full", "--start", "1")
    assert [step["index"] for step in found["steps"]] == [1, 2]
    assert found["steps"][1]["content"] == LONG
    code, _out, err = cli("trajectories", "show", "no-such-one")
    assert code == 1
    assert b"orchard trajectories list" in err


def test_a_live_one_is_followed_to_its_end(cli: Cli, client: SandboxClient, dataset: str) -> None:
    name = f"{dataset}-2"
    process = cli.start("trajectories", "show", name, "--follow", "--json")
    try:
        client.trajectories.open(name, take_over=True).append(Step.user("more"))
        client.trajectories.seal(name)
        wait_until(lambda: process.poll() is not None, "the follower to end")
        out, err = process.communicate(timeout=110)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, b"")
    assert len(out.splitlines()) == 4


def test_counts_by_group_and_pass_at_k(cli: Cli, dataset: str) -> None:
    (row,) = cli.json("trajectories", "stats", "--dataset", dataset, "-k", "1")
    assert (row["trajectories"], row["open"], row["scored"], row["resolved"]) == (3, 1, 2, 1)
    assert row["pass_at_k"][0]["any"] == 0.5
    shown = cli("trajectories", "stats", "--dataset", dataset, "--group-by", "model", "-k", "1")[1].decode()
    assert all(text in shown for text in ("MODEL", "PASS@1", "small", "large", "100.0%"))
    by_label = cli.json("trajectories", "stats", "--dataset", dataset, "--group-by", "label=n")
    assert sorted(row["value"] for row in by_label) == ["0", "1", "2"]


def test_a_judgement_is_added(cli: Cli, client: SandboxClient, dataset: str) -> None:
    name = f"{dataset}-0"
    assert cli("trajectories", "annotate", name, "--reward", "0.5", "--judge", "me", "--label", "seen=yes")[0] == 0
    info = client.trajectories.get(name)
    assert info.outcome is not None
    assert (info.outcome.value, info.outcome.judge, info.labels["seen"]) == (0.5, "me", "yes")
    found = cli.json("trajectories", "annotate", name, "--excluded", "the network was down")
    assert (found["outcome"]["state"], found["outcome"]["value"]) == ("excluded", None)
    for mistake in ((), ("--reward", "1", "--abstained", "why")):
        code, _out, err = cli("trajectories", "annotate", name, *mistake)
        assert code == 2
        assert b"--reward" in err


def test_deletes_say_first_what_would_go(cli: Cli, client: SandboxClient, dataset: str) -> None:
    def left() -> list[str]:
        return [info.trajectory_id for info in client.trajectories.list(datasets=dataset, ascending=True)]

    names = left()
    code, out, _err = cli("trajectories", "delete", "--dataset", dataset, "--dry-run")
    assert code == 0
    assert out.startswith(b"would delete 2 trajectories")
    assert b"1 open ones stay" in out
    assert left() == names
    assert cli.json("trajectories", "delete", names[0])["trajectories"] == 1
    assert left() == names[1:]
    assert cli("trajectories", "delete", "--dataset", dataset, "--include-open", "--yes")[0] == 0
    assert left() == []
    code, _out, err = cli("trajectories", "delete")
    assert code == 2
    assert b"--all" in err


def test_ids_are_completed(cli: Cli, dataset: str) -> None:
    assert set(cli.completed("trajectories", "show", dataset)) >= {f"{dataset}-{number}" for number in range(3)}
