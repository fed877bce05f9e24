"""From a checked command to what the launcher runs: the shell, the environment, the user, the working directory."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Mapping
from typing import Final

from services.common.errors import FailedPreconditionError, OrchardError, ResourceExhaustedError
from services.exec_agent.model import Command
from services.exec_agent.process import Stage
from services.exec_agent.process_spec import ProcessSpec, encode_env
from services.exec_agent.settings import AgentConfig
from services.exec_agent.terminal import unavailable
from services.exec_agent.users import ResolvedUser, resolve_user

_SHELL_FOLDERS: Final = ("/bin", "/usr/bin", "/usr/local/bin")
_PART_CHARACTERS: Final = 32_000
"""The kernel takes at most 128 KiB an argument, and a character has up to four bytes."""
_SHOWN_CHARACTERS: Final = 200


class Programs:
    """Resolves commands against one sandbox."""

    def __init__(self, config: AgentConfig, secret_env: Mapping[str, str]) -> None:
        self._config = config
        self._env = {**config.env, **secret_env}
        self._encoded_env = encode_env(self._env)

    def resolve(self, command: Command) -> ProcessSpec:
        """What to run.

        Raises:
            FailedPreconditionError: SHELL_NOT_FOUND, USER_NOT_FOUND or USER_NOT_AVAILABLE.
        """
        identity = self._identity(command.user or self._config.user)
        argv = command.argv or self._shell_argv(command)
        cwd = posixpath.join(self._config.working_directory, command.cwd)
        # Another user's home cannot be written.
        own = {"HOME": identity.home} if command.user and identity is not None and identity.home is not None else {}
        if command.tty is not None:
            own["TERM"] = command.tty.term
        if not own and not command.env:
            return ProcessSpec(argv, self._encoded_env, len(self._env), cwd, identity)
        env = {**self._env, **own, **command.env}
        return ProcessSpec(argv, encode_env(env), len(env), cwd, identity, tty=command.tty is not None)

    def _shell_argv(self, command: Command) -> tuple[str, ...]:
        shell = self._find_shell()
        name = shell.rpartition("/")[2]
        options = ("-l", "-c") if command.login_shell else ("-c",)
        text = command.shell
        if len(text) <= _PART_CHARACTERS:
            return (shell, *options, text, name)
        # Too long for one argument: passed in parts, which the shell joins before anything of it runs.
        parts = [text[start : start + _PART_CHARACTERS] for start in range(0, len(text), _PART_CHARACTERS)]
        joined = "".join(f"${{{number}}}" for number in range(1, len(parts) + 1))
        return (shell, *options, f'eval "set --; {joined}"', name, *parts)

    def _find_shell(self) -> str:
        folders = (*_SHELL_FOLDERS, *(f for f in self._env.get("PATH", "").split(":") if f.startswith("/")))
        for name in ("bash", "sh"):
            for folder in folders:
                path = f"{folder}/{name}"
                if os.access(path, os.X_OK):
                    return path
        raise FailedPreconditionError(
            "the sandbox has neither bash nor sh; give the command as argv instead of shell", reason="SHELL_NOT_FOUND"
        )

    def _identity(self, user: str) -> ResolvedUser | None:
        if not user:
            return None
        identity = resolve_user(user)
        if self._config.can_switch_user:
            return identity
        if (identity.uid, identity.gid) == (os.geteuid(), os.getegid()):
            return None
        raise FailedPreconditionError(
            f"commands cannot run as {user!r} here: {self._config.user_gap or 'the runtime has one user only'}",
            reason="USER_NOT_AVAILABLE",
            user=user,
        )


def start_error(stage: Stage, error: int, command: Command, spec: ProcessSpec, user: str) -> OrchardError:
    """The error that says why a command did not start."""
    name, why = _shown(spec.argv[0]), os.strerror(error)
    if stage is Stage.CWD:
        return _cwd_error(error, _shown(spec.cwd), why)
    if stage is Stage.INTERPRETER:
        return FailedPreconditionError(
            f"{name} is there, but the interpreter that its first line or its ELF header names is not",
            reason="COMMAND_NOT_EXECUTABLE",
            command=name,
        )
    if stage is Stage.EXEC:
        return _exec_error(error, name, why)
    if stage is Stage.USER:
        return FailedPreconditionError(
            f"the sandbox cannot run commands as {user!r}: {why}", reason="USER_NOT_AVAILABLE", user=user
        )
    if stage is Stage.TTY:
        return unavailable(OSError(error, why))
    if stage is Stage.FORK:
        return ResourceExhaustedError(
            f"the sandbox can start no more processes: {why}; end some of its commands, or give it more pids or memory",
            reason="PROCESS_LIMIT",
        )
    return FailedPreconditionError(f"the launcher refused {command.display()!r}: {why}", reason="LAUNCHER_REFUSED")


def _shown(text: str) -> str:
    """For an error, which travels in metadata of some kilobytes: the beginning, where the text is longer."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _cwd_error(error: int, cwd: str, why: str) -> OrchardError:
    if error == errno.ENOTDIR:
        reason, text = "CWD_NOT_A_DIRECTORY", f"the working directory {cwd!r} is not a directory; name another in cwd"
    elif error == errno.ENOENT:
        reason, text = "CWD_NOT_FOUND", f"the working directory {cwd!r} does not exist; make it, or name another in cwd"
    else:
        reason = "CWD_NOT_ACCESSIBLE"
        text = f"the command's user cannot enter the working directory {cwd!r}: {why}; name one that it can in cwd"
    return FailedPreconditionError(text, reason=reason, cwd=cwd)


def _exec_error(error: int, name: str, why: str) -> OrchardError:
    if error in (errno.ENOENT, errno.ENOTDIR):
        where = "" if "/" in name else " in the command's PATH"
        return FailedPreconditionError(f"there is no {name!r}{where}", reason="COMMAND_NOT_FOUND", command=name)
    if error == errno.E2BIG:
        return FailedPreconditionError(
            "arguments and environment together are larger than the kernel accepts", reason="ARGUMENTS_TOO_LARGE"
        )
    if error == errno.ENOEXEC:
        why = "it is no program for this machine and has no #! line"
    return FailedPreconditionError(f"{name!r} cannot be run: {why}", reason="COMMAND_NOT_EXECUTABLE", command=name)
