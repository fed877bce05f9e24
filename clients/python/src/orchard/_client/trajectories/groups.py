"""Groups: the attempts at one prompt, and what a trainer learns from them."""

from __future__ import annotations

import builtins
import datetime as dt
import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from orchard._client.arguments import explained
from orchard._client.convert import enum_value, time_of
from orchard._client.errors import InvalidArgument
from orchard._client.paging import paged
from orchard._client.trajectories import convert, options
from orchard._client.trajectories.types import Task
from orchard._client.transport import Transport
from orchard._client.units import Seconds, duration
from orchard.trajectory.v1 import group_service_pb2 as pb

_LEASE_SECONDS: Final = 3600.0
_MOST_SAMPLES: Final = 10_000


class SampleOutcome(enum.StrEnum):
    """What an attempt came to, before any shaping of its reward."""

    UNKNOWN = "unknown"
    POSITIVE = "positive"
    NEGATIVE = "negative"
    UNSCORED = "unscored"
    """Aborted, excluded or over its budget."""


@dataclass(frozen=True)
class RolloutPlan:
    """How a prompt is sampled (balanced adaptive rollout)."""

    group_size: int = 4
    """Members of a group, 1 to 10,000."""
    maximum: int = 8
    """Samples at most, up to 10,000."""
    stride: int = 8
    """Samples between two tries to make a group, 1 to 10,000."""
    low: float = 0.25
    """Least share of positive members."""
    high: float = 0.75
    """Largest share of positive members."""
    need_positive: bool = True
    """Whether a group needs a positive outcome to be kept."""
    eager: bool = False
    """Try after every sample that ends, and cancel what still runs once a group closes."""


@dataclass(frozen=True)
class Sample:
    """An attempt that ended."""

    index: int
    """Its number in its group, from 0."""
    trajectory_id: str
    outcome: SampleOutcome
    reward: float | None
    """What it is trained on; None where it was not scored."""
    reason: str
    """Why it was not scored."""


@dataclass(frozen=True)
class Member:
    """A sample in a closed group."""

    sample: Sample
    advantage: float
    """GRPO; 0 where it is masked."""
    trainable: bool
    """Whether it is trained on."""


@dataclass(frozen=True)
class Group:
    """The state of a prompt."""

    group_id: str
    task: Task
    plan: RolloutPlan
    closed: bool
    """Whether its members are chosen."""
    started: int
    """Samples asked for so far; their indices are 0 to started - 1."""
    samples: tuple[Sample, ...]
    """Samples that ended."""
    members: tuple[Member, ...]
    """Once it is closed."""
    short: bool
    """Fewer samples were scored than it has members."""
    fallback: bool
    """The band could not be kept."""
    keep: bool | None
    """Whether a trainer should use it (dynamic sampling); None while it is open."""
    keep_reason: str
    """Why not."""
    create_time: dt.datetime | None
    close_time: dt.datetime | None


@dataclass(frozen=True)
class GroupStart:
    """A group, and which of its samples to start now."""

    group: Group
    start: tuple[int, ...]


@dataclass(frozen=True)
class ClaimedSample:
    """A sample to make."""

    group_id: str
    index: int
    task: Task


@dataclass(frozen=True)
class Following:
    """What to do after a sample ended."""

    start: tuple[int, ...]
    """Samples to start now."""
    cancel: tuple[int, ...]
    """Samples that are not needed any more."""
    group: Group | None
    """The group, once it is closed."""


@explained
class AsyncGroups:
    """Groups of the tenant. Their state survives restarts of trainer and platform."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self, group_id: str, *, task: Task | str | None = None, plan: RolloutPlan | None = None
    ) -> GroupStart:
        """Begin a group. A repeat returns it as it is, with the samples that are still to start.

        Args:
            group_id: 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.'.
            task: what is attempted; a string is an instance's id.
            plan: how it is sampled.

        Raises:
            AlreadyExists: it exists with another plan.
            InvalidArgument: a plan that cannot be.
        """
        request = pb.CreateGroupRequest(
            group_id=group_id, task=options.task_message(task), plan=_plan_message(plan or RolloutPlan())
        )
        response = await self._transport.unary(lambda c: c.group.CreateGroup, request)
        return GroupStart(_group(response.group), tuple(response.start))

    async def claim(
        self,
        group_id: str = "",
        *,
        count: int = 1,
        worker: str = "",
        lease: Seconds = _LEASE_SECONDS,
        request_id: str = "",
    ) -> builtins.list[ClaimedSample]:
        """Take samples to make, each for one worker alone. A claim that runs out is handed out again.

        Args:
            group_id: of which group. Default: of any open one, oldest first.
            count: at most so many, 1 to 1,000.
            worker: who asks.
            lease: how long it may take, 1 s to 7 days.
            request_id: names this claim, so that a program that was restarted gets the same samples while the lease
                lasts. Default: a new one.

        Raises:
            NotFound: there is no such group.
            AlreadyExists: the request id was used for another claim.
        """
        request = pb.ClaimSamplesRequest(
            group_id=group_id,
            count=count,
            worker=worker,
            lease=duration("lease", lease),
            request_id=request_id or options.new_claim_id(),
        )
        response = await self._transport.unary(lambda c: c.group.ClaimSamples, request)
        return [ClaimedSample(one.group_id, one.index, convert.task_of(one.task)) for one in response.samples]

    async def report(
        self,
        group_id: str,
        index: int,
        *,
        reward: float | None = None,
        outcome: SampleOutcome | str = "",
        trajectory_id: str = "",
        reason: str = "",
    ) -> Following:
        """Tell what a sample came to, and learn how many more to start and which to cancel. A repeat is safe.

        Args:
            group_id: which group.
            index: which of its samples.
            reward: what it is trained on. None: it was not scored, and never counts as 0.
            outcome: "positive", "negative" or "unscored". Default: by the reward, positive above 0.
            trajectory_id: its trajectory.
            reason: why it was not scored.

        Raises:
            NotFound: there is no such group.
            InvalidArgument: the sample was not asked for.
            AlreadyExists: it ended otherwise.
        """
        if not outcome:
            outcome = "unscored" if reward is None else "positive" if reward > 0 else "negative"
        sample = pb.Sample(
            index=index,
            trajectory_id=trajectory_id,
            outcome=convert.number_of("outcome", pb.SampleOutcome, "SAMPLE_OUTCOME_", SampleOutcome, outcome),
            reward=reward,
            reason=reason,
        )
        request = pb.ReportSampleRequest(group_id=group_id, sample=sample)
        response = await self._transport.unary(lambda c: c.group.ReportSample, request)
        group = _group(response.group) if response.HasField("group") else None
        return Following(tuple(response.start), tuple(response.cancel), group)

    async def get(self, group_id: str) -> Group:
        """A group with its members, advantages and verdict.

        Raises:
            NotFound: there is none of this id.
        """
        response = await self._transport.unary(lambda c: c.group.GetGroup, pb.GetGroupRequest(group_id=group_id))
        return _group(response.group)

    def list(self, *, closed: bool | None = None, datasets: Sequence[str] = ()) -> AsyncGenerator[Group, None]:
        """Groups, newest first, page by page, without samples and members.

        Args:
            closed: only closed or only open ones. None: both.
            datasets: only these datasets.
        """
        states = {None: pb.GROUP_STATE_UNSPECIFIED, True: pb.GROUP_STATE_CLOSED, False: pb.GROUP_STATE_OPEN}
        request = pb.ListGroupsRequest(page_size=1000, state=states[closed], datasets=datasets)
        return paged(self._transport, lambda c: c.group.ListGroups, request, lambda page: page.groups, _group)


def _plan_message(plan: RolloutPlan) -> pb.RolloutPlan:
    """To the wire, where a 0 would stand for the default.

    Raises:
        InvalidArgument: a number is out of its bounds.
    """
    for name in ("group_size", "maximum", "stride"):
        number = getattr(plan, name)
        if not isinstance(number, int) or not 1 <= number <= _MOST_SAMPLES:
            raise InvalidArgument.of(
                f"plan.{name}", f"must be a whole number from 1 to {_MOST_SAMPLES:,}, not {number!r}"
            )
    return pb.RolloutPlan(
        group_size=plan.group_size,
        maximum=plan.maximum,
        stride=plan.stride,
        low=plan.low,
        high=plan.high,
        need_positive=plan.need_positive,
        eager=plan.eager,
    )


def _group(message: pb.Group) -> Group:
    plan = message.plan
    return Group(
        group_id=message.group_id,
        task=convert.task_of(message.task),
        plan=RolloutPlan(
            plan.group_size, plan.maximum, plan.stride, plan.low, plan.high, plan.need_positive, plan.eager
        ),
        closed=message.state == pb.GROUP_STATE_CLOSED,
        started=message.started,
        samples=tuple(map(_sample, message.samples)),
        members=tuple(Member(_sample(member.sample), member.advantage, member.trainable) for member in message.members),
        short=message.short,
        fallback=message.fallback,
        keep=message.verdict.keep if message.HasField("verdict") else None,
        keep_reason=message.verdict.reason,
        create_time=time_of(message, "create_time"),
        close_time=time_of(message, "close_time"),
    )


def _sample(message: pb.Sample) -> Sample:
    return Sample(
        index=message.index,
        trajectory_id=message.trajectory_id,
        outcome=enum_value(SampleOutcome, pb.SampleOutcome, message.outcome, "SAMPLE_OUTCOME_"),
        reward=message.reward if message.HasField("reward") else None,
        reason=message.reason,
    )
