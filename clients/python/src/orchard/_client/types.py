"""Values that the SDK returns."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from orchard._client import errors
from orchard._client.text import decode_in_order


class SandboxState(enum.StrEnum):
    """A step of a sandbox's life; `deleted` and `failed` are final."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    DELETING = "deleting"
    DELETED = "deleted"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing comes after it."""
        return self in (SandboxState.DELETED, SandboxState.FAILED)


class ExecState(enum.StrEnum):
    """A step of a command's life."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class ExecEnd(enum.StrEnum):
    """How a command ended. One that exits 124 or 143 by itself is `exited`."""

    UNKNOWN = "unknown"
    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    OUTPUT_LIMIT = "output_limit"
    ORPHANED = "orphaned"
    NOT_STARTED = "not_started"
    AGENT_RESTARTED = "agent_restarted"
    SANDBOX_LOST = "sandbox_lost"


class FileType(enum.StrEnum):
    """The kind of a directory entry."""

    UNKNOWN = "unknown"
    REGULAR = "regular"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class Network(enum.StrEnum):
    """What a sandbox may reach."""

    NONE = "none"
    """Loopback alone; the default."""
    DNS_ONLY = "dns_only"
    """Name resolution alone. Clusters only."""
    OPEN = "open"
    """The outside world, never the platform. Clusters only."""
    HOST = "host"
    """The host's own network. One machine only."""


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as the platform described it last."""

    sandbox_id: str
    uid: str
    """Id of this incarnation; empty while queued."""
    tenant: str
    state: SandboxState
    reason: str
    """Why it is in this state, UPPER_SNAKE; empty without one."""
    message: str
    """One sentence for a person; empty without one."""
    image: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    cpu: float
    """Virtual CPUs; 0: not limited."""
    memory_bytes: int
    """0: not limited."""
    network: str
    working_directory: str
    user: str
    request_id: str
    create_time: dt.datetime | None
    ready_time: dt.datetime | None
    end_time: dt.datetime | None
    expire_time: dt.datetime | None


@dataclass(frozen=True)
class OutputChunk:
    """A piece of a command's output."""

    stream: str
    """"stdout" or "stderr"; everything is "stdout" with merge_stderr."""
    data: bytes
    """The bytes as they were written."""
    characters: bytes = field(repr=False)
    """The bytes of `text`: a character that is split over two chunks is whole in the later one."""
    offset: int = 0
    """Position of the first byte among all output of the command."""
    missing: int = 0
    """Bytes before this chunk that are no longer retained."""

    @cached_property
    def text(self) -> str:
        """The same as text: characters split over two chunks stand whole in the later one, invalid bytes as U+FFFD."""
        return self.characters.decode(errors="replace")


@dataclass(frozen=True)
class ExecResult:
    """A command that has ended, with its output. A non-zero exit is a result, not an error; see check()."""

    exec_id: str
    ended: ExecEnd
    exit_code: int
    """0 to 255 when it exited, else -1."""
    signal: int
    """Number of the signal that ended it; 0 without one."""
    message: str
    """The platform's remark on the end; often empty."""
    start_time: dt.datetime | None
    end_time: dt.datetime | None
    user_cpu: float
    """Seconds of processor time in user mode."""
    system_cpu: float
    """Seconds of processor time in the kernel."""
    peak_memory_bytes: int
    """Largest resident set of one of its processes."""
    output_size: int
    """Bytes that it wrote."""
    dropped_bytes: int
    """Bytes of those that are missing here, since they were no longer retained."""
    chunks: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    """(stream, bytes) in the order in which they were read."""
    command: str = ""
    """The command for people, shortened."""

    @cached_property
    def stdout_bytes(self) -> bytes:
        """What it wrote to standard output (and to standard error with merge_stderr)."""
        return b"".join(data for stream, data in self.chunks if stream == "stdout")

    @cached_property
    def stderr_bytes(self) -> bytes:
        """What it wrote to standard error."""
        return b"".join(data for stream, data in self.chunks if stream == "stderr")

    @cached_property
    def output_bytes(self) -> bytes:
        """Both streams in the order in which they were read."""
        return b"".join(data for _stream, data in self.chunks)

    @property
    def stdout(self) -> str:
        """Standard output as text; invalid UTF-8 stands as U+FFFD."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; invalid UTF-8 stands as U+FFFD."""
        return self.stderr_bytes.decode(errors="replace")

    @cached_property
    def output(self) -> str:
        """Both streams as text, in the order in which they were read."""
        return decode_in_order(self.chunks)

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.ended is ExecEnd.EXITED and self.exit_code == 0

    @property
    def timed_out(self) -> bool:
        """Whether its timeout ended it."""
        return self.ended is ExecEnd.TIMED_OUT

    @property
    def duration(self) -> float:
        """Seconds between its start and its end; 0 if it never started."""
        if self.start_time is None or self.end_time is None:
            return 0.0
        return (self.end_time - self.start_time).total_seconds()

    def check(self) -> ExecResult:
        """Return this result if the command exited with 0.

        Raises:
            CommandTimeout: its timeout ended it.
            OutputLimitExceeded: its output limit ended it.
            CommandFailed: it ended in any other way.
        """
        if self.ok:
            return self
        kind = {
            ExecEnd.TIMED_OUT: errors.CommandTimeout,
            ExecEnd.OUTPUT_LIMIT: errors.OutputLimitExceeded,
        }.get(self.ended, errors.CommandFailed)
        raise kind(f"{self.describe()}{self._tail()}", result=self, reason=self.ended.upper())

    def describe(self) -> str:
        """One sentence on how it ended."""
        name = f"command {self.command!r}" if self.command else "the command"
        how = {
            ExecEnd.EXITED: f"exited with {self.exit_code}",
            ExecEnd.SIGNALLED: f"was ended by signal {self.signal}",
            ExecEnd.TIMED_OUT: f"timed out after {self.duration:.1f} s",
            ExecEnd.OUT_OF_MEMORY: "ran out of memory",
            ExecEnd.KILLED: "was killed",
            ExecEnd.OUTPUT_LIMIT: f"wrote more than its output limit ({self.output_size} bytes)",
        }.get(self.ended, f"ended: {self.ended}")
        return f"{name} {how}"

    def _tail(self) -> str:
        lines = (self.stderr.strip() or self.stdout.strip())[-500:]
        return f": ...{lines}" if len(lines) == 500 else f": {lines}" if lines else ""


@dataclass(frozen=True)
class ExecInfo:
    """A command and how it stands, without its output."""

    exec_id: str
    state: ExecState
    command: str
    pid: int
    output_size: int
    create_time: dt.datetime | None
    start_time: dt.datetime | None
    ended: ExecEnd | None
    exit_code: int | None
    end_time: dt.datetime | None = None
    signal: int = 0
    """Number of the signal that ended it; 0 without one."""


@dataclass(frozen=True)
class FileInfo:
    """A directory entry."""

    path: str
    type: FileType
    size: int
    mode: int
    uid: int
    gid: int
    modify_time: dt.datetime | None
    link_target: str
    raw_path: bytes
    """The path's bytes."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.type is FileType.DIRECTORY

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.type is FileType.REGULAR


@dataclass(frozen=True)
class PatchHunk:
    """What became of one hunk."""

    number: int
    applied: bool
    expected_line: int
    applied_line: int
    fuzz: int
    error: str


@dataclass(frozen=True)
class PatchFile:
    """What became of one file of a patch."""

    path: str
    old_path: str
    action: str
    """"modify", "create", "delete", "rename" or "copy"."""
    hunks: tuple[PatchHunk, ...]
    error: str


@dataclass(frozen=True)
class PatchResult:
    """What became of a patch."""

    applied: bool
    """Whether every hunk fits."""
    files: tuple[PatchFile, ...]

    def problems(self) -> Iterator[str]:
        """One line for each file and hunk that does not fit."""
        for file in self.files:
            if file.error:
                yield f"{file.path}: {file.error}"
            for hunk in file.hunks:
                if not hunk.applied:
                    yield f"{file.path}: hunk {hunk.number} (line {hunk.expected_line}): {hunk.error or 'does not fit'}"


@dataclass(frozen=True)
class Version:
    """Which build answers."""

    version: str
    minimum_agent_version: str
    runtime: str
    tenant: str


@dataclass(frozen=True)
class ApiKey:
    """A key's description."""

    key_id: str
    tenant: str
    name: str
    roles: tuple[str, ...]
    create_time: dt.datetime | None
    expire_time: dt.datetime | None
    revoke_time: dt.datetime | None
    scopes: tuple[str, ...] = ()
    """What it may do besides what its roles say."""


@dataclass(frozen=True)
class NewApiKey:
    """A key that was just made. The secret is shown this once."""

    key: ApiKey
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Image:
    """An imported root file system."""

    name: str
    digest: str
    size: int
    import_time: dt.datetime | None


@dataclass(frozen=True)
class ImportProgress:
    """How far an import is; `image` comes with the last one."""

    done_bytes: int
    total_bytes: int
    image: Image | None


@dataclass(frozen=True)
class Usage:
    """What sandboxes used in a period."""

    tenant: str
    label_value: str
    sandboxes: int
    sandbox_seconds: float
    cpu_hours: float
    memory_gib_hours: float
