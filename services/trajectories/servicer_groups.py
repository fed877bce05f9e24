"""GroupService: the wire on one side, use cases on the other."""

from __future__ import annotations

import math
from typing import Any, Final

from orchard.rewards.balanced_rollout import Outcome
from orchard.trajectory.v1 import group_service_pb2 as pb
from orchard.trajectory.v1 import group_service_pb2_grpc, trajectory_pb2

from services.common.auth import principal
from services.common.pages import decode_token, encode_token
from services.common.validation import DAY_SECONDS, Fields, seconds_of
from services.trajectories.groups import LEASE_SECONDS, Groups, plan_of
from services.trajectories.servicer_values import check_id, check_texts, timestamp
from services.trajectories.store.groups import TASK_FIELDS, Claim, Group, Member, NewGroup, Sample

_OUTCOMES: Final = {
    pb.SAMPLE_OUTCOME_POSITIVE: Outcome.POSITIVE,
    pb.SAMPLE_OUTCOME_NEGATIVE: Outcome.NEGATIVE,
    pb.SAMPLE_OUTCOME_UNSCORED: Outcome.UNSCORED,
}
_NUMBERS: Final = {outcome: number for number, outcome in _OUTCOMES.items()}
_MOST_SAMPLES: Final = 10_000
_MOST_REWARD: Final = 1e300  # the sum and the deviation of as many are numbers still


class GroupServicer(group_service_pb2_grpc.GroupServiceServicer):
    """Serves orchard.trajectory.v1.GroupService."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    async def CreateGroup(self, request: pb.CreateGroupRequest, context: Any) -> pb.CreateGroupResponse:  # noqa: N802, ARG002 (gRPC's names and arguments, here and below)
        """See group_service.proto."""
        group, start = await self._groups.create(principal().tenant, _new_group(request))
        return pb.CreateGroupResponse(group=_group(group), start=start)

    async def ClaimSamples(self, request: pb.ClaimSamplesRequest, context: Any) -> pb.ClaimSamplesResponse:  # noqa: N802, ARG002
        """See group_service.proto."""
        fields = Fields()
        check_id(fields, "group_id", request.group_id, optional=True)
        fields.between("count", request.count, 1, 1000)
        fields.text("worker", request.worker, maximum=128)
        if request.HasField("lease"):
            fields.duration("lease", request.lease, minimum=1, maximum=7 * DAY_SECONDS)
        fields.token_id("request_id", request.request_id, optional=True)
        fields.done()
        lease_seconds = seconds_of(request.lease) or LEASE_SECONDS
        claim = Claim(request.group_id, request.count or 1, request.worker, lease_seconds, request.request_id)
        claimed = await self._groups.claim(principal().tenant, claim)
        return pb.ClaimSamplesResponse(
            samples=[
                pb.ClaimedSample(group_id=group.group_id, index=index, task=trajectory_pb2.Task(**group.task))
                for group, index in claimed
            ]
        )

    async def ReportSample(self, request: pb.ReportSampleRequest, context: Any) -> pb.ReportSampleResponse:  # noqa: N802, ARG002
        """See group_service.proto."""
        sample = _sample(request)
        following = await self._groups.report(principal().tenant, request.group_id, sample)
        return pb.ReportSampleResponse(
            start=following.start,
            cancel=following.cancel,
            group=None if following.group is None else _group(following.group),
        )

    async def GetGroup(self, request: pb.GetGroupRequest, context: Any) -> pb.GetGroupResponse:  # noqa: N802, ARG002
        """See group_service.proto."""
        fields = Fields()
        check_id(fields, "group_id", request.group_id)
        fields.done()
        return pb.GetGroupResponse(group=_group(await self._groups.get(principal().tenant, request.group_id)))

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Any) -> pb.ListGroupsResponse:  # noqa: N802, ARG002
        """See group_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.check(0 <= request.state <= pb.GROUP_STATE_CLOSED, "state", "must be OPEN or CLOSED")
        check_texts(fields, "datasets", request.datasets)
        fields.done()
        before = decode_token("page_token", request.page_token, (int,))[0] if request.page_token else None
        groups, after = await self._groups.page(
            principal().tenant,
            closed=request.state == pb.GROUP_STATE_CLOSED if request.state else None,
            datasets=list(request.datasets),
            before=before,
            count=size,
        )
        return pb.ListGroupsResponse(
            groups=map(_group, groups), next_page_token=encode_token((after,)) if after else ""
        )


def _new_group(request: pb.CreateGroupRequest) -> NewGroup:
    fields, plan = Fields(), request.plan
    check_id(fields, "group_id", request.group_id)
    for name in TASK_FIELDS:
        fields.text(f"task.{name}", getattr(request.task, name), maximum=256)
    for name in ("group_size", "maximum", "stride"):
        fields.between(f"plan.{name}", getattr(plan, name), 1, _MOST_SAMPLES)
    for name in ("low", "high"):
        fields.check(math.isfinite(getattr(plan, name)), f"plan.{name}", "must be a finite number")
    fields.done()
    given: dict[str, Any] = {
        name: getattr(plan, name) for name in ("group_size", "maximum", "stride") if getattr(plan, name)
    }
    given |= {name: getattr(plan, name) for name in ("low", "high") if plan.HasField(name)}
    need_positive = plan.need_positive if plan.HasField("need_positive") else True
    task = {name: getattr(request.task, name) for name in TASK_FIELDS}
    return NewGroup(request.group_id, task, plan_of(**given, eager=plan.eager), need_positive)


def _sample(request: pb.ReportSampleRequest) -> Sample:
    fields, sample = Fields(), request.sample
    check_id(fields, "group_id", request.group_id)
    check_id(fields, "sample.trajectory_id", sample.trajectory_id, optional=True)
    fields.text("sample.reason", sample.reason, maximum=4096)
    known = fields.check(sample.outcome in _OUTCOMES, "sample.outcome", "must be POSITIVE, NEGATIVE or UNSCORED")
    scored = known and sample.outcome != pb.SAMPLE_OUTCOME_UNSCORED
    if scored:
        given = sample.HasField("reward") and abs(sample.reward) <= _MOST_REWARD
        fields.check(given, "sample.reward", "must be a number from -10^300 to 10^300 where the sample was scored")
    elif known:
        fields.check(not sample.HasField("reward"), "sample.reward", "an unscored sample has none; it is never 0")
        fields.check(bool(sample.reason), "sample.reason", "is required where there is no score")
    fields.done()
    reward = sample.reward if scored else None
    return Sample(sample.index, _OUTCOMES[sample.outcome], reward, sample.reason, sample.trajectory_id)


def _group(group: Group) -> pb.Group:
    plan = group.plan
    return pb.Group(
        group_id=group.group_id,
        task=trajectory_pb2.Task(**group.task),
        plan=pb.RolloutPlan(
            group_size=plan.group_size,
            maximum=plan.maximum,
            stride=plan.stride,
            low=plan.low,
            high=plan.high,
            need_positive=group.need_positive,
            eager=plan.eager,
        ),
        state=pb.GROUP_STATE_CLOSED if group.closed else pb.GROUP_STATE_OPEN,
        started=group.started,
        samples=map(_sample_message, group.samples),
        members=map(_member, group.members),
        short=group.short,
        fallback=group.fallback,
        verdict=pb.Verdict(keep=group.keep, reason=group.verdict_reason) if group.closed else None,
        create_time=timestamp(group.create_time),
        close_time=timestamp(group.close_time),
    )


def _member(member: Member) -> pb.Member:
    return pb.Member(sample=_sample_message(member.sample), advantage=member.advantage, trainable=member.trainable)


def _sample_message(sample: Sample) -> pb.Sample:
    return pb.Sample(
        index=sample.index,
        trajectory_id=sample.trajectory_id,
        outcome=_NUMBERS[sample.outcome],
        reward=sample.reward,
        reason=sample.reason,
    )
