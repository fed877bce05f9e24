"""What an agent is told: by the node daemon before the fork, or by the environment of a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.common import pods
from services.common.tls import TlsFiles
from services.common.tokens import parse_public_keys
from services.exec_agent import pod
from services.exec_agent.launcher import open_launcher, open_or_gap

VERSION: Final = "0.1.0"
_PREFIX: Final = "ORCHARD_"


class SettingsError(Exception):
    """A variable is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Everything that one agent knows of its sandbox. Plain values and open descriptors."""

    uid: str
    """The sandbox's incarnation; the audience of tokens and the name that health checks ask for."""
    sandbox_id: str
    listen: str
    """gRPC address: "unix:/proc/self/fd/7/s" or "host:port"."""
    public_keys_pem: str
    """Public keys of the gateways, one or two in PEM."""
    public_keys_file: Path | None = None
    """Where they stand and may be replaced; None: they stay what they are."""
    state_fd: int
    """Directory of the agent's own, outside of the sandbox's view: journal and output spools."""
    launcher_fd: int | None
    """The launcher (launcher.open_launcher); None: Python processes do its work (launcher.fork_server)."""
    env: Mapping[str, str]
    """Environment of commands, PATH and HOME included."""
    working_directory: str = "/"
    """Where commands start."""
    user: str = ""
    """Default user of commands; empty: the agent's own."""
    start_argv: tuple[str, ...] = ()
    """The sandbox's start command, run as exec id "start"."""
    expects_secret_env: bool = False
    """Refuse commands until AgentService.SetSecretEnv was called."""
    can_switch_user: bool = True
    """Whether commands may run as another user than the agent's."""
    user_gap: str = ""
    """A sentence with the fix, where they may not."""
    cgroup_procs_fds: tuple[int, ...] = ()
    """Open cgroup.procs files that the fork server joins, so that commands are limited and the agent is not."""
    oom_event_fd: int | None = None
    """An eventfd that counts kills for lack of memory."""
    oom_counter_fd: int | None = None
    """memory.oom_control (v1) or memory.events (v2)."""
    gaps: tuple[str, ...] = ()
    """What cannot be had here, each a sentence."""
    restarts: int = 0
    """How often the agent was restarted in this sandbox."""
    socket_for_all: bool = False
    """Every user of the machine who reaches the Unix socket may connect: the folders above it keep others out."""
    tls: TlsFiles | None = None
    """Certificate and key to serve with on TCP; read again when they change."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AgentConfig:
        """Read ORCHARD_* of a process of its own; opens the launcher, if there is one, and the state directory.

        Raises:
            SettingsError: a variable is missing or wrong.
        """
        read = _Environment(environ)
        state = read.text("STATE_DIRECTORY")
        try:
            state_fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SettingsError(f"ORCHARD_STATE_DIRECTORY: {state}: {error.strerror}") from None
        keys = read.text("PUBLIC_KEYS_FILE")
        try:
            pem = Path(keys).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"ORCHARD_PUBLIC_KEYS_FILE: {keys}: {error}") from None
        path = read.text("LAUNCHER", "")
        launcher_fd, gap = open_or_gap(Path(path) if path else None)
        # An image's own environment reaches commands untouched; ours does not.
        inherited = {key: value for key, value in environ.items() if not key.startswith((_PREFIX, "GRPC_"))}
        return cls(
            uid=read.text("UID"),
            sandbox_id=read.text("SANDBOX_ID"),
            listen=read.text("LISTEN"),
            public_keys_pem=pem,
            public_keys_file=Path(keys),
            state_fd=state_fd,
            launcher_fd=launcher_fd,
            env=read.mapping("ENV", inherited),
            working_directory=read.text("WORKING_DIRECTORY", "/"),
            user=read.text("USER", ""),
            start_argv=read.strings("START_ARGV"),
            expects_secret_env=read.flag("EXPECTS_SECRET_ENV", default=False),
            can_switch_user=read.flag("CAN_SWITCH_USER", default=True),
            user_gap=read.text("USER_GAP", ""),
            gaps=(*read.strings("GAPS"), *gap),
            restarts=read.number("RESTARTS", 0),
            tls=read.tls(),
        )

    @classmethod
    def from_directory(
        cls,
        folder: Path,
        *,
        listen: str,
        state: Path = Path(pods.STATE_FOLDER),
        environ: Mapping[str, str] = os.environ,
    ) -> AgentConfig:
        """Read what a Pod shows to its agent (common.pods); opens the launcher and the state directory. If the folder
        has tls/tls.crt and tls/tls.key, the agent serves TLS.

        `environ` is what `init` (launcher/pod.c) gave the agent; the image's own environment is in a file beside it.

        Raises:
            SettingsError: a file is missing or wrong.
        """
        read = _Environment(environ)
        saved = read.text("ENVIRON_FD")
        try:
            files = pod.read_files(folder)
            parse_public_keys(files["public-keys"].encode())
            expects_secret_env = pod.flag(files, "expects-secret-env")
            spec = pods.spec_of(files["spec"])
            env = pod.environment(pod.read_all(int(saved)), spec.env, spec.user)
            state_fd = pod.open_state(state)
        except (OSError, ValueError, TypeError) as error:
            raise SettingsError(f"{folder}: {error}") from None
        can_switch_user = pod.can_switch_user()
        return cls(
            uid=files["uid"],
            sandbox_id=files["sandbox-id"],
            listen=listen,
            public_keys_pem=files["public-keys"],
            public_keys_file=folder / "public-keys",
            state_fd=state_fd,
            launcher_fd=open_launcher(Path(read.text("LAUNCHER"))),
            env=env,
            working_directory=pod.working_directory(spec.working_directory, str(Path.cwd()), env["HOME"]),
            user=spec.user,
            start_argv=tuple(spec.start_argv),
            expects_secret_env=expects_secret_env,
            can_switch_user=can_switch_user,
            user_gap="" if can_switch_user else pod.USER_GAP,
            oom_counter_fd=pod.open_oom_counter(Path("/sys/fs/cgroup")),
            restarts=read.number("RESTARTS", 0),
            socket_for_all=listen.startswith("unix:"),
            tls=_pair_in(folder / "tls"),
        )


def _pair_in(folder: Path) -> TlsFiles | None:
    """Certificate and key as a mounted Kubernetes secret has them, where there are any."""
    cert, key = folder / "tls.crt", folder / "tls.key"
    return TlsFiles(cert, key) if cert.exists() or key.exists() else None


@dataclass(frozen=True, slots=True)
class _Environment:
    values: Mapping[str, str] = field(repr=False)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(_PREFIX + name, default)
        if value is None:
            raise SettingsError(f"{_PREFIX}{name} is not set")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(_PREFIX + name)
        if value not in (None, "0", "1"):
            raise SettingsError(f"{_PREFIX}{name} must be 0 or 1")
        return default if value is None else value == "1"

    def number(self, name: str, default: int) -> int:
        value = self.values.get(_PREFIX + name, str(default))
        if not value.isascii() or not value.isdigit():
            raise SettingsError(f"{_PREFIX}{name} must be a whole number")
        return int(value)

    def tls(self) -> TlsFiles | None:
        cert, key = self.text("TLS_CERT_FILE", ""), self.text("TLS_KEY_FILE", "")
        if bool(cert) != bool(key):
            raise SettingsError("ORCHARD_TLS_CERT_FILE and ORCHARD_TLS_KEY_FILE go together: set both")
        return TlsFiles(Path(cert), Path(key)) if cert else None

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._json(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise SettingsError(f"{_PREFIX}{name} must be a JSON array of strings")
        return tuple(value)

    def mapping(self, name: str, default: Mapping[str, str]) -> dict[str, str]:
        value = self._json(name, dict(default))
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise SettingsError(f"{_PREFIX}{name} must be a JSON object of strings")
        return value

    def _json(self, name: str, default: object) -> object:
        value = self.values.get(_PREFIX + name)
        if value is None:
            return default
        try:
            return json.loads(value)
        except ValueError:
            raise SettingsError(f"{_PREFIX}{name} is not JSON") from None
