"""The conversations of a trajectory, and what of them has loss.

Steps form a tree. Each path from a root to a leaf is a conversation; a response that several share is trained in the
first of them only, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchard.data.errors import NoExampleError
from orchard.data.record import Record, is_message, parent_of
from orchard.rewards.credit import RiseSegment, interpolate_values, rise_segments, unresolved_mask
from orchard.trajectory.v1 import trajectory_pb2 as pb

VALUE = "value"
"""Name of a step's value: V of the state in which the model acts, or, at a step after an action, of the state then."""
FINAL_VALUE = "final_value"
"""Name of V of the state after the last action, whatever step it is given at."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One path through a trajectory.

    Attributes:
        number: among the trajectory's conversations, from 0.
        path: indices of its messages.
        loss: for each message whether its tokens have loss.
    """

    number: int
    path: tuple[int, ...]
    loss: tuple[bool, ...]

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices of the steps that have loss."""
        return tuple(step for step, loss in zip(self.path, self.loss, strict=True) if loss)


def conversations(record: Record) -> list[Conversation]:
    """All conversations, by their last step, each response of the model with loss in one of them.

    Copied context and what was handed in never have loss; the latter is no message at all.
    """
    parents = {step.index: parent_of(step) for step in record.steps}
    inner = {parents[step.index] for step in record.steps if is_message(step)}
    taken: set[int] = set()
    found: list[Conversation] = []
    for step in record.steps:
        if not is_message(step) or step.index in inner:
            continue
        path = _path(step.index, parents, record)
        loss = tuple(index not in taken and is_action(record.steps[index]) for index in path)
        taken.update(path)
        found.append(Conversation(len(found), path, loss))
    return found


def _path(leaf: int, parents: dict[int, int], record: Record) -> tuple[int, ...]:
    path = []
    index = leaf
    while index >= 0:
        if is_message(record.steps[index]):
            path.append(index)
        index = parents[index]
    return tuple(reversed(path))


def is_action(step: pb.Step) -> bool:
    """Whether a step is something that the model wrote here."""
    return step.role == pb.ROLE_ASSISTANT and not step.copied_context


def turns(record: Record) -> Iterator[Conversation]:
    """One conversation for each response: what led to it, and loss on it alone."""
    for conversation in conversations(record):
        for position, loss in enumerate(conversation.loss):
            if loss:
                path = conversation.path[: position + 1]
                yield Conversation(conversation.number, path, (False,) * position + (True,))


def rises(record: Record) -> list[Conversation]:
    """A resolved trajectory whole; of an unresolved one what raised the chance to resolve, cut after the last rise.

    Raises:
        NoExampleError: no outcome, no values, values that cannot be, or no rise.
    """
    if record.resolved is None:
        raise NoExampleError("its outcome is no number")
    found = conversations(record)
    if record.resolved:
        return found
    if not record.values_named(VALUE) and not record.values_named(FINAL_VALUE):
        raise NoExampleError("it is unresolved and has no values")
    kept = [cut for conversation in found if (cut := _rising(record, conversation))]
    if not kept:
        raise NoExampleError("it is unresolved and no action raised its value")
    return kept


@dataclass(frozen=True, slots=True)
class Curve:
    """How likely a success was in each state of a conversation. T actions have T + 1 states.

    Attributes:
        actions: indices of the steps that are actions.
        values: V of each state, 0 to 1; linear between given ones, constant outside of them.
        segments: maximal runs of actions that each raised it by at least 0.05.
    """

    actions: tuple[int, ...]
    values: tuple[float, ...]
    segments: tuple[RiseSegment, ...]


def curve_of(record: Record, conversation: Conversation) -> Curve | None:
    """The values of a conversation; None where it has none.

    Raises:
        NoExampleError: they cannot be.
    """
    actions = [index for index in conversation.path if is_action(record.steps[index])]
    states = _states(conversation.path, actions, record.values_named(VALUE))
    for value in record.values_named(FINAL_VALUE).values():
        if states.setdefault(len(actions), value) != value:
            raise NoExampleError("its final state has two different values")
    if not states:
        return None
    try:
        values = interpolate_values(sorted(states.items()), len(actions))
    except ValueError as error:
        raise NoExampleError(f"its values cannot be: {error}") from None
    return Curve(tuple(actions), tuple(values), tuple(rise_segments(values)))


def _rising(record: Record, conversation: Conversation) -> Conversation | None:
    curve = curve_of(record, conversation)
    mask = unresolved_mask(curve.segments) if curve else None
    if curve is None or mask is None:
        return None
    rising = {action for action, loss in zip(curve.actions, mask.loss, strict=False) if loss}
    end = conversation.path.index(curve.actions[mask.kept - 1]) + 1
    owned = dict(zip(conversation.path, conversation.loss, strict=True))
    loss = tuple(index in rising and owned[index] for index in conversation.path[:end])
    return Conversation(conversation.number, conversation.path[:end], loss) if any(loss) else None


def _states(path: tuple[int, ...], actions: list[int], values: dict[int, float]) -> dict[int, float]:
    """V by state: state t is where action t is chosen; one given at an observation is that of the state it led to."""
    states: dict[int, float] = {}
    chosen = set(actions)
    passed = 0
    for index in path:
        if index in values:
            if states.get(passed, values[index]) != values[index]:
                raise NoExampleError(f"the state before action {passed} has two different values")
            states[passed] = values[index]
        passed += index in chosen
    return states
