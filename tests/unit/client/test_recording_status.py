"""How a recording is sealed after each error that there is: failures of infrastructure are never results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from orchard import TrajectoryStatus
from orchard._client import errors
from orchard._client.trajectories.recording import status_after

RESULTS = (
    errors.InvalidArgument,
    errors.NotFound,
    errors.AlreadyExists,
    errors.FailedPrecondition,
    errors.OutOfRange,
    errors.CommandNotStarted,
    errors.CommandFailed,
    errors.CommandTimeout,
    errors.OutputLimitExceeded,
    errors.FileNotFound,
    errors.IsADirectory,
    errors.NotADirectory,
    errors.DirectoryNotEmpty,
    errors.FileExists,
    errors.FilePermissionDenied,
    errors.PatchFailed,
    errors.PortRefused,
    errors.StdinClosed,
    errors.UnsafeArchive,
)
INFRASTRUCTURE = (
    errors.ConfigurationError,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.SandboxNotFound,
    errors.ExecNotFound,
    errors.ImageNotFound,
    errors.SandboxLost,
    errors.SandboxStartFailed,
    errors.TrajectoryNotFound,
    errors.TrajectorySealed,
    errors.Conflict,
    errors.WriterConflict,
    errors.StepConflict,
    errors.RecordingIncomplete,
    errors.ExecExpired,
    errors.CommandInterrupted,
    errors.PortInUse,
    errors.QuotaExceeded,
    errors.NoSpace,
    errors.Unavailable,
    errors.SandboxUnavailable,
    errors.OutcomeUnknown,
    errors.DeadlineExceeded,
    errors.Unimplemented,
    errors.PlatformError,
    errors.ClientClosed,
)


def below(kind: type[errors.OrchardError]) -> Iterator[type[errors.OrchardError]]:
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
        yield from below(one)


def made(kind: type[BaseException]) -> BaseException:
    error = kind.__new__(kind, "why")
    BaseException.__init__(error, "why")
    if isinstance(error, errors.OrchardError):
        error.message = "why"
    return error


def test_every_error_of_the_platform_is_decided_on() -> None:
    assert sorted(kind.__name__ for kind in set(below(errors.OrchardError))) == sorted(
        kind.__name__ for kind in (*RESULTS, *INFRASTRUCTURE)
    )


@pytest.mark.parametrize("kind", RESULTS)
def test_what_the_agents_own_doing_came_to_is_a_result(kind: type[errors.OrchardError]) -> None:
    status, message = status_after(made(kind))
    assert (status, message) == (TrajectoryStatus.FAILED, f"{kind.__name__}: why")


@pytest.mark.parametrize(
    "kind",
    [
        *INFRASTRUCTURE,
        TimeoutError,
        ConnectionResetError,
        asyncio.CancelledError,
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
    ],
)
def test_what_is_not_the_agents_doing_aborts(kind: type[BaseException]) -> None:
    status, message = status_after(made(kind))
    assert (status, message) == (TrajectoryStatus.ABORTED, f"{kind.__name__}: why")
    # Whatever happened beside it, or because of it.
    group = BaseExceptionGroup("tools", [ValueError("x"), BaseExceptionGroup("more", [made(kind)])])
    assert status_after(group)[0] is TrajectoryStatus.ABORTED


@pytest.mark.parametrize("kind", [ValueError, KeyError, AssertionError, OSError, FileNotFoundError, PermissionError])
def test_the_programs_own_errors_are_results(kind: type[Exception]) -> None:
    assert status_after(kind("why"))[0] is TrajectoryStatus.FAILED


def test_no_error_completes() -> None:
    assert status_after(None) == (TrajectoryStatus.COMPLETED, "")
