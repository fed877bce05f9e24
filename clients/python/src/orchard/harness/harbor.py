"""Harbor's tasks in Orchard sandboxes: `harbor run -e orchard.harness.harbor:OrchardEnvironment ...`.

Needs Python 3.12, as Harbor does. Options are `--ek NAME=VALUE`: see OrchardOptions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import (
    DOCKERFILE_NAME,
    effective_exec_cwd,
    parse_dockerfile_workdir,
    should_upload_environment_dir,
)
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode
from harbor.models.trial.config import ResourceMode
from harbor.models.trial.paths import EnvironmentPaths
from harbor.trial.errors import EnvironmentStartTimeoutError
from pydantic import Field

from orchard._client import errors
from orchard._client.profile import load_profile
from orchard._client.sandbox import AsyncSandbox
from orchard._client.types import ExecEnd
from orchard._client.types import ExecResult as CommandResult
from orchard.harness._clients import LOOP_CLIENTS
from orchard.harness._results import refusal, remark, shell_status

# As of the program `timeout`, which other environments of Harbor run commands by.
TIMED_OUT: Final = 124


class RuntimeRequestError(errors.OrchardError):
    """The platform failed. Harbor knows errors by the names of their classes: one of this name is tried again, is not
    graded and has no reward, while one that it does not know counts as a valid reward of zero.
    """

    default_reason = "RUNTIME_REQUEST"


class MemoryLimitExceededError(errors.OrchardError):
    """The sandbox ran out of memory and ended; Harbor tries again and does not grade."""

    default_reason = "OOM"


class OrchardOptions(EnvironmentOptions):  # type: ignore[misc]
    """Options of the environment, as `--ek NAME=VALUE`."""

    image: str | None = Field(
        default=None,
        description="Instead of the task's docker_image. Empty: the host's root file system (process runtime).",
    )
    network: str = Field(
        default="open", description='Network of a task that is public: "open", "host", "none" or "allow:NAME".'
    )
    endpoint: str = Field(default="", description="Where the platform is. Default: ORCHARD_ENDPOINT, else the profile.")
    create_timeout: float = Field(default=86_400, description="How long a sandbox may take to be ready. Seconds.")
    heartbeat_timeout: float = Field(
        default=300, description="A sandbox is deleted this long after Harbor was killed. Seconds."
    )
    sandbox: dict[str, Any] = Field(
        default_factory=dict, description="Further options of SandboxClient.create, such as labels, ttl, shm."
    )


class OrchardEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A sandbox of a trial.

    Tasks name an image that exists (docker_image, or the option image): a Dockerfile is not built here. Public tasks
    get the network that the option names, tasks without network get none; allow-lists of hosts are refused.
    """

    options_model: ClassVar[type[EnvironmentOptions]] = OrchardOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See BaseEnvironment."""
        self._sandbox: AsyncSandbox | None = None
        super().__init__(*args, **kwargs)
        dockerfile = self.environment_dir / DOCKERFILE_NAME
        workdir = parse_dockerfile_workdir(dockerfile) if dockerfile.is_file() else None
        self._workdir: str | None = effective_exec_cwd(None, self.task_env_config.workdir, workdir)

    @staticmethod
    def type() -> str:
        """Its name in results."""
        return "orchard"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """What tasks may ask for."""
        return EnvironmentCapabilities(gpus=True, disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities | None:
        """CPUs and memory are limits."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Check options and connection profile before any trial.

        Raises:
            ValueError: an option is wrong.
            SystemExit: there is no endpoint or key.
        """
        super().preflight(kwargs)
        try:
            load_profile((kwargs or {}).get("endpoint") or None, None)
        except errors.ConfigurationError as error:
            raise SystemExit(str(error)) from error

    def _validate_definition(self) -> None:
        if self._image is None:
            raise ValueError(
                f"the task {self.environment_name!r} names no docker_image, and Orchard builds no Dockerfile: build "
                "and push it, and name it with --ek image=NAME"
            )

    @property
    def _image(self) -> str | None:
        image: str | None = self.options.image
        return self.task_env_config.docker_image if image is None else image

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox itself.

        Raises:
            RuntimeRequestError: the environment was not started.
        """
        if self._sandbox is None:
            raise RuntimeRequestError("the environment was not started, or is stopped")
        return self._sandbox

    async def start(self, force_build: bool) -> None:
        """Make the sandbox and the folders that Harbor expects. Cancelled or failing, it leaves none behind.

        Raises:
            SandboxBuildFailedError: the task asks for what is not there, or was refused.
            EnvironmentStartTimeoutError: it is not ready in time.
            RuntimeRequestError: the platform failed.
        """
        if force_build:
            self.logger.debug("Orchard builds nothing; the image is used as it is")
        client = LOOP_CLIENTS.acquire(self.options.endpoint)
        try:
            self._sandbox = await self._create(client)
            await self._make_folders()
            await self._upload_environment_dir_after_start()
        except BaseException:
            sandbox, self._sandbox = self._sandbox, None
            try:
                if sandbox is not None:
                    await sandbox.delete()
            finally:
                await LOOP_CLIENTS.release(self.options.endpoint)
            raise

    async def _make_folders(self) -> None:
        if workdir := self.task_env_config.workdir:
            with _failures():
                await self.sandbox.make_directory(workdir)
        paths = EnvironmentPaths
        folders = [str(folder) for folder in (paths.agent_dir, paths.verifier_dir, paths.artifacts_dir)]
        folders += [target for target in self._mount_targets(writable_only=True) if target not in folders]
        done = await self.ensure_dirs(folders)
        if done is not None and done.return_code != 0:
            raise SandboxBuildFailedError(f"the folders for logs cannot be made: {done.stderr or done.stdout}")

    async def _upload_environment_dir_after_start(self) -> None:
        """The task's files, also where an option named the image."""
        image = self.task_env_config.docker_image or self._image or "the host's root"
        wanted = should_upload_environment_dir(self.environment_dir, docker_image=image)
        if self._enable_environment_dir_upload and wanted:
            await self.upload_dir(self.environment_dir, self._workdir or ".")

    async def _create(self, client: Any) -> AsyncSandbox:
        try:
            made: AsyncSandbox = await client.create(
                self._image or None, timeout=self.options.create_timeout, keep_alive=True, **self._create_options()
            )
        except errors.DeadlineExceeded as error:
            raise EnvironmentStartTimeoutError(str(error)) from error
        except (errors.Unavailable, errors.QuotaExceeded, errors.SandboxLost) as error:
            raise _failed(error) from error
        except errors.OrchardError as error:
            raise SandboxBuildFailedError(f"{error.reason}: {error}") from error
        return made

    def _create_options(self) -> dict[str, Any]:
        """Options of SandboxClient.create, from the task's."""
        memory = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        storage = self.task_env_config.storage_mb
        wanted = {
            "cpu": self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            "memory": memory and memory << 20,
            "disk": storage and storage << 20,
            "gpu": self.task_env_config.gpus,
            "env": self._startup_env(),
            "working_directory": self._workdir,
        }
        options: dict[str, Any] = {name: value for name, value in wanted.items() if value}
        public = self.network_policy.network_mode is NetworkMode.PUBLIC
        options["network"] = self.options.network if public else "none"
        options["heartbeat_timeout"] = self.options.heartbeat_timeout
        given = dict(self.options.sandbox)
        labels = {"harness": "harbor", **given.pop("labels", {})}
        return {**options, **given, "labels": labels}

    async def stop(self, delete: bool) -> None:
        """Delete the sandbox, or let it live on until its heartbeats are missed."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is None:
            return
        try:
            if delete:
                with _failures():
                    await sandbox.delete()
            else:
                sandbox.detach()
                self.logger.info("sandbox %s is kept for %s s", sandbox.sandbox_id, self.options.heartbeat_timeout)
        finally:
            await LOOP_CLIENTS.release(self.options.endpoint)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a shell command. Cancelled, it ends in the sandbox too, with all that it started.

        Returns:
            124 after a timeout, 128 + n for signal n; stderr then says why.

        Raises:
            RuntimeRequestError, MemoryLimitExceededError: the platform failed.
        """
        who = self._resolve_user(user)
        given: dict[str, Any] = {
            "cwd": cwd or self._workdir,
            "env": self._merge_env(env),
            "user": None if who is None else str(who),
        }
        options = {name: value for name, value in given.items() if value is not None}
        try:
            with _failures():
                return await self._run(command, timeout_sec, options)
        except (errors.CommandNotStarted, errors.InvalidArgument) as error:
            status = refusal(error)
            if status is None:
                raise _failed(error) from error
            return ExecResult(stdout="", stderr=f"{error}\n", return_code=status)

    async def _run(self, command: str, timeout_sec: int | None, options: dict[str, Any]) -> ExecResult:
        emit = self._output_callback()
        if emit is None:
            result = await self.sandbox.exec(command, timeout=timeout_sec, concurrent=True, **options)
            return _exec_result(result, result.stdout, result.stderr)
        texts: dict[str, list[str]] = {"stdout": [], "stderr": []}
        stream = self.sandbox.exec_stream(command, timeout=timeout_sec, concurrent=True, **options)
        async with contextlib.aclosing(aiter(stream)) as chunks:
            async for chunk in chunks:
                if chunk.text:
                    texts[chunk.stream].append(chunk.text)
                    await emit(chunk.text, chunk.stream)
        return _exec_result(stream.result, "".join(texts["stdout"]), "".join(texts["stderr"]))

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file into the sandbox."""
        with _failures():
            await self.sandbox.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder's contents into the sandbox, where they merge with what is there."""
        with _failures():
            await self.sandbox.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out of the sandbox."""
        with _failures():
            await self.sandbox.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder's contents out of the sandbox, without links that lead out of it."""
        with _failures():
            await self.sandbox.download(source_dir, target_dir, unsafe_links="skip")

    async def attach(self) -> None:
        """Become a shell in the sandbox."""
        os.execvp("orchard", ["orchard", "shell", self.sandbox.sandbox_id])  # noqa: S606


def _exec_result(result: CommandResult, stdout: str, stderr: str) -> ExecResult:
    status = TIMED_OUT if result.timed_out else shell_status(result)
    why = "" if result.ended is ExecEnd.EXITED else remark(result)
    return ExecResult(stdout=stdout, stderr=f"{stderr}{why}\n" if why else stderr, return_code=status)


def _failed(error: errors.OrchardError) -> errors.OrchardError:
    """The error of a class that Harbor knows by its name."""
    lost = error.lost_reason if isinstance(error, errors.SandboxLost) else ""
    kind = MemoryLimitExceededError if lost == "OOM" else RuntimeRequestError
    return kind(f"{error.reason}: {error}", reason=error.reason, metadata=error.metadata, request_id=error.request_id)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Failures of the platform by names that Harbor knows. What a command or a path is to blame for stays as it is."""
    try:
        yield
    except (errors.CommandNotStarted, errors.InvalidArgument, RuntimeRequestError, MemoryLimitExceededError):
        raise
    except errors.OrchardError as error:
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise
        raise _failed(error) from error
