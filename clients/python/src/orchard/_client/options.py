"""Options of commands and sandboxes, and how they become requests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypedDict, TypeVar

from orchard._client.errors import InvalidArgument
from orchard._client.types import Network
from orchard._client.units import Seconds, duration, parse_size
from orchard.exec.v1 import exec_pb2
from orchard.sandbox.v1 import sandbox_pb2

F = TypeVar("F", bound=Callable[..., Any])

# Requests with a command may have 3 MiB; gRPC's own refusal of a larger one would name no field.
MAXIMUM_REQUEST_BYTES: Final = 3 << 20
MAXIMUM_INPUT_BYTES: Final = 512 << 10
KEEP_ALIVE_SECONDS: Final = 60.0

_SANDBOX_ID: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_PLAIN: Final = frozenset({"cwd", "user", "login_shell", "merge_stderr", "concurrent"})
_SIZES: Final = frozenset({"output_limit", "retained_limit"})
_DURATIONS: Final = frozenset({"timeout", "orphan_timeout", "queue_timeout", "kill_grace"})
_EXEC_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"orphan_timeout": 60.0})
_START_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({"timeout": None, "concurrent": True})

Command = str | Sequence[str]
"""A string is run by a shell (bash where the sandbox has it, else sh); a sequence is a program with its arguments,
run without a shell.
"""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal for a command."""

    rows: int = 24
    """Lines, 1 to 65,535."""
    columns: int = 80
    """Characters of a line, 1 to 65,535."""
    term: str = "xterm-256color"
    """What kind it is, as TERM tells the command."""


class ExecOptions(TypedDict, total=False):
    """Options of exec, exec_stream and start."""

    timeout: Seconds | None
    """Ends the command after this long. Default 1 h (start: none); None: never."""
    cwd: str
    """Working directory; relative to the sandbox's."""
    env: Mapping[str, str]
    """Added to the sandbox's environment."""
    user: str
    """"name" or "name:group"."""
    input: bytes | str
    """All of its standard input, of any size (start: at most 512 KiB). Default: empty."""
    stdin: bool
    """Keep its standard input open for write() and close_stdin(). For start alone."""
    tty: bool | Terminal
    """Give it a terminal, which takes input as with stdin. True: one of 24 rows and 80 columns."""
    login_shell: bool
    """Run the shell as a login shell."""
    merge_stderr: bool
    """Send stderr into stdout's pipe, which keeps their exact order."""
    concurrent: bool
    """Start at once instead of waiting for the commands before it. Default false (start: true)."""
    queue_timeout: Seconds
    """How long it may wait for its turn. Default: the timeout."""
    output_limit: int | str
    """End the command when it has written this much."""
    retained_limit: int | str
    """Keep at most this much output. Default 64 MiB."""
    orphan_timeout: Seconds | None
    """End the command when no client has been attached for this long. Default 60 s (start: None, never)."""
    kill_grace: Seconds
    """Time between TERM and KILL. Default 5 s."""
    exec_id: str
    """Choose the command's id. Default: a new one."""


class CreateOptions(TypedDict, total=False):
    """Options of create."""

    sandbox_id: str
    """Choose its id: 1 to 63 of a-z, 0-9 and '-'. Default: a new one."""
    env: Mapping[str, str]
    """Environment of every command."""
    secret_env: Mapping[str, str]
    """The same, but stored nowhere in the platform."""
    labels: Mapping[str, str]
    """Labels to find it by."""
    cpu: float
    """Virtual CPUs."""
    memory: int | str
    """Bytes, or like "2GiB"."""
    disk: int | str
    """Writable disk: bytes, or like "10GiB"."""
    shm: int | str
    """Size of /dev/shm (browsers need it): bytes, or like "1GiB"."""
    pids: int
    """Processes and threads. Default 4,096."""
    gpu: int
    """Number of GPUs."""
    network: Network | str
    """"none" (default), "host", "open", "dns_only", or "allow:NAME" for an allow-list of the operator."""
    ttl: Seconds
    """Time to live. Default 24 h."""
    idle_timeout: Seconds
    """Delete it after this long without a command or file call. Default: off."""
    heartbeat_timeout: Seconds
    """Delete it after this long without a heartbeat. Default: off, 60 s with keep_alive."""
    keep_alive: bool
    """Send heartbeats in the background as long as this client lives, so that the sandbox ends soon after the client
    is killed.
    """
    working_directory: str
    """Where commands run that name no cwd."""
    user: str
    """Who runs commands that name no user."""
    priority: int
    """Higher leaves the queue first; -1000 to 1000."""
    start_argv: Sequence[str]
    """A command to start as soon as it is ready, as exec "start"."""
    start_timeout: Seconds
    """How long it may take from leaving the queue to ready, image pull apart. Default 60 s."""
    pull_timeout: Seconds
    """How long pulling its image may take. Default 15 min. Clusters only."""
    image_pull_secret: str
    """The Secret to pull its image with, one that the operator offers. Clusters only."""
    node_selector: Mapping[str, str]
    """Labels that its machine must have, by keys that the operator offers. Clusters only."""
    runtime_class: str
    """How its containers are run, one of what the operator offers. Clusters only."""


class _NotGiven:
    """Stands for an option's default, which the platform knows."""

    def __repr__(self) -> str:
        return "..."


_NOT_GIVEN: Final = _NotGiven()


def _written(annotation: Any) -> Any:
    """An annotation as it is written, which a TypedDict wraps."""
    return getattr(annotation, "__forward_arg__", annotation)


def with_options(options: type) -> Callable[[F], F]:
    """Show the keys of an options dictionary as keyword parameters in help() and notebooks."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in parameters}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_NOT_GIVEN, annotation=_written(annotation))
            for name, annotation in options.__annotations__.items()
            if name not in taken
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def check_names(function: str, given: Mapping[str, Any], options: type) -> None:
    """Raise TypeError, as Python itself does, for a keyword that does not exist."""
    # The keys alone: resolving the hints would cost each command half a millisecond.
    for name in given:
        if name not in options.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def exec_spec(command: Command, options: ExecOptions, *, background: bool = False) -> exec_pb2.ExecSpec:
    """The specification of a command. `background`: with the defaults of start.

    Raises:
        InvalidArgument: a value cannot be meant.
        TypeError: an option that does not exist.
    """
    check_names("start" if background else "exec", options, ExecOptions)
    given: dict[str, Any] = {**(_START_DEFAULTS if background else _EXEC_DEFAULTS), **options}
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in _PLAIN:
            fields[name] = value
        elif name in _SIZES:
            fields[f"{name}_bytes"] = parse_size(name, value)
        elif name == "env":
            fields[name] = _strings(name, value)
        elif name == "input":
            fields.update(_input(value, background=background))
        elif name == "stdin":
            fields.update(_open_stdin(value, options, background=background))
        elif name == "tty":
            fields.update(_terminal(value))
        elif name == "timeout" and value is None:
            fields["no_timeout"] = True
        elif name in _DURATIONS and not (name == "orphan_timeout" and value is None):
            fields[name] = duration(name, value)
    spec = exec_pb2.ExecSpec(**fields)
    _set_command(spec, command)
    if spec.ByteSize() > MAXIMUM_REQUEST_BYTES:
        raise InvalidArgument.of("command", "command, env and input are over 3 MiB together; pass large data in a file")
    return spec


def check_sandbox_id(sandbox_id: str) -> None:
    """Make sure that a sandbox can have this id.

    Raises:
        InvalidArgument: none can.
    """
    if not isinstance(sandbox_id, str) or not _SANDBOX_ID.fullmatch(sandbox_id):
        raise InvalidArgument.of(
            "sandbox_id",
            f"{sandbox_id!r} must be 1 to 63 of a-z, 0-9 and '-', begin with a letter and end with a letter or digit",
        )


def _set_command(spec: exec_pb2.ExecSpec, command: Command) -> None:
    if isinstance(command, str):
        if not command:
            raise InvalidArgument.of("command", "must not be empty")
        spec.shell = command
        return
    is_list = isinstance(command, Sequence) and not isinstance(command, (bytes, bytearray))
    if not is_list or not all(isinstance(argument, str) for argument in command):
        raise InvalidArgument.of("command", "must be a string for a shell, or a list of strings to run as it is")
    spec.argv.args.extend(command)
    if not spec.argv.args:
        raise InvalidArgument.of("command", "must not be empty")


def long_input(options: ExecOptions) -> bytes | None:
    """The input that is written while the command runs, where it is too long for the specification."""
    data = _input_bytes(options.get("input", b""))
    return data if len(data) > MAXIMUM_INPUT_BYTES else None


def _input_bytes(value: bytes | str) -> bytes:
    """The input; a number would be so many zeros."""
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument.of("input", f"must be bytes or a string, not {type(value).__name__}")
    return value.encode() if isinstance(value, str) else bytes(value)


def _input(value: bytes | str, *, background: bool) -> dict[str, Any]:
    data = _input_bytes(value)
    if len(data) <= MAXIMUM_INPUT_BYTES:
        return {"stdin": data}
    if background:
        raise InvalidArgument.of("input", "is over 512 KiB; start it with stdin=True and write() it")
    return {"stdin_mode": exec_pb2.STDIN_MODE_PIPE}


def _open_stdin(value: bool, options: ExecOptions, *, background: bool) -> dict[str, Any]:
    if not value:
        return {}
    if not background:
        raise InvalidArgument.of("stdin", "goes with start() alone; give the whole input as input=...")
    if "input" in options:
        raise InvalidArgument.of("stdin", "excludes input; write() all of it")
    # A terminal takes input anyway.
    return {} if options.get("tty") else {"stdin_mode": exec_pb2.STDIN_MODE_PIPE}


def _terminal(value: bool | Terminal) -> dict[str, Any]:
    if value is False:
        return {}
    terminal = Terminal() if value is True else value
    if not isinstance(terminal, Terminal):
        raise InvalidArgument.of("tty", f"must be True or a Terminal, not {type(value).__name__}")
    size = exec_pb2.WindowSize(rows=terminal.rows, columns=terminal.columns)
    return {"tty": exec_pb2.Tty(size=size, term=terminal.term)}


def _strings(field: str, values: Mapping[str, str] | None) -> dict[str, str]:
    for key, value in (values or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument.of(f"{field}[{key!r}]", f"must be a string, not {type(value).__name__}")
    return dict(values or {})


def sandbox_spec(image: str | None, options: CreateOptions) -> sandbox_pb2.SandboxSpec:
    """The specification of a sandbox.

    Raises:
        InvalidArgument: a value cannot be meant.
        TypeError: an option that does not exist.
    """
    check_names("create", options, CreateOptions)
    spec = sandbox_pb2.SandboxSpec(
        image=image or "",
        env=_strings("env", options.get("env")),
        labels=_strings("labels", options.get("labels")),
        working_directory=options.get("working_directory", ""),
        user=options.get("user", ""),
        priority=options.get("priority", 0),
        start_argv=options.get("start_argv", ()),
        image_pull_secret=options.get("image_pull_secret", ""),
        node_selector=_strings("node_selector", options.get("node_selector")),
        runtime_class=options.get("runtime_class", ""),
    )
    spec.resources.CopyFrom(
        sandbox_pb2.Resources(
            cpu=options.get("cpu", 0.0),
            memory_bytes=parse_size("memory", options.get("memory")),
            disk_bytes=parse_size("disk", options.get("disk")),
            shm_bytes=parse_size("shm", options.get("shm")),
            pids=options.get("pids", 0),
            gpu=options.get("gpu", 0),
        )
    )
    spec.network.CopyFrom(_network(str(options.get("network", ""))))
    for name in ("ttl", "idle_timeout", "heartbeat_timeout", "start_timeout", "pull_timeout"):
        if name in options:
            getattr(spec, name).CopyFrom(duration(name, options[name]))
    if options.get("keep_alive") and "heartbeat_timeout" not in options:
        spec.heartbeat_timeout.CopyFrom(duration("heartbeat_timeout", KEEP_ALIVE_SECONDS))
    return spec


def secret_env(options: CreateOptions) -> dict[str, str]:
    """The environment that is stored nowhere."""
    return _strings("secret_env", options.get("secret_env"))


def _network(text: str) -> sandbox_pb2.Network:
    if not text:
        return sandbox_pb2.Network()
    if text.startswith("allow:"):
        return sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_ALLOW_LIST, allow_list=text.removeprefix("allow:"))
    if text not in Network._value2member_map_:
        raise InvalidArgument.of(
            "network", f"{text!r} is none of {', '.join(Network)} and 'allow:NAME' (an allow-list of the operator)"
        )
    return sandbox_pb2.Network(mode=sandbox_pb2.NetworkMode.Value(f"NETWORK_MODE_{text.upper()}"))
