"""The synchronous sandbox: a thin typed face of the asynchronous one, which runs on a background thread."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from orchard._client.archive import UnsafeLinks
from orchard._client.arguments import explained
from orchard._client.options import Command, ExecOptions, with_options
from orchard._client.portal import Portal
from orchard._client.ports.sync import ExposedEndpoint, PortForward
from orchard._client.ports.types import OnForward
from orchard._client.process import AsyncExecStream, AsyncProcess
from orchard._client.sandbox import AsyncSandbox
from orchard._client.transfers import Progress
from orchard._client.types import ExecInfo, ExecResult, FileInfo, OutputChunk, PatchResult, SandboxInfo
from orchard._client.units import Seconds


@explained
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


@explained
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

    def poll(self, *, output: bool = True) -> ExecResult | None:
        """Its result if it has ended, else None. With output=False it has no output, and none is read for it."""
        return self._portal.run(self._process.poll(output=output))

    def wait(self, timeout: Seconds | None = None, *, check: bool = False) -> ExecResult:
        """Its result with the output, once it has ended. See AsyncProcess.wait."""
        return self._portal.run(self._process.wait(timeout, check=check))

    def output(self, offset: int = 0, *, follow: bool = True) -> Generator[OutputChunk, None, None]:
        """Its output from the byte at `offset` on, to its end, or with follow=False to what is there now."""
        return self._portal.iterate(self._process.output(offset, follow=follow))

    def __iter__(self) -> Iterator[OutputChunk]:
        return self.output()

    def write(self, data: bytes | str) -> None:
        """Write to its standard input, or type into its terminal. See AsyncProcess.write."""
        self._portal.run(self._process.write(data))

    def close_stdin(self) -> None:
        """End its standard input. A terminal gets ^D. Repeatable."""
        self._portal.run(self._process.close_stdin())

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        self._portal.run(self._process.resize(rows, columns))

    def signal(self, number: int | str | signals.Signals, *, leader_only: bool = False) -> None:
        """Send a signal, a number or a name like "TERM", to the whole process tree, or to the command's own process
        alone.
        """
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


@explained
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
    def asynchronous(self) -> AsyncSandbox:
        """The sandbox on the client's own event loop; for this package."""
        return self._sandbox

    @property
    def portal(self) -> Portal:
        """The way to that event loop; for this package."""
        return self._portal

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

    def forward(
        self,
        port: int,
        *,
        local_port: int = 0,
        bind: str = "127.0.0.1",
        host: str = "",
        wait: Seconds = 0.0,
        on_event: OnForward | None = None,
    ) -> PortForward:
        """Make a TCP port of the sandbox one of this machine, while `with` lasts. See AsyncSandbox.forward.

        with sandbox.forward(80) as address:
            urllib.request.urlopen(address.url)
        """
        forward = self._sandbox.forward(port, local_port=local_port, bind=bind, host=host, wait=wait, on_event=on_event)
        return PortForward(self._portal, forward)

    def expose(self, endpoint: str, port: int = 0) -> ExposedEndpoint:
        """Make an endpoint of the platform a port on 127.0.0.1 inside the sandbox, while `with` lasts. See
        AsyncSandbox.expose.

        with sandbox.expose("llm") as address:
            sandbox.exec("python agent.py", env={"OPENAI_BASE_URL": f"{address.url}/v1"})
        """
        return ExposedEndpoint(self._portal, self._sandbox.expose(endpoint, port))

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
        """Let it live on when this client is closed. Until then the client goes on sending its heartbeats."""

        async def detach() -> None:
            self._sandbox.detach()

        self._portal.run(detach())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._sandbox.__aexit__(kind, error, traceback))


async def _call(function: Any, command: Command, options: ExecOptions) -> Any:
    """Call a function that needs a running loop."""
    return function(command, **options)
