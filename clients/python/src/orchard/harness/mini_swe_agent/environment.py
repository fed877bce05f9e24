"""The environment of mini-swe-agent: one sandbox, in which every action is a command."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import weakref
from typing import Any, Final

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel, ConfigDict

from orchard._client.errors import FileNotFound, InvalidArgument, NotADirectory, OrchardError
from orchard._client.options import Command
from orchard._client.sync_sandbox import Sandbox
from orchard._client.types import ExecResult
from orchard.harness._clients import delete_soon, shared_client
from orchard.harness._results import refusal, remark, shell_status

_SUBMIT: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_UNAME: Final = ("system", "node", "release", "version", "machine")
_PROBE: Final = "uname -s; uname -n; uname -r; uname -v; uname -m"
_PROBE_SECONDS: Final = 60.0


class OrchardEnvironmentConfig(BaseModel):
    """Options of the environment; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid")

    image: str = ""
    """What the sandbox starts from. Empty: the host's root file system, on one machine with the process runtime."""
    cwd: str = ""
    """Where actions run that name no directory. Empty: the sandbox's working directory."""
    create_cwd: bool = False
    """Make `cwd` if it is not there. Otherwise a missing one is an error at the start."""
    env: dict[str, str] = {}
    """Environment of every action."""
    forward_env: list[str] = []
    """Variables of the harness's own environment to pass on where they are set; `env` comes first."""
    timeout: float = 30
    """Of an action. Seconds."""
    interpreter: list[str] = ["bash", "-c"]
    """What runs an action's command, its last argument. The default falls back to sh where there is no bash."""
    create_timeout: float = 1800
    """How long the sandbox may take to be ready, queue and image pull included. Seconds."""
    endpoint: str = ""
    """Where the platform is. Empty: ORCHARD_ENDPOINT, else the profile of `orchard up`. The key is never a field here,
    since the configuration is kept with the trajectory: it is ORCHARD_API_KEY, or the profile's.
    """
    sandbox_options: dict[str, Any] = {}
    """Further options of SandboxClient.create, such as cpu, memory, network, ttl, labels."""


class OrchardEnvironment:
    """A sandbox that lives as long as this object.

    It is deleted by cleanup(), when the object is no longer referred to (the batch runner never calls cleanup), at the
    end of the program, and by its lease where the program was killed.

    Raises, like execute():
        OrchardError: the platform failed. It ends the agent's run, and is never shown to it as an observation.
    """

    def __init__(
        self, *, logger: logging.Logger | None = None, config_class: type = OrchardEnvironmentConfig, **options: Any
    ) -> None:
        """Make the sandbox and wait until it is ready.

        Args:
            logger: Default: "minisweagent.environment".
            config_class: a subclass of OrchardEnvironmentConfig.
            options: fields of the configuration.
        """
        self.logger = logger or logging.getLogger("minisweagent.environment")
        self.config: Any = config_class(**options)
        self.failure: OrchardError | None = None
        """Why the sandbox can no longer be trusted, once that is so."""
        self._sandbox = self._create()
        # Not the object's own method: a finalizer that refers to its object would keep it alive.
        self._finalizer = weakref.finalize(self, delete_soon, self._sandbox, os.getpid())
        self._finalizer.atexit = False
        try:
            self._uname = self._look_around()
        except BaseException:
            self.cleanup()
            raise
        self.logger.info("sandbox %s is ready", self.sandbox_id)

    @property
    def sandbox_id(self) -> str:
        """The sandbox's id."""
        return self._sandbox.sandbox_id

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox itself, for files and patches."""
        return self._sandbox

    def _create(self) -> Sandbox:
        options: dict[str, Any] = {"keep_alive": True, **self.config.sandbox_options}
        client = shared_client(self.config.endpoint)
        return client.create(self.config.image or None, timeout=self.config.create_timeout, **options)

    def _look_around(self) -> dict[str, str]:
        """What system it is. Whatever is wrong with the options of commands comes to light here, not as the
        observation of an agent that can do nothing about it.
        """
        if self.config.cwd:
            self._check_cwd()
        result = self._run(_PROBE, self.config.cwd, _PROBE_SECONDS)
        lines = result.output.splitlines()
        if result.ok and len(lines) == len(_UNAME):
            return dict(zip(_UNAME, lines, strict=True))
        # No uname there, or no shell as interpreter: the kernel is at least like this one.
        return platform.uname()._asdict()

    def _check_cwd(self) -> None:
        cwd = self.config.cwd
        if self.config.create_cwd:
            self._sandbox.make_directory(cwd)
        try:
            info = self._sandbox.stat(cwd, follow=True)
        except FileNotFound as error:
            hint = "name a directory of the image, or set create_cwd"
            raise InvalidArgument.of("cwd", f"{cwd!r} does not exist in the sandbox: {hint}") from error
        if not info.is_dir:
            raise NotADirectory(f"cwd: {cwd!r} is not a directory")

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run an action's command.

        Args:
            action: its "command" is run.
            cwd: Default: the configuration's.
            timeout: seconds. Default: the configuration's.

        Returns:
            "output" (stdout and stderr as they were written, invalid UTF-8 as U+FFFD), "returncode" (128 + n for
            signal n, -1 after a timeout), "exception_info" (empty, or why it was not run to its end) and "extra".

        Raises:
            Submitted: the agent hands in its work.
            OrchardError: the platform failed.
        """
        seconds = float(timeout or self.config.timeout)
        try:
            result = self._run(str(action.get("command", "")), cwd or self.config.cwd, seconds)
        except OrchardError as error:
            status = refusal(error)
            if status is None:
                self.failure = error
                raise
            return {
                "output": "",
                "returncode": status,
                "exception_info": f"The command could not be run: {error}",
                "extra": {"exception_type": error.reason, "exception": str(error)},
            }
        return _observation(result, seconds)

    def _run(self, command: str, cwd: str, seconds: float) -> ExecResult:
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        line, login = _command(self.config.interpreter, command)
        options: dict[str, Any] = {"cwd": cwd} if cwd else {}
        return self._sandbox.exec(
            line,
            login_shell=login,
            env={**forwarded, **self.config.env},
            timeout=seconds,
            merge_stderr=True,
            **options,
        )

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """The configuration and the sandbox's `uname`, for templates."""
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), self._uname, kwargs)
        return merged

    def serialize(self) -> dict[str, Any]:
        """What the trajectory keeps of it: the configuration and the sandbox's id."""
        kind = type(self)
        config = {
            "environment": self.config.model_dump(mode="json"),
            "environment_type": f"{kind.__module__}.{kind.__name__}",
        }
        return {"info": {"config": config, "orchard": {"sandbox_id": self.sandbox_id}}}

    def cleanup(self) -> None:
        """Delete the sandbox. Repeatable; one that cannot be deleted now is by its lease."""
        if self._finalizer.detach() is not None:
            with contextlib.suppress(OrchardError):
                self._sandbox.delete()


def _command(interpreter: list[str], command: str) -> tuple[Command, bool]:
    """What to run, and whether by a login shell. bash and its login form are the platform's own shell commands, which
    may be longer than one argument can be, and fall back to sh.
    """
    if interpreter == ["bash", "-c"]:
        return command, False
    if interpreter == ["bash", "-lc"]:
        return command, True
    return [*interpreter, command], False


def _observation(result: ExecResult, seconds: float) -> dict[str, Any]:
    extra: dict[str, Any] = {"ended": str(result.ended), "seconds": round(result.duration, 3)}
    output = {
        "output": result.output,
        "returncode": -1 if result.timed_out else shell_status(result),
        "exception_info": "",
        "extra": extra,
    }
    if why := remark(result):
        output["exception_info"] = f"An error occurred while executing the command: {why}"
    if result.timed_out:
        extra |= {"exception_type": "TimeoutExpired", "timeout": seconds}
    if result.ok and not result.dropped_bytes:
        # With its beginning gone another line than the first would count.
        _raise_if_submitted(result.output)
    return output


def _raise_if_submitted(output: str) -> None:
    first, _, rest = output.lstrip().partition("\n")
    if first.strip() == _SUBMIT:
        extra = {"exit_status": "Submitted", "submission": rest}
        raise Submitted({"role": "exit", "content": rest, "extra": extra})
