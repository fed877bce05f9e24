"""The synchronous client: a thin typed face of the asynchronous one, which runs on a background thread."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal as signals
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, Unpack

from orchard._client.archive import UnsafeLinks
from orchard._client.cleanup import REGISTRY
from orchard._client.client import AsyncSandboxClient
from orchard._client.errors import OrchardError
from orchard._client.files import Progress
from orchard._client.options import KEEP_ALIVE_SECONDS, Command, CreateOptions, ExecOptions, with_options
from orchard._client.portal import Portal
from orchard._client.process import AsyncExecStream, AsyncProcess
from orchard._client.sandbox import AsyncSandbox
from orchard._client.types import (
    ApiKey,
    ExecInfo,
    ExecResult,
    FileInfo,
    Image,
    ImportProgress,
    NewApiKey,
    OutputChunk,
    PatchResult,
    SandboxInfo,
    SandboxState,
    Usage,
    Version,
)
from orchard._client.units import Seconds

_log: Final = logging.getLogger("orchard")


class ExecStream:
    """See AsyncExecStream."""

    def __init__(self, portal: Portal, stream: AsyncExecStream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def exec_id(self) -> str:
        """The command's id."""
        return self._stream.exec_id

    @property
    def result(self) -> ExecResult:
        """How it ended, without output; after the iteration."""
        return self._stream.result

    def __iter__(self) -> Iterator[OutputChunk]:
        return self._portal.iterate(aiter(self._stream))


class Process:
    """See AsyncProcess. `with` cancels it at the end."""

    def __init__(self, portal: Portal, process: AsyncProcess) -> None:
        self._portal = portal
        self._process = process

    def __repr__(self) -> str:
        return repr(self._process).replace("AsyncProcess", "Process")

    @property
    def exec_id(self) -> str:
        """The command's id."""
        return self._process.exec_id

    @property
    def pid(self) -> int:
        """Process id inside the sandbox."""
        return self._process.pid

    def info(self) -> ExecInfo:
        """How it stands."""
        return self._portal.run(self._process.info())

    def poll(self) -> ExecResult | None:
        """Its result with the output if it has ended, else None."""
        return self._portal.run(self._process.poll())

    def wait(self, timeout: Seconds | None = None, *, check: bool = False) -> ExecResult:
        """Its result with the output, once it has ended. See AsyncProcess.wait."""
        return self._portal.run(self._process.wait(timeout, check=check))

    def output(self, offset: int = 0, *, follow: bool = True) -> Iterator[OutputChunk]:
        """Its output from the byte at `offset` on, to its end, or with follow=False to what is there now."""
        return self._portal.iterate(self._process.output(offset, follow=follow))

    def __iter__(self) -> Iterator[OutputChunk]:
        return self.output()

    def signal(self, number: int | signals.Signals, *, leader_only: bool = False) -> None:
        """Send a signal to the whole process tree, or to the command's own process alone."""
        self._portal.run(self._process.signal(number, leader_only=leader_only))

    def kill(self) -> None:
        """Send KILL to the whole process tree."""
        self._portal.run(self._process.kill())

    def cancel(self) -> None:
        """End it: TERM to the whole tree, KILL after its grace."""
        self._portal.run(self._process.cancel())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._process.__aexit__(kind, error, traceback))


class Sandbox:
    """An isolated environment in which commands run and files live. See AsyncSandbox; `with` deletes it at the end."""

    def __init__(self, portal: Portal, sandbox: AsyncSandbox) -> None:
        self._portal = portal
        self._sandbox = sandbox

    def __repr__(self) -> str:
        return f"<Sandbox {self.sandbox_id} {self.info.state}>"

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._sandbox.sandbox_id

    @property
    def info(self) -> SandboxInfo:
        """What the platform said about it last; refresh() asks anew."""
        return self._sandbox.info

    @with_options(ExecOptions)
    def exec(
        self,
        command: Command,
        *,
        check: bool = False,
        raise_on_timeout: bool = False,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command to its end and return its result, whatever its exit code. Ctrl-C ends the command too. See
        AsyncSandbox.exec.
        """
        return self._portal.run(self._sandbox.exec(command, check=check, raise_on_timeout=raise_on_timeout, **options))

    @with_options(ExecOptions)
    def exec_stream(self, command: Command, **options: Unpack[ExecOptions]) -> ExecStream:
        """Run a command and iterate over its output while it runs; the stream's `result` has its end.

        for chunk in sandbox.exec_stream("make test"):
            print(chunk.text, end="")
        """
        return ExecStream(self._portal, self._portal.run(_call(self._sandbox.exec_stream, command, options)))

    @with_options(ExecOptions)
    def start(self, command: Command, **options: Unpack[ExecOptions]) -> Process:
        """Start a command that runs on its own, beside others and without a timeout, and return at once."""
        return Process(self._portal, self._portal.run(self._sandbox.start(command, **options)))

    def process(self, exec_id: str) -> Process:
        """A command that was started elsewhere, by its id; "start" is the sandbox's start command."""
        return Process(self._portal, self._sandbox.process(exec_id))

    def list_execs(self) -> list[ExecInfo]:
        """Its commands, newest first, finished ones included."""
        return self._portal.run(self._sandbox.list_execs())

    def write_file(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int = 0,
        owner: str = "",
        make_parents: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Write a file, whole or not at all; returns its size. See AsyncSandbox.write_file."""
        return self._portal.run(
            self._sandbox.write_file(path, data, mode=mode, owner=owner, make_parents=make_parents, exclusive=exclusive)
        )

    def read_file(self, path: str, *, offset: int = 0, length: int = 0) -> bytes:
        """Bytes of a file: `length` of them (0: all) from `offset` on."""
        return self._portal.run(self._sandbox.read_file(path, offset=offset, length=length))

    def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """A file as text; line ends stay as they are."""
        return self._portal.run(self._sandbox.read_text(path, encoding=encoding, errors=errors))

    def iter_file(
        self, path: str, *, offset: int = 0, length: int = 0, progress: Progress | None = None
    ) -> Iterator[bytes]:
        """Bytes of a file, piece by piece."""
        return self._portal.iterate(self._sandbox.iter_file(path, offset=offset, length=length, progress=progress))

    def upload(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Copy a local file or folder into the sandbox. See AsyncSandbox.upload."""
        self._portal.run(self._sandbox.upload(source, target, exclude=exclude, progress=progress))

    def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        unsafe_links: UnsafeLinks = "error",
    ) -> None:
        """Copy a file or directory out of the sandbox. See AsyncSandbox.download."""
        self._portal.run(self._sandbox.download(source, target, progress=progress, unsafe_links=unsafe_links))

    def apply_patch(
        self,
        diff: str | bytes,
        *,
        path: str = ".",
        strip: int = 1,
        reverse: bool = False,
        dry_run: bool = False,
        fuzz: int = 0,
        partial: bool = False,
        check: bool = True,
    ) -> PatchResult:
        """Apply a unified or git diff: all of it or, by default, nothing. See AsyncSandbox.apply_patch."""
        return self._portal.run(
            self._sandbox.apply_patch(
                diff,
                path=path,
                strip=strip,
                reverse=reverse,
                dry_run=dry_run,
                fuzz=fuzz,
                partial=partial,
                check=check,
            )
        )

    def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """Describe a path; with `follow`, what a link points to."""
        return self._portal.run(self._sandbox.stat(path, follow=follow))

    def exists(self, path: str) -> bool:
        """Whether something is at a path."""
        return self._portal.run(self._sandbox.exists(path))

    def list_directory(self, path: str = ".", *, recursive: bool = False) -> list[FileInfo]:
        """Entries of a directory, by name; with `recursive` everything below it."""
        return self._portal.run(self._sandbox.list_directory(path, recursive=recursive))

    def make_directory(self, path: str, *, mode: int = 0, parents: bool = True) -> None:
        """Make a directory; with `parents` also those above it."""
        self._portal.run(self._sandbox.make_directory(path, mode=mode, parents=parents))

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file or directory, across devices too."""
        self._portal.run(self._sandbox.move(source, target, overwrite=overwrite))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or with `recursive` a directory with all below it."""
        self._portal.run(self._sandbox.remove(path, recursive=recursive, missing_ok=missing_ok))

    def refresh(self) -> SandboxInfo:
        """Ask the platform how it stands."""
        return self._portal.run(self._sandbox.refresh())

    def wait_ready(self, timeout: Seconds | None = None) -> SandboxInfo:
        """Wait until it is ready for commands. See AsyncSandbox.wait_ready."""
        return self._portal.run(self._sandbox.wait_ready(timeout))

    def wait_ended(self, timeout: Seconds | None = None) -> SandboxInfo:
        """Wait until it has ended, for whatever reason."""
        return self._portal.run(self._sandbox.wait_ended(timeout))

    def extend(self, ttl: Seconds) -> SandboxInfo:
        """Set its time to live, from now on."""
        return self._portal.run(self._sandbox.extend(ttl))

    def delete(self) -> None:
        """End it and everything in it. One that has ended already is no error."""
        self._portal.run(self._sandbox.delete())

    def detach(self) -> None:
        """Let it live on when this client is closed."""
        self._sandbox.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._sandbox.__aexit__(kind, error, traceback))


async def _call(function: Any, command: Command, options: ExecOptions) -> Any:
    """Call a function that needs a running loop."""
    return function(command, **options)


class SandboxClient:
    """A connection to the platform.

        with SandboxClient() as client, client.create() as sandbox:
            result = sandbox.exec("echo hello")

    Works in scripts, in notebooks (within a running event loop), from any number of threads, and after a fork: the
    child opens its own connections, and its parent's sandboxes stay the parent's. See AsyncSandboxClient for the rest.
    """

    def __init__(
        self, endpoint: str | None = None, *, api_key: str | None = None, retry_timeout: Seconds = 60.0
    ) -> None:
        self._client = AsyncSandboxClient(endpoint, api_key=api_key, retry_timeout=retry_timeout)
        self._portal = Portal()
        self._closed = False
        self.keys = Keys(self._portal, self._client)
        """API keys; needs the role admin."""
        self.images = Images(self._portal, self._client)
        """Images of a one-machine platform; needs the role admin."""
        REGISTRY.add_client(self)

    @property
    def endpoint(self) -> str:
        """Where the platform is."""
        return self._client.endpoint

    @with_options(CreateOptions)
    def create(
        self,
        image: str | None = None,
        *,
        wait: bool = True,
        timeout: Seconds | None = 1800.0,
        detach: bool = False,
        **options: Unpack[CreateOptions],
    ) -> Sandbox:
        """Make a sandbox. Interrupted or failing half-way, it leaves none behind. See AsyncSandboxClient.create."""
        REGISTRY.handle_sigterm()

        async def create() -> AsyncSandbox:
            return await self._client.create(image, wait=wait, timeout=timeout, detach=detach, **options)

        return Sandbox(self._portal, self._portal.run(create()))

    def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id; closing this client leaves it alone."""
        return Sandbox(self._portal, self._portal.run(self._client.get(sandbox_id)))

    def attach(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id, without asking the platform; closing this client leaves it alone."""
        return Sandbox(self._portal, self._client.attach(sandbox_id))

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[SandboxState | str] = (),
        all: bool = False,  # noqa: A002 (as on the command line)
    ) -> Iterator[SandboxInfo]:
        """Sandboxes, newest first, page by page. See AsyncSandboxClient.list."""
        return self._portal.iterate(self._client.list(labels=labels, states=states, all=all))

    def delete(self, sandbox_id: str) -> None:
        """End a sandbox and everything in it."""
        self._portal.run(self._client.delete(sandbox_id))

    def heartbeat(self, sandbox_ids: Sequence[str]) -> Sequence[str]:
        """Renew sandboxes once, any number; returns the ids that are not alive."""
        return self._portal.run(self._client.heartbeat(sandbox_ids))

    def keep_alive(self, sandbox: Sandbox, *, heartbeat_timeout: Seconds = KEEP_ALIVE_SECONDS) -> None:
        """Send heartbeats for a sandbox in the background until it or this client ends."""

        async def keep() -> None:
            self._client.keep_alive(self._client.attach(sandbox.sandbox_id), heartbeat_timeout=heartbeat_timeout)

        self._portal.run(keep())

    def version(self) -> Version:
        """Which build answers, and for which tenant."""
        return self._portal.run(self._client.version())

    def usage(
        self,
        *,
        start: dt.datetime | None = None,
        end: dt.datetime | None = None,
        group_by: str = "",
        tenant: str = "",
    ) -> Sequence[Usage]:
        """What sandboxes used in a period. See AsyncSandboxClient.usage."""
        return self._portal.run(self._client.usage(start=start, end=end, group_by=group_by, tenant=tenant))

    def close(self) -> None:
        """Delete the sandboxes that this client made, and close every connection. It cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        try:
            self._portal.run(self._client.close())
        finally:
            self._portal.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OrchardError as failure:
            if error is None:
                raise
            _log.warning("%s", failure)


class Keys:
    """See AsyncKeys."""

    def __init__(self, portal: Portal, client: AsyncSandboxClient) -> None:
        self._portal = portal
        self._keys = client.keys

    def create(
        self, tenant: str, *, name: str = "", roles: Sequence[str] = ("user",), ttl: Seconds | None = None
    ) -> NewApiKey:
        """Make a key; its secret is shown this once."""
        return self._portal.run(self._keys.create(tenant, name=name, roles=roles, ttl=ttl))

    def list(self, *, tenant: str = "") -> Iterator[ApiKey]:
        """Keys, newest first; of one tenant, or of all."""
        return self._portal.iterate(self._keys.list(tenant=tenant))

    def revoke(self, key_id: str) -> ApiKey:
        """Stop a key within a few seconds."""
        return self._portal.run(self._keys.revoke(key_id))


class Images:
    """See AsyncImages."""

    def __init__(self, portal: Portal, client: AsyncSandboxClient) -> None:
        self._portal = portal
        self._images = client.images

    def import_image(self, name: str, source: str, *, replace: bool = False) -> Iterator[ImportProgress]:
        """Import an archive or folder that is on the platform's machine; yields its progress."""
        return self._portal.iterate(self._images.import_image(name, source, replace=replace))

    def list(self) -> Iterator[Image]:
        """Images, by name."""
        return self._portal.iterate(self._images.list())

    def remove(self, name: str) -> None:
        """Remove an image."""
        self._portal.run(self._images.remove(name))
