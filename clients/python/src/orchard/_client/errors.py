"""Every error that the SDK raises, each with a stable reason for programs and one sentence for people.

Errors of files also derive from Python's own (`FileNotFound` is a `FileNotFoundError`), so existing `except` clauses
keep working. All of them survive pickling, since workers send them across processes.
"""

# ruff: noqa: N818 (the names say what happened; "Error" would add nothing)

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    # For types alone: a result's check() raises errors that hold it.
    from orchard._client.types import ExecResult, PatchResult


@dataclass(frozen=True)
class Violation:
    """One bad field of a request."""

    field: str
    """Its path in the request."""
    description: str
    """What is wrong with it and how to mend it."""


class OrchardError(Exception):
    """Base of every error of the platform and the SDK.

    Attributes:
        message: one sentence for people.
        reason: UPPER_SNAKE and stable, for programs.
        metadata: every variable part of the message.
        request_id: the id under which the platform logged the call; empty if no call was made.
        attempts: how often the call was tried.
    """

    default_reason: ClassVar[str] = "ERROR"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        request_id: str = "",
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.request_id = request_id
        self.attempts = attempts

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(kind: type[OrchardError], message: str, state: dict[str, Any]) -> OrchardError:
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigurationError(OrchardError):
    """No connection profile, or one that cannot be used."""

    default_reason = "NO_PROFILE"


class InvalidArgument(OrchardError, ValueError):
    """A value breaks a rule, or is of another type; `violations` names every field."""

    default_reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, violations: Sequence[Violation] = (), **rest: Any) -> None:
        super().__init__(message, **rest)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidArgument:
        """One bad field."""
        return cls(f"{field}: {description}", violations=(Violation(field, description),))


class Unauthenticated(OrchardError):
    """The API key is missing, wrong, expired or revoked."""

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(OrchardError):
    """The API key does not allow this."""

    default_reason = "PERMISSION_DENIED"


class NotFound(OrchardError):
    """What the call names is not there."""

    default_reason = "NOT_FOUND"


class SandboxNotFound(NotFound):
    """No sandbox of this id, or it ended more than a day ago."""

    default_reason = "SANDBOX_NOT_FOUND"


class ExecNotFound(NotFound):
    """The sandbox knows no command of this id."""

    default_reason = "EXEC_NOT_FOUND"


class ImageNotFound(NotFound):
    """The image was never imported."""

    default_reason = "IMAGE_NOT_FOUND"


class AlreadyExists(OrchardError):
    """The id is taken, or was used for something else."""

    default_reason = "ALREADY_EXISTS"


class FailedPrecondition(OrchardError):
    """The thing is in a state in which this cannot be done; retrying alone does not help."""

    default_reason = "FAILED_PRECONDITION"


class OutOfRange(OrchardError):
    """A position past the end."""

    default_reason = "OUT_OF_RANGE"


class SandboxLost(FailedPrecondition):
    """The sandbox has ended; `lost_reason` says why (EXPIRED, OOM, NODE_LOST, ...)."""

    default_reason = "SANDBOX_LOST"

    @property
    def lost_reason(self) -> str:
        """Why it ended; empty if the platform did not say."""
        return self.metadata.get("lost_reason") or self.metadata.get("reason", "")


class PortRefused(FailedPrecondition, ConnectionRefusedError):
    """Nothing listens on the port inside the sandbox."""

    default_reason = "PORT_REFUSED"
    errno = errno.ECONNREFUSED


class PortInUse(FailedPrecondition, OSError):
    """The port that was to be listened on is taken: on this machine (LOCAL_PORT_IN_USE) or inside the sandbox
    (PORT_IN_USE).
    """

    default_reason = "PORT_IN_USE"
    errno = errno.EADDRINUSE


class SandboxStartFailed(OrchardError):
    """The sandbox did not become ready; `reason` is the platform's (IMAGE_PULL, UNSCHEDULABLE, AGENT_START, ...)."""

    default_reason = "START_FAILED"


class TrajectoryNotFound(NotFound):
    """No trajectory of this id."""

    default_reason = "TRAJECTORY_NOT_FOUND"


class TrajectorySealed(FailedPrecondition):
    """The trajectory was sealed: nothing can be appended, and it cannot be sealed with another status."""

    default_reason = "TRAJECTORY_SEALED"


class Conflict(OrchardError):
    """Somebody else was quicker; look before trying again."""

    default_reason = "ABORTED"


class WriterConflict(Conflict):
    """Another writer has the trajectory; `open(trajectory_id, take_over=True)` writes in its place."""

    default_reason = "WRITER_CONFLICT"


class StepConflict(Conflict):
    """Other steps are stored at these indices. `next_index` in the metadata is the first free one."""

    default_reason = "STEP_CONFLICT"


class RecordingIncomplete(OrchardError):
    """Some of a recording could not be stored, `lost` steps of it; the trajectory is ABORTED where that could be told.
    `__cause__` is why.
    """

    default_reason = "RECORDING_INCOMPLETE"

    def __init__(self, message: str, *, lost: int = 0, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.lost = lost


class ExecExpired(FailedPrecondition):
    """The command ended so long ago that its result is no longer kept."""

    default_reason = "EXEC_EXPIRED"


class StdinClosed(FailedPrecondition):
    """The command takes no more input: it has closed its standard input or has ended, or the end was sent."""

    default_reason = "STDIN_CLOSED"


class CommandNotStarted(FailedPrecondition):
    """The command could not start; `reason` is one of COMMAND_NOT_FOUND, COMMAND_NOT_EXECUTABLE, CWD_NOT_FOUND,
    CWD_NOT_A_DIRECTORY, CWD_NOT_ACCESSIBLE, SHELL_NOT_FOUND, USER_NOT_FOUND, USER_NOT_AVAILABLE, PTY_UNAVAILABLE, or
    NOT_STARTED when it left the queue without having run.
    """

    default_reason = "NOT_STARTED"


class CommandInterrupted(OrchardError):
    """The platform, not the command, ended it (AGENT_RESTARTED, ORPHANED). `result` has what it wrote until then."""

    default_reason = "INTERRUPTED"

    def __init__(self, message: str, *, result: ExecResult | None = None, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.result = result


class CommandFailed(OrchardError):
    """A checked command did not exit with 0; `result` has its output."""

    default_reason = "COMMAND_FAILED"

    def __init__(self, message: str, *, result: ExecResult, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.result = result


class CommandTimeout(CommandFailed, TimeoutError):
    """The command was ended by its timeout; `result` has its output until then."""

    default_reason = "TIMED_OUT"


class OutputLimitExceeded(CommandFailed):
    """The command wrote more than its output limit; `result` has its output until then."""

    default_reason = "OUTPUT_LIMIT"


class FileNotFound(NotFound, FileNotFoundError):
    """No such file or directory in the sandbox."""

    default_reason = "FILE_NOT_FOUND"
    errno = errno.ENOENT


class IsADirectory(FailedPrecondition, IsADirectoryError):
    """A directory stands where a file is needed."""

    default_reason = "IS_A_DIRECTORY"
    errno = errno.EISDIR


class NotADirectory(FailedPrecondition, NotADirectoryError):
    """Something else stands where a directory is needed."""

    default_reason = "NOT_A_DIRECTORY"
    errno = errno.ENOTDIR


class DirectoryNotEmpty(FailedPrecondition, OSError):
    """The directory has entries; remove it with recursive=True."""

    default_reason = "DIRECTORY_NOT_EMPTY"
    errno = errno.ENOTEMPTY


class FileExists(AlreadyExists, FileExistsError):
    """Something stands at this path already."""

    default_reason = "FILE_EXISTS"
    errno = errno.EEXIST


class FilePermissionDenied(PermissionDenied, PermissionError):
    """The sandbox's user may not do this to the file."""

    default_reason = "FILE_PERMISSION_DENIED"
    errno = errno.EACCES


class QuotaExceeded(OrchardError):
    """A quota or limit is used up."""

    default_reason = "RESOURCE_EXHAUSTED"


class NoSpace(QuotaExceeded, OSError):
    """The sandbox's disk is full."""

    default_reason = "NO_SPACE"
    errno = errno.ENOSPC


class PatchFailed(OrchardError):
    """The patch does not fit, and nothing was changed (with partial=True: not all of it was). `result` has each
    hunk.
    """

    default_reason = "PATCH_FAILED"

    def __init__(self, message: str, *, result: PatchResult, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.result = result


class UnsafeArchive(OrchardError):
    """A downloaded folder has an entry that would leave the target; nothing was unpacked."""

    default_reason = "UNSAFE_ARCHIVE"


class Unavailable(OrchardError):
    """The platform did not answer, retries included."""

    default_reason = "UNAVAILABLE"


class SandboxUnavailable(Unavailable):
    """The sandbox could not be reached, retries included. It may still be alive."""

    default_reason = "SANDBOX_UNAVAILABLE"


class OutcomeUnknown(Unavailable):
    """The connection broke, and whether the call was carried out before that cannot be told any more."""

    default_reason = "OUTCOME_UNKNOWN"


class DeadlineExceeded(OrchardError, TimeoutError):
    """A call or a wait took longer than it may."""

    default_reason = "DEADLINE_EXCEEDED"


class Unimplemented(OrchardError):
    """This deployment does not have it."""

    default_reason = "UNIMPLEMENTED"


class PlatformError(OrchardError):
    """A fault of the platform; its log has the rest under `request_id`."""

    default_reason = "INTERNAL"


class ClientClosed(OrchardError):
    """The client was closed."""

    default_reason = "CLIENT_CLOSED"
