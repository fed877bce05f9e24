import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from services.common import errors


def unpacked(error: errors.OrchardError, kind: type[Message]) -> list[Message]:
    found = []
    for detail in error.to_status().details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


ALL = [
    errors.InvalidArgumentError.of("a.b", "is wrong"),
    errors.UnauthenticatedError("x"),
    errors.PermissionDeniedError("x"),
    errors.NotFoundError("x", reason="SANDBOX_NOT_FOUND", sandbox_id="sb"),
    errors.AlreadyExistsError("x"),
    errors.OutOfRangeError("x"),
    errors.FailedPreconditionError("x"),
    errors.ResourceExhaustedError("x"),
    errors.UnavailableError("x", retry_seconds=1.25),
    errors.DeadlineExceededError("x"),
    errors.UnimplementedError("x"),
    errors.InternalError("x"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_every_error_carries_error_info(error: errors.OrchardError) -> None:
    (info,) = unpacked(error, error_details_pb2.ErrorInfo)
    assert info.domain == errors.DOMAIN
    assert info.reason == error.reason
    assert info.reason.isupper()
    assert error.to_status().code == error.code.value[0] != grpc.StatusCode.OK.value[0]


def test_variable_text_is_in_the_metadata() -> None:
    (info,) = unpacked(ALL[3], error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"sandbox_id": "sb"}


def test_details_that_fit_each_code() -> None:
    (bad,) = unpacked(ALL[0], error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.b", "is wrong")]
    (retry,) = unpacked(ALL[8], error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1250
    assert unpacked(ALL[6], error_details_pb2.PreconditionFailure)
    assert unpacked(ALL[7], error_details_pb2.QuotaFailure)


def test_codes_are_unique() -> None:
    assert len({error.code for error in ALL}) == len(ALL)
