"""The deployment and the runtime of SWE-ReX: sandboxes, their commands, files and sessions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.utils.log import get_logger

from orchard._client import errors
from orchard._client.sandbox import AsyncSandbox
from orchard._client.types import ExecResult
from orchard.harness._clients import LOOP_CLIENTS
from orchard.harness._results import refusal, remark, shell_status
from orchard.harness.swe_rex.session import BashSession

_HEARTBEAT_SECONDS: Final = 300.0
_ALIVE_SECONDS: Final = 10.0


class OrchardDeploymentConfig(BaseModel):
    """Options of the deployment; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid")

    image: str = ""
    """What the sandbox starts from. Empty: the host's root file system, on one machine with the process runtime."""
    endpoint: str = ""
    """Where the platform is. Empty: ORCHARD_ENDPOINT, else the profile of `orchard up`. The key is ORCHARD_API_KEY, or
    the profile's.
    """
    startup_timeout: float = 1800
    """How long it may take to be ready, queue and image pull included. Seconds."""
    sandbox_options: dict[str, Any] = {}
    """Further options of SandboxClient.create, such as cpu, memory, network, env, labels."""

    def get_deployment(self) -> OrchardDeployment:
        """The deployment, as of SWE-ReX's own configurations."""
        return OrchardDeployment.from_config(self)


class OrchardDeployment(AbstractDeployment):  # type: ignore[misc]
    """A sandbox, from start() to stop(). Missed stops are made up for by its lease."""

    def __init__(self, *, logger: logging.Logger | None = None, **options: Any) -> None:
        """`options`: fields of OrchardDeploymentConfig."""
        self.logger = logger or get_logger("rex-deploy")
        self._config = OrchardDeploymentConfig(**options)
        self._hooks = CombinedDeploymentHook()
        self._runtime: OrchardRuntime | None = None

    @classmethod
    def from_config(cls, config: OrchardDeploymentConfig) -> Self:
        """The deployment of a configuration."""
        return cls(**config.model_dump())

    def add_hook(self, hook: DeploymentHook) -> None:
        """Tell it of steps."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox answers, within `timeout` seconds.

        Raises:
            DeploymentNotStartedError: start() was not called.
        """
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        """Make the sandbox and wait until it is ready. Cancelled or failing, it leaves none behind.

        Raises:
            DeploymentStartupError: it could not be made.
        """
        del args, kwargs
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Starting sandbox")
        config = self._config
        options: dict[str, Any] = {"heartbeat_timeout": _HEARTBEAT_SECONDS, **config.sandbox_options}
        client = LOOP_CLIENTS.acquire(config.endpoint)
        try:
            sandbox = await client.create(
                config.image or None, timeout=config.startup_timeout, keep_alive=True, **options
            )
        except BaseException as error:
            await LOOP_CLIENTS.release(config.endpoint)
            if isinstance(error, errors.OrchardError):
                raise DeploymentStartupError(f"{error.reason}: {error}") from error
            raise
        self._runtime = OrchardRuntime(sandbox, logger=self.logger)
        self.logger.info("sandbox %s is ready", sandbox.sandbox_id)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        """End the sandbox with everything in it. Repeatable."""
        del args, kwargs
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        try:
            await runtime.sandbox.delete()
        except errors.Unavailable as error:
            self.logger.warning("sandbox %s is left to its lease: %s", runtime.sandbox.sandbox_id, error)
        finally:
            await LOOP_CLIENTS.release(self._config.endpoint)

    @property
    def runtime(self) -> OrchardRuntime:
        """What runs commands.

        Raises:
            DeploymentNotStartedError: start() was not called.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


class OrchardRuntime(AbstractRuntime):  # type: ignore[misc]
    """Commands, files and sessions of a sandbox.

    What the platform fails to do is its own error (SandboxLost, SandboxUnavailable, ...), and no result.
    """

    def __init__(self, sandbox: AsyncSandbox, *, logger: logging.Logger | None = None) -> None:
        """`sandbox`: one that is ready. Who made it deletes it."""
        self.logger = logger or get_logger("rex-runtime")
        self._sandbox = sandbox
        self._sessions: dict[str, BashSession] = {}

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox itself, for patches, ports and streams."""
        return self._sandbox

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether the sandbox answers, within `timeout` seconds (10)."""
        try:
            result = await self._sandbox.exec(["/"], timeout=timeout or _ALIVE_SECONDS, concurrent=True)
        except errors.CommandNotStarted:
            # Its agent has looked: a directory is no program.
            return IsAliveResponse(is_alive=True)
        except errors.OrchardError as error:
            return IsAliveResponse(is_alive=False, message=f"{error.reason}: {error}")
        return IsAliveResponse(is_alive=True, message=str(result.ended))

    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        """Start a shell that keeps its directory and variables.

        Raises:
            SessionExistsError: there is one of this name.
        """
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session!r} already exists")
        session = BashSession(self._sandbox, request.session)
        self._sessions[request.session] = session
        try:
            output = await session.start(request.startup_source, request.startup_timeout)
        except BaseException:
            self._sessions.pop(request.session, None)  # close() may have taken it
            raise
        return CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: Action) -> Observation:
        """Run a command in a session.

        Raises:
            SessionDoesNotExistError: there is none of this name.
            BashIncorrectSyntaxError: it is no bash; nothing was run.
            CommandTimeoutError: it took too long; interrupt it, or close the session.
            NonZeroExitCodeError: it failed, with check "raise".
        """
        return await self._session(action.session).run(action)

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        """End a session with all that runs in it.

        Raises:
            SessionDoesNotExistError: there is none of this name.
        """
        await self._session(request.session).close()
        self._sessions.pop(request.session, None)
        return CloseBashSessionResponse()

    def _session(self, name: str) -> BashSession:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    async def execute(self, command: Command) -> CommandResponse:
        """Run a command outside of sessions.

        Raises:
            CommandTimeoutError: its timeout ended it, and all that it had started.
            NonZeroExitCodeError: it failed, with `check`.
        """
        options: dict[str, Any] = {"env": command.env or {}, "cwd": command.cwd or ""}
        line = command.command
        if command.shell and not isinstance(line, str):
            # As subprocess: the first is the script, the rest its parameters.
            line = ["sh", "-c", *line]
        elif not command.shell and isinstance(line, str):
            line = [line]
        try:
            result = await self._sandbox.exec(
                line, timeout=command.timeout, merge_stderr=command.merge_output_streams, concurrent=True, **options
            )
        except (errors.CommandNotStarted, errors.InvalidArgument) as error:
            status = refusal(error)
            if status is None:
                raise
            response = CommandResponse(stdout="", stderr=f"{error}\n", exit_code=status)
        else:
            if result.timed_out:
                raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
            response = _response(result)
        if command.check and response.exit_code != 0:
            said = f"Command {command.command!r} failed with exit code {response.exit_code}. "
            said += f"Stdout:\n{response.stdout!r}\nStderr:\n{response.stderr!r}"
            raise NonZeroExitCodeError(f"{command.error_msg}: {said}" if command.error_msg else said)
        return response

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """Read a text file.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError, UnicodeDecodeError: as their names say.
        """
        data = await self._sandbox.read_file(request.path)
        return ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Write a text file, whole or not at all, and the folders above it."""
        await self._sandbox.write_file(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copy a local file or folder into the sandbox."""
        await self._sandbox.upload(request.source_path, request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """End all sessions."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            with _gone_already():
                await session.close()
        return CloseResponse()


@contextlib.contextmanager
def _gone_already() -> Iterator[None]:
    with contextlib.suppress(errors.SandboxLost, errors.NotFound):
        yield


def _response(result: ExecResult) -> CommandResponse:
    stdout = result.stdout_bytes.decode(errors="backslashreplace")
    stderr = result.stderr_bytes.decode(errors="backslashreplace")
    why = remark(result)
    return CommandResponse(stdout=stdout, stderr=f"{stderr}{why}\n" if why else stderr, exit_code=shell_status(result))
