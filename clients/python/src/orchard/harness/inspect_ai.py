"""Inspect AI's sandbox provider "orchard": one sandbox a sample.

    Task(..., sandbox="orchard")
    Task(..., sandbox=("orchard", "python:3.12"))
    Task(..., sandbox=SandboxEnvironmentSpec("orchard", OrchardSandboxConfig(image="python:3.12", memory="2GiB")))

With this distribution installed Inspect finds it by itself. It runs on asyncio, Inspect's default.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import Any, Final, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from orchard._client import errors
from orchard._client.client import AsyncSandboxClient
from orchard._client.sandbox import AsyncSandbox
from orchard._client.types import ExecEnd
from orchard._client.types import ExecResult as CommandResult
from orchard.harness._clients import LOOP_CLIENTS
from orchard.harness._results import NOT_EXECUTABLE, refusal, remark, shell_status

_LABEL: Final = "harness"
_NAME: Final = "inspect-ai"
# A sample's event loop may be busy for long; a shorter one would take its sandbox away.
_HEARTBEAT_SECONDS: Final = 300.0
_ACCESS_SECONDS: Final = 60.0
_IS_READABLE: Final = '[ -r "$1" ]'
# The file itself, or the folder in which it and its parents would be made.
_IS_WRITABLE: Final = """
p=$1
while [ ! -e "$p" ]; do
  case $p in */*) p=${p%/*} ;; *) p=. ;; esac
  p=${p:-/}
done
[ -w "$p" ]
"""
_RETAINED_SLACK: Final = 1 << 20


class OrchardSandboxConfig(BaseModel):
    """Options of a sample's sandbox; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str = ""
    """What it starts from. Empty: the host's root file system, on one machine with the process runtime."""
    endpoint: str = ""
    """Where the platform is. Empty: ORCHARD_ENDPOINT, else the profile of `orchard up`. The key is ORCHARD_API_KEY, or
    the profile's.
    """
    create_timeout: float = 1800
    """How long it may take to be ready, queue and image pull included. Seconds."""
    working_directory: str = ""
    """Where commands run and relative paths begin; made if it is missing. Empty: the image's."""
    user: str = ""
    """Who runs commands that name no user. Empty: the image's."""
    cpu: float = 0
    """Virtual CPUs. 0: the platform's default."""
    memory: int | str = 0
    """Bytes, or like "2GiB". 0: the platform's default."""
    network: str = ""
    """"none", "host", "open", "dns_only" or "allow:NAME". Empty: the platform's default, none."""
    env: dict[str, str] = {}
    """Environment of every command."""
    options: dict[str, Any] = {}
    """Further options of SandboxClient.create, such as disk, ttl, gpu, labels."""

    def __hash__(self) -> int:
        """Inspect keeps configurations as keys, and dictionaries have no hash of their own."""
        return hash(self.model_dump_json())

    def create_options(self) -> dict[str, Any]:
        """Options of SandboxClient.create, without those that are left to the platform."""
        names = ("working_directory", "user", "cpu", "memory", "network", "env")
        return {**{name: value for name in names if (value := getattr(self, name))}, **self.options}


@sandboxenv(name="orchard")
class OrchardSandboxEnvironment(SandboxEnvironment):  # type: ignore[misc]
    """A sandbox of a sample.

    Commands run at once, beside each other, and exactly once: `timeout_retry` repeats nothing. A sandbox that cannot be
    reached raises SandboxUnavailableError. One that has ended raises SandboxLost, which fails the sample: a
    SandboxUnavailableError would be told to the model, and a broken sample would be scored.
    """

    def __init__(self, sandbox: AsyncSandbox, *, is_root: bool = True) -> None:
        """`sandbox`: one that is ready; who made it deletes it. `is_root`: its user may do everything to its files."""
        super().__init__()
        self._sandbox = sandbox
        self._is_root = is_root
        self.endpoint = ""
        """Of the client to release with it; see sample_init."""

    @property
    def sandbox(self) -> AsyncSandbox:
        """The sandbox itself, for patches, ports and streams."""
        return self._sandbox

    async def exec(  # noqa: PLR0917 (Inspect's signature)
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; see SandboxEnvironment.exec.

        Raises:
            TimeoutError: its timeout ended it, and all that it had started.
            OutputLimitExceededError: a stream exceeded the limit; it was ended.
            PermissionError: it is no program.
            SandboxUserUnsupportedError: this sandbox runs nothing as that user.
            SandboxUnavailableError: the sandbox cannot be reached.
            SandboxLost, CommandInterrupted: the platform failed.
        """
        del timeout_retry, concurrency
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        given: dict[str, Any] = {"cwd": cwd, "env": env, "user": user, "input": input}
        try:
            with _unavailable():
                result = await self._sandbox.exec(
                    cmd,
                    timeout=timeout,
                    concurrent=True,
                    # Whatever both streams write together, one of them is over the limit then.
                    output_limit=2 * limit + 1,
                    retained_limit=2 * limit + _RETAINED_SLACK,
                    **{name: value for name, value in given.items() if value is not None},
                )
        except errors.CommandNotStarted as error:
            return _refused(error)
        except errors.InvalidArgument as error:
            return ExecResult(success=False, returncode=NOT_EXECUTABLE, stdout="", stderr=f"{error}\n")
        if result.timed_out:
            raise TimeoutError(f"the command was ended by its timeout after {timeout} s")
        _check_output(result, limit)
        why = "" if result.ended is ExecEnd.EXITED else remark(result)
        stderr = f"{result.stderr}{why}\n" if why else result.stderr
        return ExecResult(success=result.ok, returncode=shell_status(result), stdout=result.stdout, stderr=stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, whole or not at all; see SandboxEnvironment.write_file.

        Raises:
            PermissionError, IsADirectoryError: as their names say.
            SandboxUnavailableError, SandboxLost: see exec.
        """
        with _unavailable():
            await self._check_access(file, _IS_WRITABLE)
            await self._sandbox.write_file(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file; see SandboxEnvironment.read_file.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError, UnicodeDecodeError: as their names say.
            OutputLimitExceededError: it is larger than the limit.
            SandboxUnavailableError, SandboxLost: see exec.
        """
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _unavailable():
            await self._check_access(file, _IS_READABLE)
            # One more byte shows that there are more, of files too that grow or tell no size, as in /proc.
            data = await self._sandbox.read_file(file, length=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def _check_access(self, file: str, script: str) -> None:
        """Refuse what the sandbox's user may not do: files are moved by the platform, which may do everything."""
        if self._is_root:
            return
        try:
            allowed = await self._sandbox.exec(
                ["sh", "-c", script, "sh", file], timeout=_ACCESS_SECONDS, concurrent=True
            )
        except errors.CommandNotStarted:
            # An image without a shell: nothing in it can ask.
            return
        if allowed.ok:
            return
        if script == _IS_READABLE:
            # One that is missing is told as such.
            await self._sandbox.stat(file, follow=True)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How to log in while the sample runs.

        Raises:
            ConnectionError: the sandbox does not run.
        """
        sandbox_id = self._sandbox.sandbox_id
        try:
            info = await self._sandbox.refresh()
        except errors.OrchardError as error:
            raise ConnectionError(str(error)) from error
        if info.state.is_final:
            raise ConnectionError(f"sandbox {sandbox_id} has ended: {info.message or info.reason or info.state}")
        who = f" --user {user}" if user else ""
        return SandboxConnection(type="orchard", command=f"orchard shell{who} {sandbox_id}", container=sandbox_id)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Make a sample's sandbox, and wait until it is ready. Cancelled or failing, it leaves none behind.

        Raises:
            OrchardError: it could not be made.
        """
        del metadata
        settings = _settings(config)
        options = settings.create_options()
        options["labels"] = {_LABEL: _NAME, "task": label(task_name), **options.get("labels", {})}
        options.setdefault("heartbeat_timeout", _HEARTBEAT_SECONDS)
        client = LOOP_CLIENTS.acquire(settings.endpoint)
        try:
            sandbox = await client.create(
                settings.image or None, timeout=settings.create_timeout, keep_alive=True, **options
            )
            environment = cls(sandbox, is_root=await _prepare(sandbox, settings.working_directory))
        except BaseException:
            await LOOP_CLIENTS.release(settings.endpoint)
            raise
        environment.endpoint = settings.endpoint
        return {"default": environment}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Delete a sample's sandbox. One that cannot be deleted now is by its lease."""
        del task_name, config, interrupted
        for environment in environments.values():
            ours = environment.as_type(cls)
            try:
                await ours.sandbox.delete()
            except errors.Unavailable:
                # The last of the clients tries again, and then the lease ends it.
                continue
            finally:
                await LOOP_CLIENTS.release(ours.endpoint)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002
        """Delete a sandbox, or all that were left by samples (`inspect sandbox cleanup orchard`)."""
        async with AsyncSandboxClient() as client:
            ids = [id] if id else [info.sandbox_id async for info in client.list(labels={_LABEL: _NAME})]
            for sandbox_id in ids:
                with contextlib.suppress(*(() if id else (errors.SandboxNotFound,))):
                    await client.delete(sandbox_id)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """A configuration from its fields."""
        return OrchardSandboxConfig(**config)


def label(text: str) -> str:
    """A label's value for any text: at most 63 of the characters that a label can have."""
    return re.sub(r"[^A-Za-z0-9._/-]", "-", text)[:63]


def _settings(config: BaseModel | str | None) -> OrchardSandboxConfig:
    """The configuration; a string names the image."""
    if isinstance(config, OrchardSandboxConfig):
        return config
    if isinstance(config, str):
        return OrchardSandboxConfig(image=config)
    if config is None:
        return OrchardSandboxConfig()
    raise TypeError(f"the sandbox orchard takes an image or an OrchardSandboxConfig, not {type(config).__name__}")


async def _prepare(sandbox: AsyncSandbox, working_directory: str) -> bool:
    """Make the working directory if it is missing; returns whether the sandbox's user is root."""
    try:
        if working_directory:
            await sandbox.make_directory(working_directory)
        try:
            said = await sandbox.exec(["id", "-u"], cwd="/", timeout=_ACCESS_SECONDS)
        except errors.CommandNotStarted:
            return True
    except BaseException:
        # Others may still use the client.
        await sandbox.delete()
        raise
    return said.stdout.strip() in ("", "0")


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except (errors.Unavailable, errors.SandboxNotFound) as error:
        raise SandboxUnavailableError(f"{error.reason}: {error}") from error
    except errors.DeadlineExceeded as error:
        # A TimeoutError, which would be taken for the command's.
        raise SandboxUnavailableError(f"the platform did not answer in time: {error}") from error


def _refused(error: errors.CommandNotStarted) -> ExecResult[str]:
    """The result of a command that could not start, where that is the command's fault."""
    if error.reason == "COMMAND_NOT_EXECUTABLE":
        raise PermissionError(str(error)) from error
    if error.reason == "USER_NOT_AVAILABLE":
        raise SandboxUserUnsupportedError(str(error)) from error
    status = NOT_EXECUTABLE if error.reason == "USER_NOT_FOUND" else refusal(error)
    if status is None:
        raise SandboxUnavailableError(f"{error.reason}: {error}") from error
    return ExecResult(success=False, returncode=status, stdout="", stderr=f"{error}\n")


def _check_output(result: CommandResult, limit: int) -> None:
    for data in (result.stdout_bytes, result.stderr_bytes):
        if len(data) > limit:
            cut = data[:limit].decode(errors="replace")
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, cut)
