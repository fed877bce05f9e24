"""Curation: filters and selectors."""

from __future__ import annotations

import json
import random as randomness
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchard.data import DataError, Record
from orchard.data.codecs.swebench import submission_step
from orchard.data.counting import Estimate
from orchard.data.curation import Chosen, Curation, curate, filters, selectors
from orchard.data.curation.features import Patch, features_of, patch_of
from orchard.data.curation.near_duplicates import near_duplicates, similarity, trigrams
from orchard.data.curation.pipeline import Step
from orchard.data.sources import RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import outcome, record, with_image
from tests.unit.data.strategies import SLOW

DIFF = """diff --git a/{0} b/{0}
--- a/{0}
+++ b/{0}
@@ -1,2 +1,{1} @@
 same
-old
"""


def chosen(pool: list[Record], *steps: Step, seed: int = 7) -> Chosen:
    return curate(RecordSource.of(pool), Curation(steps, seed))


def kept(pool: list[Record], *steps: Step, seed: int = 7) -> list[str]:
    return list(chosen(pool, *steps, seed=seed).kept)


def why(pool: list[Record], *steps: Step) -> dict[str, str]:
    return {fate.id: fate.reason for fate in chosen(pool, *steps).fates if not fate.kept}


def patched(name: str, files: int, added: int, repo: str = "", score: float = 1.0) -> Record:
    """A trajectory that handed in a patch; each file loses a line and gets `added`."""
    made = record(name, score=score, repo=repo)
    text = "".join(DIFF.format(f"f{n}.py", added + 1) + "+new\n" * added for n in range(files))
    return Record(made.trajectory, [*made.steps, submission_step(len(made.steps), text)])


def asking(name: str, intent: str, **task: str) -> Record:
    made = record(name, **task)
    made.steps[1].content[0].text = intent
    return made


def test_only_what_is_no_longer_than_64k_tokens() -> None:
    short, long = record("short", tokens=True), record("long", tokens=True)
    for made, count in ((short, 65_536), (long, 65_537)):
        call = made.steps[4].model_call
        del call.prompt_token_ids[:], call.completion_token_ids[:]
        # As the last call reported it; what comes after is the estimate of its result: 4 and ceil(8 / 4).
        call.prompt_tokens, call.completion_tokens = count - 6 - 100, 100
    assert why([short, long], filters.max_tokens()) == {"long": "longer than 65536 tokens"}


def test_only_tools_that_were_offered() -> None:
    offered, other, silent = record("offered"), record("other"), record("silent")
    for made, tool in ((offered, "bash"), (other, "edit")):
        made.trajectory.tools_json = json.dumps([{"type": "function", "function": {"name": tool}}])
    pool = [offered, other, silent, record("mute", actions=0)]
    assert why(pool, filters.known_tools()) == {
        "other": "calls 'bash', which was not offered",
        "silent": "it does not say which tools were offered",
    }
    assert why(pool, filters.known_tools(["bash"])) == {}
    assert set(why(pool, filters.known_tools(["edit"]))) == {"offered", "other", "silent"}


def test_only_actions_that_parse() -> None:
    bad, listed = record("bad"), record("listed")
    bad.steps[2].tool_calls[0].arguments = "{"
    listed.steps[2].tool_calls[0].arguments = "[]"
    reason = "the arguments of a call of 'bash' are no JSON object"
    assert why([bad, listed, record("good")], filters.parsable_actions()) == {"bad": reason, "listed": reason}
    quiet = with_image("quiet", 2, 1.0)
    assert why([quiet], filters.parsable_actions(calls=True)) == {"quiet": "a response calls no tool"}
    assert why([record("good")], filters.parsable_actions(reasoning=True)) == {
        "good": "a response does not say what it thought"
    }
    thought = with_image("thought", 1, 1.0)
    thought.steps[3].content[0].text = "<think>Look.</think> click"
    assert why([thought], filters.parsable_actions(reasoning=True)) == {}


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ("resolved", ["good"]),
        ("unresolved", ["bad"]),
        ("scored", ["good", "bad"]),
        ("any", ["good", "bad", "none", "lost"]),
    ],
)
def test_outcomes(wanted: str, ids: list[str]) -> None:
    lost = record("lost", score=None)
    lost.trajectory.outcome.CopyFrom(pb.Reward(state=pb.REWARD_STATE_EXCLUDED, reason="sandbox lost"))
    pool = [record("good"), record("bad", score=-1.0), record("none", score=None), lost]
    assert kept(pool, filters.outcome(wanted)) == ids


def test_failures_need_a_rise_and_successes_do_not() -> None:
    pool = [
        record("good"),
        record("rising", score=-1.0, values={0: 0.1, 1: 0.4}),
        record("falling", score=-1.0, values={0: 0.4, 1: 0.1}),
        record("blind", score=-1.0),
    ]
    assert kept(pool, filters.has_rise()) == ["good", "rising"]


def test_fields_labels_statuses_and_turns() -> None:
    a, b = record("a", repo="x/y", actions=1), record("b", repo="x/z", actions=3)
    b.trajectory.labels["kind"] = "hard"
    b.trajectory.status = pb.TRAJECTORY_STATUS_FAILED
    assert kept([a, b], filters.where({"repo": ["x/y"]})) == ["a"]
    assert kept([a, b], filters.where({"repo": ["x/y"]}, exclude=True)) == ["b"]
    assert kept([a, b], filters.where({"label.kind": ["hard"], "model": ["m"]})) == ["b"]
    assert why([a, b], filters.status(["completed"])) == {"b": "its status is failed"}
    assert kept([a, b], filters.turns(least=2)) == ["b"]
    assert kept([a, b], filters.turns(most=2)) == ["a"]


def test_a_draw_depends_on_the_seed_and_the_ids_alone() -> None:
    pool = [record(f"t{n}", actions=1) for n in range(40)]
    first = kept(pool, selectors.random(10), seed=1)
    assert len(first) == 10
    shuffled = list(pool)
    randomness.Random(3).shuffle(shuffled)
    assert sorted(kept(shuffled, selectors.random(10), seed=1)) == sorted(first)
    assert kept(pool, selectors.random(10), seed=2) != first
    # What is kept of a larger pool is drawn from the same order.
    assert set(kept(pool, selectors.random(5), seed=1)) < set(first)


def test_diverse_repositories() -> None:
    pool = [record(f"a{n}", repo="a") for n in range(5)] + [record("b0", repo="b"), record("n0")]
    found = chosen(pool, selectors.diverse_repo(per_repo=2))
    assert Counter(name[0] for name in found.kept) == {"a": 2, "b": 1}
    assert found.steps[0].reasons == {"it names no repository": 1, "its repository has 2 already": 3}
    assert len(kept(pool, selectors.diverse_repo(per_repo=2, count=2))) == 2


def test_concentrated_repositories_are_those_with_the_most_resolved() -> None:
    pool = [record(f"a{n}", repo="a", score=-1.0) for n in range(9)]
    pool += [record(f"b{n}", repo="b") for n in range(3)] + [record("c0", repo="c"), record("d0", repo="d")]
    assert kept(pool, filters.outcome("resolved"), selectors.concentrated_repo(repos=1)) == ["b0", "b1", "b2"]
    # Ties by name.
    assert kept(pool, filters.outcome("resolved"), selectors.concentrated_repo(repos=2)) == ["b0", "b1", "b2", "c0"]
    # Failures are not looked at, and stay.
    assert len(kept(pool, selectors.concentrated_repo(repos=1))) == 12


def test_patches() -> None:
    assert patch_of(DIFF.format("a.py", 3) + "+x\n+--- y\n") == Patch(1, 3)
    assert patch_of("") == Patch(0, 0)
    renamed = "diff --git a/old.py b/new.py\nsimilarity index 100%\nrename from old.py\nrename to new.py\n"
    assert patch_of(renamed) == Patch(1, 0)
    added = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n"
    assert patch_of(added) == Patch(1, 1)
    # A removed line that begins with dashes is no header.
    assert patch_of("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n--- a/y.py\n+++ b/y.py\n") == Patch(1, 2)


def test_multi_file_and_large_patches() -> None:
    pool = [patched("one", 1, 9), patched("two", 2, 1), patched("three", 3, 1), record("none")]
    assert kept(pool, selectors.multi_file()) == ["two", "three"]
    assert why(pool, selectors.multi_file())["none"] == "nothing was handed in"
    assert kept(pool, selectors.large_diff(count=2)) == ["one", "three"]
    assert kept(pool, selectors.large_diff(least_lines=6)) == ["one", "three"]
    # Ties by id.
    assert kept([patched("b", 1, 1), patched("a", 1, 1)], selectors.large_diff(count=1)) == ["a"]


def test_the_composite_score() -> None:
    """Ranks are the share below, ties half: lines 10 4 2 -> 5/6 1/2 1/6, files 1 2 1 -> 1/3 5/6 1/3."""
    pool = [patched("p", 1, 9, "a"), patched("q", 2, 1, "a"), patched("r", 1, 1, "b")]
    features = [features_of(one, n, Estimate(), intent=False) for n, one in enumerate(pool)]
    scores = selectors.composite_scores(features, selectors.COMPOSITE_WEIGHTS)
    assert scores["p"] == pytest.approx(0.4 * 5 / 6 + 0.3 / 3 + 0.3 / 3)
    assert scores["q"] == pytest.approx(0.4 / 2 + 0.3 * 5 / 6 + 0.3 / 3)
    assert scores["r"] == pytest.approx(0.4 / 6 + 0.3 / 3 + 0.3 * 5 / 6)
    assert kept(pool, selectors.composite(2)) == ["p", "q"]
    assert kept(pool, selectors.composite(1, {"rare_repo": 1})) == ["r"]


def test_one_for_each_task_the_shortest() -> None:
    """Fewest turns, then the shortest responses in all, then the first id; failures are not looked at."""
    pool = [
        with_image("long", 3, 1.0, instance_id="i"),
        with_image("wordy", 2, 1.0, instance_id="i"),
        with_image("b", 2, 1.0, instance_id="i"),
        with_image("a", 2, 1.0, instance_id="i"),
        with_image("failed", 1, -1.0, instance_id="i"),
        with_image("other", 5, 1.0, instance_id="j"),
    ]
    pool[1].steps[3].content[0].text = "click here, where it says so"
    assert kept(pool, filters.outcome("resolved"), selectors.shortest_per_task()) == ["a", "other"]
    assert why(pool, selectors.shortest_per_task())["b"] == "a is shorter"


def test_at_most_twenty_tasks_of_a_website() -> None:
    pool = [record(f"x{n}", website="x", actions=1) for n in range(25)] + [record("y", website="y"), record("z")]
    found = chosen(pool, selectors.cap("website", 20))
    assert Counter(name[0] for name in found.kept) == {"x": 20, "y": 1, "z": 1}
    assert found.steps[0].reasons == {"its website has 20 already": 5}


def test_nearly_the_same_tasks() -> None:
    text = "Find the cheapest direct flight from Oslo to Rome on the third of May and give its number."
    pool = [
        asking("first", text),
        asking("case", text.upper() + "  "),
        asking("near", text.replace("number.", "number")),
        asking("far", text.replace("Rome", "Athens")),
        asking("short", "x"),
        asking("short too", "x"),
    ]
    assert similarity(trigrams(text), trigrams(pool[2].steps[1].content[0].text)) > 0.95
    assert 0.5 < similarity(trigrams(text), trigrams(pool[3].steps[1].content[0].text)) < 0.95
    assert why(pool, near_duplicates()) == {
        "case": "its task is that of first",
        "near": "its task is nearly that of first",
        "short too": "its task is that of short",
    }
    assert chosen(pool, near_duplicates()).steps[0].reasons == {
        "its task is that of another": 2,
        "its task is nearly that of another": 1,
    }


@settings(SLOW, max_examples=30)
@given(texts=st.lists(st.text("ab ", max_size=9), min_size=1, max_size=12))
def test_what_is_left_is_never_too_alike(texts: list[str]) -> None:
    pool = [asking(f"t{n}", text) for n, text in enumerate(texts)]
    left = [pool[int(name[1:])].steps[1].content[0].text for name in kept(pool, near_duplicates(above=0.9))]
    grams = [trigrams(text) for text in left]
    assert len(set(grams)) == len(grams)
    assert {trigrams(text) for text in texts} >= set(grams)


def test_balance() -> None:
    pool = (
        [record(f"g{n}") for n in range(5)]
        + [record(f"b{n}", score=-1.0) for n in range(2)]
        + [record("n", score=None)]
    )
    assert Counter(name[0] for name in kept(pool, selectors.balance())) == {"g": 2, "b": 2}


def test_steps_run_in_their_order_and_tell_what_they_did() -> None:
    pool = [patched(f"p{n}", n % 3 + 1, n, f"r{n % 2}", 1.0 if n % 2 else -1.0) for n in range(12)]
    found = chosen(pool, filters.outcome("resolved"), selectors.multi_file(), selectors.random(2))
    assert [(step.name, step.before, step.after) for step in found.steps] == [
        ("outcome", 12, 6),
        ("multi_file", 6, 4),
        ("random", 4, 2),
    ]
    assert found.steps[0].reasons == {"it is unresolved": 6}
    assert sum(fate.kept for fate in found.fates) == 2 == len(found.features)
    assert [fate.id for fate in found.fates] == [one.id for one in pool]


def test_an_id_that_comes_twice() -> None:
    with pytest.raises(DataError, match="the trajectory 'a' comes twice"):
        kept([record("a"), record("a")])


def test_the_newest_outcome_counts() -> None:
    made = record("a", score=-1.0)
    made.trajectory.outcome.CopyFrom(outcome(1.0))
    assert kept([made], filters.outcome("resolved")) == ["a"]
