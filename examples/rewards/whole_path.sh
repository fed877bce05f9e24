#!/usr/bin/env bash
# From what agents did to what a trainer reads, by the shell. README.md beside it says what happens in each step.
#
#     orchard with-platform -- examples/rewards/whole_path.sh build/rewards
set -euo pipefail
here=$(dirname "$0")
output=${1:-build/rewards}
orchard=${ORCHARD:-orchard}
mkdir -p "$output"

echo "1. trajectories"
"$orchard" trajectories import "$here/attempts.jsonl"

echo "2. outcomes: tests gave most of them; a judge gives the others"
"$orchard" judge batch --batch outcomes --dataset rewards-demo --label graded-by=judge --keep

echo "3. process rewards, by a rubric"
"$orchard" judge batch --batch process --dataset rewards-demo --label graded-by=tests --outcome scored \
  --kind rubric --rubric orchard-software-engineering --keep
"$orchard" trajectories process-reward --dataset rewards-demo --label graded-by=tests

echo "4. value curves of what failed, and of what is to teach a value model"
"$orchard" judge batch --batch values --dataset rewards-demo --outcome-most 0 --kind value_curve --keep
"$orchard" judge run ttlcache-0 --kind value_curve --keep

echo "5. what raised the value of what failed"
"$orchard" trajectories credit intervals-1
"$orchard" trajectories credit ratelimit-2

echo "6. a group, and its advantages"
"$orchard" groups create rewards-demo-intervals --instance rewards-demo__intervals --dataset rewards-demo \
  --size 4 --maximum 4 --stride 4
for index in 0 1 2 3; do
  "$orchard" groups report rewards-demo-intervals "$index" --trajectory "intervals-$index" --reward-of process_reward
done
"$orchard" groups show rewards-demo-intervals

echo "7. files for trainers"
export_to() { "$orchard" trajectories export --dataset rewards-demo --overwrite --restart "$@"; }
export_to --to sft-rises --loss rises --output "$output/sft.jsonl"
export_to --to grpo --output "$output/groups.jsonl"
export_to --to grpo --reward process_reward --label graded-by=tests --output "$output/groups-shaped.jsonl"
export_to --to value --label graded-by=judge --output "$output/values.jsonl"
