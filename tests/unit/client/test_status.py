"""gRPC statuses to typed errors. The services' own error tree makes the statuses: it is what the client meets."""

from __future__ import annotations

import orchard
import pytest
from orchard._client.status import Failure, error_of, parse_failure

from services.common import errors as platform


def failure_of(error: platform.OrchardError) -> Failure:
    trailing = {"grpc-status-details-bin": error.to_status().SerializeToString(), "orchard-request-id": "req-1"}
    return parse_failure(error.code.name, error.message, trailing)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (platform.InvalidArgumentError.of("spec.cwd", "is wrong"), orchard.InvalidArgument),
        (platform.UnauthenticatedError("x", reason="KEY_INVALID"), orchard.Unauthenticated),
        (platform.PermissionDeniedError("x", reason="ROLE_MISSING"), orchard.PermissionDenied),
        (platform.PermissionDeniedError("x", reason="FILE_PERMISSION_DENIED"), orchard.FilePermissionDenied),
        (platform.NotFoundError("x", reason="SANDBOX_NOT_FOUND"), orchard.SandboxNotFound),
        (platform.NotFoundError("x", sandbox_id="s"), orchard.SandboxNotFound),
        (platform.NotFoundError("x", reason="EXEC_NOT_FOUND", sandbox_id="s"), orchard.ExecNotFound),
        (platform.NotFoundError("x", reason="FILE_NOT_FOUND"), orchard.FileNotFound),
        (platform.NotFoundError("x", reason="IMAGE_NOT_FOUND"), orchard.ImageNotFound),
        (platform.NotFoundError("x", reason="KEY_NOT_FOUND"), orchard.NotFound),
        (platform.AlreadyExistsError("x", reason="FILE_EXISTS"), orchard.FileExists),
        (platform.AlreadyExistsError("x", reason="SANDBOX_EXISTS"), orchard.AlreadyExists),
        (platform.FailedPreconditionError("x", reason="SANDBOX_LOST"), orchard.SandboxLost),
        (platform.FailedPreconditionError("x", reason="EXEC_EXPIRED"), orchard.ExecExpired),
        (platform.FailedPreconditionError("x", reason="CWD_NOT_FOUND"), orchard.CommandNotStarted),
        (platform.FailedPreconditionError("x", reason="IS_A_DIRECTORY"), orchard.IsADirectory),
        (platform.FailedPreconditionError("x", reason="NEW_REASON"), orchard.FailedPrecondition),
        (platform.ResourceExhaustedError("x", reason="NO_SPACE"), orchard.NoSpace),
        (platform.ResourceExhaustedError("x", reason="QUEUE_FULL"), orchard.QuotaExceeded),
        (platform.UnavailableError("x"), orchard.Unavailable),
        (platform.DeadlineExceededError("x"), orchard.DeadlineExceeded),
        (platform.UnimplementedError("x"), orchard.Unimplemented),
        (platform.InternalError("x"), orchard.PlatformError),
    ],
)
def test_each_status_has_its_error(error: platform.OrchardError, kind: type[orchard.OrchardError]) -> None:
    made = error_of(failure_of(error), attempts=2)
    assert type(made) is kind
    assert (made.message, made.reason, made.request_id, made.attempts) == (error.message, error.reason, "req-1", 2)
    assert made.metadata == error.metadata


def test_a_status_that_is_long_for_grpc_is_told_in_its_own_words() -> None:
    error = platform.AlreadyExistsError("a long name", reason="SOMETHING_NEW")
    trailing = {"grpc-status-details-bin": error.to_status().SerializeToString()}
    made = error_of(parse_failure("UNKNOWN", "Stream removed (received metadata size exceeds hard limit)", trailing))
    assert type(made) is orchard.AlreadyExists
    assert made.message == "a long name"


def test_violations_come_through() -> None:
    bad = platform.InvalidArgumentError([platform.Violation("a", "x"), platform.Violation("b", "y")])
    made = error_of(failure_of(bad))
    assert isinstance(made, orchard.InvalidArgument)
    assert made.violations == (orchard.Violation("a", "x"), orchard.Violation("b", "y"))


def test_a_call_to_a_sandbox_is_unavailable_as_such() -> None:
    made = error_of(failure_of(platform.UnavailableError("x")), sandbox_id="s")
    assert type(made) is orchard.SandboxUnavailable


def test_only_what_a_retry_may_mend_is_transient() -> None:
    unavailable = failure_of(platform.UnavailableError("x", retry_seconds=1.5))
    assert unavailable.is_transient
    assert unavailable.retry_seconds == 1.5
    assert not failure_of(platform.InternalError("connection pool broke")).is_transient
    assert not failure_of(platform.DeadlineExceededError("x")).is_transient
    # What gRPC says by itself when a connection breaks has no details.
    assert parse_failure("UNAVAILABLE", "Socket closed", {}).is_transient
    assert parse_failure("INTERNAL", "Received RST_STREAM with error code 2", {}).is_transient
    assert parse_failure("UNKNOWN", "Stream removed", {}).is_transient
    assert parse_failure("CANCELLED", "CANCELLED", {}).is_transient
    assert parse_failure("INTERNAL", "Internal error from Core", {}).is_transient
    assert not parse_failure("INTERNAL", "Exception deserializing response!", {}).is_transient
    assert not parse_failure("RESOURCE_EXHAUSTED", "Received message larger than max", {}).is_transient
    assert not parse_failure("DEADLINE_EXCEEDED", "Deadline Exceeded", {}).is_transient


def test_details_that_cannot_be_read_do_no_harm() -> None:
    failure = parse_failure("NOT_FOUND", "gone", {"grpc-status-details-bin": b"\xff\xff"})
    assert type(error_of(failure)) is orchard.NotFound
