"""The error tree: each domain error owns its gRPC status, ErrorInfo reason and details.

Raise these anywhere; the call interceptor (interceptor.py) turns them into statuses in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from grpc.aio import AioRpcError

DOMAIN: Final = "orchard.dev"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
_DEFAULT_RETRY_SECONDS: Final = 0.5
_TOLD_MOST: Final = 10
_TOLD_BYTES: Final = 1500
"""Of the violations of one error, which its status has three times, once as %F0%9F. One of more than 8 KiB may not
reach its client, who gets RESOURCE_EXHAUSTED in its place."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One bad field: its path in the request, and what is wrong and how to mend it."""

    field: str
    description: str


class OrchardError(Exception):
    """Base of all domain errors.

    Attributes:
        code: the gRPC status code of the class.
        reason: UPPER_SNAKE, stable, for programs.
        message: one sentence for people.
        metadata: every variable part of the message, for programs.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}

    def details(self) -> list[Message]:
        """The google.rpc messages that go with the status."""
        return [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=dict(self.metadata))]

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status of this error."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details():
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


class InvalidArgumentError(OrchardError):
    """The request breaks a field rule. Has every violation found, and tells of the first ones, ten at most."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    def __init__(self, violations: Sequence[Violation], *, reason: str | None = None, **metadata: object) -> None:
        told = _told(violations)
        self._told = len(told)
        if len(violations) > len(told):
            told.append(f"and {len(violations) - len(told):,} more")
        super().__init__("; ".join(told), reason=reason, **metadata)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str, *, reason: str | None = None, **metadata: object) -> InvalidArgumentError:
        """One bad field."""
        return cls([Violation(field, description)], reason=reason, **metadata)

    def details(self) -> list[Message]:
        """ErrorInfo and BadRequest."""
        bad = error_details_pb2.BadRequest()
        for violation in self.violations[: self._told]:
            bad.field_violations.add(field=violation.field, description=violation.description)
        return [*super().details(), bad]


class UnauthenticatedError(OrchardError):
    """No valid credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(OrchardError):
    """Valid credentials that do not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class NotFoundError(OrchardError):
    """What the call names is not there."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExistsError(OrchardError):
    """The name is taken, or the idempotency key was used for something else."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class OutOfRangeError(OrchardError):
    """A position past the end."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class FailedPreconditionError(OrchardError):
    """The thing is in a state in which this cannot be done; retrying alone does not help, unless `retry_seconds` says
    when to look again.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"

    def __init__(
        self, message: str, *, reason: str | None = None, retry_seconds: float = 0.0, **metadata: object
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_seconds = retry_seconds

    def details(self) -> list[Message]:
        """ErrorInfo, PreconditionFailure, and RetryInfo where somebody else may soon change the state."""
        failure = error_details_pb2.PreconditionFailure()
        failure.violations.add(type=self.reason, description=self.message)
        found: list[Message] = [*super().details(), failure]
        if self.retry_seconds:
            found.append(_retry_info(self.retry_seconds))
        return found


class ResourceExhaustedError(OrchardError):
    """A quota or limit is used up."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"

    def details(self) -> list[Message]:
        """ErrorInfo and QuotaFailure."""
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=self.reason, description=self.message)
        return [*super().details(), failure]


class AbortedError(OrchardError):
    """Somebody else changed the same thing; read it again before anything else is tried."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class UnavailableError(OrchardError):
    """A dependency is away or the server stops: retry after the given delay."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_seconds: float = _DEFAULT_RETRY_SECONDS,
        **metadata: object,
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_seconds = retry_seconds

    @property
    def cause(self) -> str:
        """The words of what it was raised from, such as a driver's; for logs alone."""
        return str(self.__cause__ or "").partition("\n(Background on this error")[0]

    def details(self) -> list[Message]:
        """ErrorInfo and RetryInfo."""
        return [*super().details(), _retry_info(self.retry_seconds)]


class DeadlineExceededError(OrchardError):
    """The call took longer than it may."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class UnimplementedError(OrchardError):
    """This deployment does not have it."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


def reason_of(error: AioRpcError) -> str:
    """The reason that another service of ours gave for an error; empty if there is none."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for detail in status.details if detail.Unpack(info)), "")


def _told(violations: Sequence[Violation]) -> list[str]:
    """The first ones, as text: one at least, and no more than fit into a status."""
    told: list[str] = []
    size = 0
    for violation in violations[:_TOLD_MOST]:
        text = f"{violation.field}: {violation.description}"
        size += len(text.encode())
        if told and size > _TOLD_BYTES:
            break
        told.append(text)
    return told


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(seconds * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


class InternalError(OrchardError):
    """A fault of ours. The message names the request id under which the log has the rest."""
