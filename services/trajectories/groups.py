"""Groups: which samples to start, which attempts make a group, and what a trainer learns from it.

The rules are orchard.rewards: balanced rollout, GRPO advantages, dynamic sampling. Here they meet the database, so that
trainer and service may be restarted at any moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from orchard.rewards.balanced_rollout import BalancedRollout, Outcome, RolloutPlan
from orchard.rewards.balanced_rollout import Group as BarGroup
from orchard.rewards.balanced_rollout import Sample as Attempt
from orchard.rewards.groups import dynamic_sampling, grpo_advantages
from orchard.rewards.scores import Excluded, Score, Scored

from services.common.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from services.trajectories.store.groups import Claim, Closed, Group, GroupStore, LockedGroup, Member, NewGroup, Sample

LEASE_SECONDS: Final = 3600.0
"""Of a claim that names none."""


@dataclass(frozen=True, slots=True)
class Next:
    """What to do after a report: samples to start, samples to cancel, and the group once it is closed."""

    start: tuple[int, ...]
    cancel: tuple[int, ...]
    group: Group | None


class Groups:
    """Groups of every tenant. Each method acts within the tenant it is given."""

    def __init__(self, store: GroupStore, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def create(self, tenant: str, new: NewGroup) -> tuple[Group, Sequence[int]]:
        """Begin a group, or find it; and the samples that somebody has to start.

        Raises:
            AlreadyExistsError: it exists with another task or plan.
        """
        first = BalancedRollout(new.plan).begin().start
        found, same = await self._store.create(tenant, new, first, self._clock())
        if not same:
            raise AlreadyExistsError(
                f"group {new.group_id!r} exists with another task or plan; choose another id",
                reason="GROUP_EXISTS",
                group_id=new.group_id,
            )
        return found, await self._store.unclaimed(found.key, self._clock())

    async def claim(self, tenant: str, claim: Claim) -> Sequence[tuple[Group, int]]:
        """Hand samples to a worker for a time, oldest group first. A repeat gets the first answer.

        Raises:
            NotFoundError: there is no such group.
            AlreadyExistsError: the request id stands for another claim.
        """
        if claim.group_id:
            await self.get(tenant, claim.group_id)
        content_hash = hashlib.sha256(repr(claim).encode()).hexdigest() if claim.request_id else ""
        found = await self._store.claim(tenant, claim, content_hash, self._clock())
        if found is None:
            raise AlreadyExistsError(
                f"request id {claim.request_id!r} was used for another claim; choose another",
                reason="CLAIM_EXISTS",
                request_id=claim.request_id,
            )
        return found

    async def report(self, tenant: str, group_id: str, sample: Sample) -> Next:
        """A sample ended; see GroupService.ReportSample. A repeat gets the first answer."""
        async with self._store.locked(tenant, group_id) as locked:
            if locked is None:
                raise _not_found(group_id)
            if not _is_known(locked.group, sample) and not locked.group.closed:
                await self._keep(locked, sample)
            group, start = await locked.as_it_is(cause=sample.index)
        return Next(tuple(start), group.running if group.closed else (), group if group.closed else None)

    async def _keep(self, locked: LockedGroup, sample: Sample) -> None:
        """Note an end, and what follows from it."""
        group = locked.group
        finished = [Attempt(known.index, known.outcome) for known in group.samples]
        rollout = BalancedRollout(group.plan, group.started, finished)
        try:
            decision = rollout.report(sample.index, sample.outcome)
        except ValueError as error:
            raise InvalidArgumentError.of("sample.index", str(error)) from None
        await locked.ended(sample)
        if decision.start:
            await locked.ask_for(range(group.started, rollout.started), cause=sample.index)
        if decision.group is not None:
            samples = {known.index: known for known in (*group.samples, sample)}
            chosen = [samples[member.index] for member in decision.group.members]
            await locked.close(_closed(group, chosen, decision.group), self._clock())

    async def get(self, tenant: str, group_id: str) -> Group:
        """One group with its samples and members.

        Raises:
            NotFoundError: there is none of this id.
        """
        found = await self._store.get(tenant, group_id)
        if found is None:
            raise _not_found(group_id)
        return found

    async def page(
        self, tenant: str, *, closed: bool | None, datasets: Sequence[str], before: int | None, count: int
    ) -> tuple[Sequence[Group], int | None]:
        """A page of groups without samples, newest first, and the position of its last if more may follow."""
        return await self._store.page(tenant, closed=closed, datasets=datasets, before=before, count=count)


def plan_of(**numbers: float) -> RolloutPlan:
    """A plan.

    Raises:
        InvalidArgumentError: it cannot be.
    """
    try:
        return RolloutPlan(**numbers)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidArgumentError.of("plan", str(error)) from None


def _is_known(group: Group, sample: Sample) -> bool:
    for known in group.samples:
        if known.index == sample.index:
            if known != sample:
                raise AlreadyExistsError(
                    f"sample {sample.index} of group {group.group_id!r} was reported otherwise "
                    f"({known.outcome.value}, reward {known.reward})",
                    reason="SAMPLE_REPORTED",
                    group_id=group.group_id,
                    index=sample.index,
                )
            return True
    return False


def _closed(group: Group, chosen: Sequence[Sample], made: BarGroup) -> Closed:
    """What a trainer learns of the members."""
    scores = [_score(sample) for sample in chosen]
    advantages = grpo_advantages(scores)
    positive = [sample.outcome is Outcome.POSITIVE for sample in chosen] if group.need_positive else None
    verdict = dynamic_sampling(scores, positive=positive)
    members = tuple(
        Member(sample, advantage, trainable)
        for sample, advantage, trainable in zip(chosen, advantages.values, advantages.trainable, strict=True)
    )
    return Closed(members, made.short, made.fallback, verdict.keep, verdict.reason)


def _score(sample: Sample) -> Score:
    if sample.outcome is Outcome.UNSCORED or sample.reward is None:
        return Excluded(sample.reason or "not scored")
    return Scored(sample.reward)


def _not_found(group_id: str) -> NotFoundError:
    return NotFoundError(f"there is no group {group_id!r}", reason="GROUP_NOT_FOUND", group_id=group_id)
