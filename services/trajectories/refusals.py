"""Why a trajectory is not made, judged or sealed as asked: the errors, for one and for many at once."""

from __future__ import annotations

from services.common.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    OrchardError,
)
from services.trajectories.model import Annotation, Status


def not_found(trajectory_id: str) -> NotFoundError:
    """There is none of this id."""
    return NotFoundError(
        f"there is no trajectory {trajectory_id!r}", reason="TRAJECTORY_NOT_FOUND", trajectory_id=trajectory_id
    )


def described_otherwise(trajectory_id: str) -> AlreadyExistsError:
    """It is there, and not what was to be made."""
    return AlreadyExistsError(
        f"trajectory {trajectory_id!r} exists with another description; choose another id",
        reason="TRAJECTORY_EXISTS",
        trajectory_id=trajectory_id,
    )


def written_by_another(trajectory_id: str) -> AbortedError:
    """It is open, and somebody else's."""
    return AbortedError(
        f"another writer has trajectory {trajectory_id!r}; set take_over to write in its place",
        reason="WRITER_CONFLICT",
        trajectory_id=trajectory_id,
    )


def not_sealed(
    trajectory_id: str, *, now: Status, steps: int, wanted: Status, expected: int | None
) -> FailedPreconditionError | None:
    """Why one that was not sealed just now is not as a seal would leave it; None where it is."""
    if now is Status.OPEN:
        return FailedPreconditionError(
            f"trajectory {trajectory_id!r} has {steps} steps, not {expected}; append the rest",
            reason="STEPS_MISSING",
            trajectory_id=trajectory_id,
            next_index=steps,
        )
    if now is not wanted:
        return FailedPreconditionError(
            f"trajectory {trajectory_id!r} was sealed as {now.name}",
            reason="TRAJECTORY_SEALED",
            trajectory_id=trajectory_id,
            status=now.name,
        )
    return None


def not_annotated(outcome: str, trajectory_id: str, annotation: Annotation, steps: int) -> OrchardError | None:
    """Why an annotation was not added, by what the store says; None where it is there."""
    if outcome == "missing":
        return not_found(trajectory_id)
    if outcome == "ahead":
        position, value = next(pair for pair in enumerate(annotation.step_values) if pair[1].index > steps)
        return FailedPreconditionError(
            f"step_values[{position}] is of step {value.index}; the trajectory has {steps}",
            reason="STEP_NOT_FOUND",
            trajectory_id=trajectory_id,
        )
    if outcome == "other":
        return AlreadyExistsError(
            f"annotation id {annotation.annotation_id!r} was used with other content; choose another",
            reason="ANNOTATION_EXISTS",
            annotation_id=annotation.annotation_id,
        )
    return None
