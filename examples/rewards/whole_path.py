"""From what agents did to what a trainer reads, by the SDK. README.md beside it says what happens in each step.

orchard with-platform -- python examples/rewards/whole_path.py build/rewards
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import orchard
from orchard.data import codec, read
from orchard.data.export import export
from orchard.data.options import ExportOptions
from orchard.data.server import ServerSource, store
from orchard.data.training.conversations import conversations, curve_of
from orchard.rewards.credit import inverted_u_share

HERE = Path(__file__).parent
DATASET = "rewards-demo"
GROUP = f"{DATASET}-intervals"


def judge(client: orchard.SandboxClient, batch: str, kind: str, ids: Sequence[str], **given: str) -> None:
    """Judge trajectories in a batch, which may be broken off and repeated, and keep what comes of it."""
    asked = ((one, client.judge.of_trajectory(one, kind, **given)) for one in ids)
    for item in client.judge.batch(batch, asked):
        verdict = item.verdict
        keep = {"values": verdict.step_values()} if verdict.values else {"rewards": verdict.reward()}
        client.trajectories.annotate(item.item_id, annotation_id=f"{batch}-{item.item_id}", **keep)
        told = verdict.reason if verdict.value is None else f"{verdict.value:g}"
        print(f"  {kind} of {item.item_id}: {told}")


def ids(client: orchard.SandboxClient, **filters: object) -> list[str]:
    """Ids of the example's trajectories."""
    return sorted(one.trajectory_id for one in client.trajectories.list(datasets=DATASET, **filters))


def main(output: Path) -> None:
    """All seven steps."""
    with orchard.SandboxClient() as client:
        print("1. trajectories")
        for record in read(HERE / "attempts.jsonl"):
            store(client, record)
        print(f"  {len(ids(client))} are stored")

        print("2. outcomes: tests gave most of them; a judge gives the others")
        judge(client, "outcomes", "outcome", ids(client, labels={"graded-by": "judge"}))

        print("3. process rewards, by a rubric")
        tested = ids(client, labels={"graded-by": "tests"}, outcome_state="scored")
        judge(client, "process", "rubric", tested, rubric="orchard-software-engineering")
        for one in ids(client, labels={"graded-by": "tests"}):
            reward = orchard.process_reward_of(client.trajectories.get(one))
            if reward is not None:
                client.trajectories.annotate(one, rewards=reward, annotation_id=f"shaped-{one}")
                print(f"  {one}: {reward.value:+g}")

        print("4. value curves of what failed, and of what is to teach a value model")
        judge(client, "values", "value_curve", [*ids(client, outcome_most=0), "ttlcache-0"])

        print("5. what raised the value of what failed")
        curves = []
        for record, _place in ServerSource(client, {"datasets": DATASET, "outcome_most": 0}).records():
            curve = curve_of(record, conversations(record)[0])
            if curve is not None:
                curves.append(curve.values)
                print(f"  {record.id}: {[(segment.first, segment.end) for segment in curve.segments]}")
        print(f"  curves that rise and fall: {inverted_u_share(curves):.0%}")

        print("6. a group, and its advantages")
        rewards = {one: orchard.process_reward_of(client.trajectories.get(one)) for one in ids(client, group_ids=GROUP)}
        plan = orchard.RolloutPlan(group_size=4, maximum=4, stride=4)
        client.trajectories.groups.create(GROUP, task=orchard.Task("rewards-demo__intervals", DATASET), plan=plan)
        for index, (one, reward) in enumerate(rewards.items()):
            value = None if reward is None else reward.value
            client.trajectories.groups.report(GROUP, index, reward=value, trajectory_id=one)
        for member in client.trajectories.groups.get(GROUP).members:
            sample = member.sample
            print(f"  {sample.trajectory_id}: reward {sample.reward:+g}, advantage {member.advantage:+.6f}")

        print("7. files for trainers")
        shaped = ExportOptions(reward="process_reward")
        for name, format_name, filters, options in (
            ("sft.jsonl", "sft-rises", {}, ExportOptions(loss="rises")),
            ("groups.jsonl", "grpo", {}, ExportOptions()),
            ("groups-shaped.jsonl", "grpo", {"labels": {"graded-by": "tests"}}, shaped),
            ("values.jsonl", "value", {"labels": {"graded-by": "judge"}}, ExportOptions()),
        ):
            source = ServerSource(client, {"datasets": DATASET, **filters})
            made = export(source, codec(format_name), output / name, options, overwrite=True, restart=True)
            print(f"  {made.output}: {made.rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/rewards"))
