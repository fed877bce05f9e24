"""The one place that turns a gRPC status with google.rpc details into an error of errors.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from orchard._client import errors

DETAILS_KEY: Final = "grpc-status-details-bin"
REQUEST_ID_KEY: Final = "orchard-request-id"

_CODES: Final[Mapping[int, str]] = {number: name for name, number in code_pb2.Code.items()}
_BY_CODE: Final[Mapping[str, type[errors.OrchardError]]] = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "ABORTED": errors.Conflict,
    "OUT_OF_RANGE": errors.OutOfRange,
    "RESOURCE_EXHAUSTED": errors.QuotaExceeded,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "UNIMPLEMENTED": errors.Unimplemented,
}
_NOT_STARTED: Final = (
    "COMMAND_NOT_FOUND",
    "COMMAND_NOT_EXECUTABLE",
    "CWD_NOT_FOUND",
    "CWD_NOT_A_DIRECTORY",
    "CWD_NOT_ACCESSIBLE",
    "SHELL_NOT_FOUND",
    "USER_NOT_FOUND",
    "USER_NOT_AVAILABLE",
    "PTY_UNAVAILABLE",
)
_BY_REASON: Final[Mapping[str, type[errors.OrchardError]]] = {
    **dict.fromkeys(_NOT_STARTED, errors.CommandNotStarted),
    **{
        kind.default_reason: kind
        for kind in (
            errors.SandboxNotFound,
            errors.ExecNotFound,
            errors.ImageNotFound,
            errors.TrajectoryNotFound,
            errors.TrajectorySealed,
            errors.WriterConflict,
            errors.StepConflict,
            errors.SandboxLost,
            errors.ExecExpired,
            errors.StdinClosed,
            errors.FileNotFound,
            errors.IsADirectory,
            errors.NotADirectory,
            errors.DirectoryNotEmpty,
            errors.FileExists,
            errors.FilePermissionDenied,
            errors.NoSpace,
            errors.PortRefused,
            errors.PortInUse,
        )
    },
}
# What gRPC itself says when a connection breaks under a call; these carry no details of ours.
_TRANSPORT_CODES: Final = frozenset({"CANCELLED", "INTERNAL", "UNKNOWN"})
_TRANSPORT_WORDS: Final = (
    "rst_stream",
    "goaway",
    "stream removed",
    "socket closed",
    "connection",
    "http2",
    "transport",
    # A message was sent on a call that had just ended; it hides the status with which it did.
    "internal error from core",
)
# Transient failures before an agent was given anything to do.
_BEFORE_THE_AGENT: Final = ("SANDBOXES_UNSEEN", "SANDBOX_STARTING", "SECRET_ENV_PENDING")
_NOT_SENT: Final = ("failed to connect to all addresses", "dns resolution failed")


@dataclass(frozen=True, slots=True)
class Failure:
    """A call's failure, independent of gRPC's own classes."""

    code: str
    message: str
    request_id: str = ""
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[errors.Violation, ...] = ()
    retry_seconds: float = 0.0
    from_platform: bool = False

    @property
    def may_have_acted(self) -> bool:
        """Whether the call may have reached who carries it out."""
        if self.from_platform:
            return self.reason not in _BEFORE_THE_AGENT
        return not any(word in self.message.lower() for word in _NOT_SENT)

    @property
    def is_transient(self) -> bool:
        """Whether repeating an idempotent call may help: UNAVAILABLE, or a connection that broke under the call."""
        if self.code == "UNAVAILABLE":
            return True
        if self.from_platform or self.code not in _TRANSPORT_CODES:
            return False
        text = self.message.lower()
        return self.code == "CANCELLED" or any(word in text for word in _TRANSPORT_WORDS)


class CallFailed(Exception):  # noqa: N818
    """Carries a Failure from the transport to whoever decides about it; never leaves the SDK."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def call_failed(error: Any, request_id: str) -> CallFailed:
    """What to raise for gRPC's own error of a call that carried this request id."""
    trailing = {str(key): value for key, value in error.trailing_metadata() or ()}
    trailing.setdefault(REQUEST_ID_KEY, request_id)
    return CallFailed(parse_failure(error.code().name, error.details() or "", trailing))


def parse_failure(code: str, message: str, trailing: Mapping[str, str | bytes]) -> Failure:
    """Read a status and its google.rpc details."""
    request_id = trailing.get(REQUEST_ID_KEY, "")
    request_id = request_id.decode() if isinstance(request_id, bytes) else request_id
    raw = trailing.get(DETAILS_KEY)
    if not isinstance(raw, bytes):
        return Failure(code, message, request_id)
    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        return Failure(code, message, request_id)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for target in (info, bad, retry):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    if info.reason and status.code in _CODES:
        # Of a long status gRPC says in its own words that it is long, and under another code.
        code, message = _CODES[status.code], status.message
    return Failure(
        code,
        message,
        request_id,
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=tuple(errors.Violation(v.field, v.description) for v in bad.field_violations),
        retry_seconds=retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9,
        from_platform=bool(info.reason),
    )


def error_of(failure: Failure, *, sandbox_id: str = "", attempts: int = 1) -> errors.OrchardError:
    """The typed error of a failure. `sandbox_id` is that of a call that goes to a sandbox."""
    kind = _BY_REASON.get(failure.reason) or _BY_CODE.get(failure.code, errors.PlatformError)
    if kind is errors.Unavailable and sandbox_id:
        kind = errors.SandboxUnavailable
    if kind is errors.NotFound and failure.reason in ("", "NOT_FOUND") and "sandbox_id" in failure.metadata:
        kind = errors.SandboxNotFound
    message = failure.message or f"the platform answered {failure.code}"
    rest = {
        "reason": failure.reason,
        "metadata": failure.metadata,
        "request_id": failure.request_id,
        "attempts": attempts,
    }
    if issubclass(kind, errors.InvalidArgument):
        return kind(message, violations=failure.violations, **rest)
    return kind(message, **rest)  # type: ignore[arg-type]
