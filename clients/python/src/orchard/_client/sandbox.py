"""AsyncSandbox: one sandbox, its commands and its files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, Unpack

from orchard._client import errors
from orchard._client.arguments import explained
from orchard._client.calls import CallContext
from orchard._client.convert import exec_info, sandbox_info
from orchard._client.exec_calls import new_exec_id
from orchard._client.execs import Run, describe, raise_unless_result
from orchard._client.options import Command, ExecOptions, exec_spec, long_input, with_options
from orchard._client.patches import AsyncPatches
from orchard._client.ports.methods import AsyncPorts
from orchard._client.process import AsyncExecStream, AsyncProcess
from orchard._client.session import Made, Session
from orchard._client.status import CallFailed
from orchard._client.transfers import AsyncTransfers
from orchard._client.types import ExecInfo, ExecResult, SandboxInfo, SandboxState
from orchard._client.units import Seconds, duration, seconds_of
from orchard.exec.v1 import exec_pb2, exec_service_pb2
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

_log: Final = logging.getLogger("orchard")
_REPEATS: Final = 20
REPLACED: Final = "SANDBOX_REPLACED"


@explained
class AsyncSandbox(AsyncTransfers, AsyncPatches, AsyncPorts):
    """An isolated environment in which commands run and files live.

    `async with` deletes it at the end, unless it was only attached to. Every method raises SandboxLost once the
    sandbox has ended, and SandboxUnavailable when it cannot be reached, retries included.
    """

    def __init__(
        self,
        session: Session,
        info: SandboxInfo,
        *,
        request_id: str = "",
        repeat: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`request_id` is of the create that made it, if that is known; `repeat` asks for it anew, under the same
        request id: while it is queued it can be lost with the queue.
        """
        super().__init__(session.transport, info.sandbox_id)
        self._session = session
        self._info = info
        self._request_id = request_id
        self._repeat = repeat
        self._is_ours = repeat is not None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.sandbox_id} {self._info.state}>"

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._info.sandbox_id

    @property
    def info(self) -> SandboxInfo:
        """What the platform said about it last; refresh() asks anew."""
        return self._info

    @property
    def made(self) -> Made:
        """It, and no other sandbox of its id; for this package."""
        return Made(self.sandbox_id, self._request_id)

    @with_options(ExecOptions)
    async def exec(
        self,
        command: Command,
        *,
        check: bool = False,
        raise_on_timeout: bool = False,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command to its end and return its result, whatever its exit code.

        Commands run one at a time, in order, unless `concurrent`. It runs exactly once, also when connections or
        gateways break meanwhile. If this task is cancelled, the command is ended too.

        Args:
            command: a string for a shell, or a program with its arguments.
            check: raise CommandFailed unless it exits with 0.
            raise_on_timeout: raise CommandTimeout when its timeout ends it, instead of returning the result.
            options: see ExecOptions: timeout (seconds, 1 h), cwd, env, user, input, merge_stderr, concurrent,
                output_limit, ...

        Raises:
            CommandNotStarted: it could not start (COMMAND_NOT_FOUND, CWD_NOT_FOUND, ...).
            CommandFailed, CommandTimeout, OutputLimitExceeded: with check or raise_on_timeout.
            CommandInterrupted: the platform ended it.
            SandboxLost: the sandbox has ended.
            InvalidArgument: an option breaks a rule.
        """
        spec = exec_spec(command, options)
        exec_id = options.get("exec_id") or new_exec_id()
        with self._transport.operation("exec", sandbox_id=self.sandbox_id, exec_id=exec_id) as operation:
            run = self._run(command, spec, exec_id, self._transport.context(operation))
            run.input = long_input(options)
            with run.observing() as observed:
                try:
                    result = await run.finish()
                except errors.CommandNotStarted:
                    raise
                except BaseException:
                    await run.abandon()
                    raise
                if observed is not None:
                    observed.result = result
                if operation is not None:
                    operation.set(ended=str(result.ended), exit_code=result.exit_code, output_bytes=result.output_size)
                raise_unless_result(result)
        if check or (raise_on_timeout and result.timed_out):
            result.check()
        return result

    @with_options(ExecOptions)
    def exec_stream(self, command: Command, **options: Unpack[ExecOptions]) -> AsyncExecStream:
        """Run a command and iterate over its output while it runs; the stream's `result` has its end. See exec for
        the rest.

        async for chunk in sandbox.exec_stream("make test"):
            print(chunk.text, end="")
        """
        return AsyncExecStream(self._new_run(command, exec_spec(command, options), options))

    @with_options(ExecOptions)
    async def start(self, command: Command, **options: Unpack[ExecOptions]) -> AsyncProcess:
        """Start a command that runs on its own, beside others and without a timeout, and return at once.

        Raises:
            CommandNotStarted: it could not start.
        """
        run = self._new_run(command, exec_spec(command, options, background=True), options)
        with run.observing(background=True):
            try:
                response = await run.start(0.0)
            except asyncio.CancelledError:
                await run.abandon()
                raise
        return AsyncProcess(run, response.exec.pid, stdin_offset=0)

    def process(self, exec_id: str) -> AsyncProcess:
        """A command that was started elsewhere, by its id; "start" is the sandbox's start command.

        Raises:
            InvalidArgument: it is no id.
        """
        if not exec_id:
            raise errors.InvalidArgument.of("exec_id", "must be the id of a command, and is empty")
        return AsyncProcess(self._new_run(f"exec {exec_id}", exec_spec(["?"], {}), {"exec_id": exec_id}))

    def _new_run(self, command: Command, spec: exec_pb2.ExecSpec, options: ExecOptions) -> Run:
        run = self._run(command, spec, options.get("exec_id") or new_exec_id(), self._transport.context())
        run.input = long_input(options)
        return run

    def _run(self, command: Command, spec: exec_pb2.ExecSpec, exec_id: str, context: CallContext) -> Run:
        if not isinstance(exec_id, str):
            raise errors.InvalidArgument.of("exec_id", f"must be a string, not {type(exec_id).__name__}")
        session, text = self._session, describe(command)
        return Run(
            self._transport, session.background, self.sandbox_id, exec_id, context, spec, text, session.observers
        )

    async def list_execs(self) -> list[ExecInfo]:
        """Its commands, newest first, finished ones included."""
        execs: list[ExecInfo] = []
        token = ""
        while True:
            response = await self._transport.unary(
                lambda c: c.exec.ListExecs,
                exec_service_pb2.ListExecsRequest(sandbox_id=self.sandbox_id, page_size=1000, page_token=token),
                sandbox_id=self.sandbox_id,
            )
            execs.extend(exec_info(message) for message in response.execs)
            token = response.next_page_token
            if not token:
                return execs

    async def refresh(self) -> SandboxInfo:
        """Ask the platform how it stands.

        Raises:
            SandboxNotFound: it ended more than a day ago, or another sandbox has its id by now.
        """
        response = await self._transport.unary(
            lambda c: c.sandbox.GetSandbox, sandbox_service_pb2.GetSandboxRequest(sandbox_id=self.sandbox_id)
        )
        self._seen(response.sandbox)
        return self._info

    async def wait_ready(self, timeout: Seconds | None = None) -> SandboxInfo:
        """Wait until it is ready for commands.

        Raises:
            SandboxStartFailed: it ended instead; `reason` says why.
            DeadlineExceeded: it is not ready after `timeout` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + seconds_of("timeout", timeout)
        for _ in range(_REPEATS):
            try:
                info = await self._wait(
                    until_terminal=False, timeout=None if deadline is None else max(0.0, deadline - loop.time())
                )
            except errors.SandboxNotFound as error:
                # Forgotten, with what was to become of it.
                if self._repeat is None or error.reason == REPLACED:
                    raise
            else:
                if info.state is SandboxState.READY:
                    return info
                if info.reason != "QUEUE_LOST" or self._repeat is None:
                    raise _not_ready(info)
            await self._repeat()
        raise errors.SandboxStartFailed("the create was lost in the queue, again and again", reason="QUEUE_LOST")

    async def wait_ended(self, timeout: Seconds | None = None) -> SandboxInfo:
        """Wait until it has ended, for whatever reason.

        Raises:
            DeadlineExceeded: it still lives after `timeout` seconds.
            SandboxNotFound: it ended more than a day ago, or another sandbox has its id by now.
        """
        return await self._wait(until_terminal=True, timeout=timeout)

    async def _wait(self, *, until_terminal: bool, timeout: Seconds | None) -> SandboxInfo:
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        try:
            async with asyncio.timeout(seconds):
                return await self._watch(until_terminal)
        except TimeoutError as error:
            if isinstance(error, errors.OrchardError):
                raise
            info = self._info
            raise errors.DeadlineExceeded(
                f"sandbox {info.sandbox_id} is still {info.state} after {seconds:g} s"
                + (f": {info.message}" if info.message else ""),
                metadata={"sandbox_id": info.sandbox_id, "state": str(info.state)},
            ) from None

    async def _watch(self, until_terminal: bool) -> SandboxInfo:
        retry, context = self._transport.retry(), self._transport.context()
        request = sandbox_service_pb2.WaitSandboxRequest(sandbox_id=self.sandbox_id, until_terminal=until_terminal)
        while True:
            try:
                async with self._transport.stream(lambda c: c.sandbox.WaitSandbox, request, context) as stream:
                    async for response in stream:
                        retry.succeeded()
                        self._seen(response.sandbox)
                        if self._info.state.is_final or (not until_terminal and self._info.state is SandboxState.READY):
                            return self._info
                # A server that stops in order ends the stream before the wait is over.
                if not await retry.failed(0.0):
                    raise errors.Unavailable("waiting for the sandbox ended early, again and again")
            except CallFailed as error:
                await self._transport.pause_or_raise(error, retry, "")

    def _seen(self, message: sandbox_pb2.Sandbox) -> None:
        """Take what the platform says of the id. What it says of another sandbox, which has the id now, is an error:
        this one has ended, and `info` stays what it was.
        """
        info = sandbox_info(message)
        if self._is_another(info):
            self._session.ended(self.made)
            raise errors.SandboxNotFound(
                f"this sandbox has ended: another one has its id {self.sandbox_id!r} now",
                reason=REPLACED,
                metadata={"sandbox_id": self.sandbox_id, "uid": self._info.uid, "other_uid": info.uid},
            )
        self._info = info
        self._request_id = self._request_id or info.request_id
        if info.state is SandboxState.READY:
            # From now on another one under its id would not be this one.
            self._repeat = None
        if self.made in self._session.tracked:
            self._session.tracked[self.made] = info.uid

    def _is_another(self, info: SandboxInfo) -> bool:
        if self._request_id and info.request_id and info.request_id != self._request_id:
            return True
        # Until it was READY it may have been made anew by its own create.
        return self._repeat is None and bool(self._info.uid) and info.uid != self._info.uid

    async def extend(self, ttl: Seconds) -> SandboxInfo:
        """Set its time to live, from now on.

        Raises:
            SandboxNotFound, FailedPrecondition: it has ended.
        """
        if self._info.uid:
            # The id alone is told, and may be another sandbox's by now.
            await self.refresh()
        request = sandbox_service_pb2.UpdateSandboxRequest(sandbox_id=self.sandbox_id, ttl=duration("ttl", ttl))
        response = await self._transport.unary(lambda c: c.sandbox.UpdateSandbox, request)
        self._seen(response.sandbox)
        return self._info

    async def delete(self) -> None:
        """End it and everything in it. One that has ended already is no error."""
        self._repeat = None
        await self._session.background.shielded(
            f"delete {self.sandbox_id}", self._session.delete(self.made, self._info.uid)
        )

    def detach(self) -> None:
        """Let it live on when this client is closed. Until then the client goes on sending its heartbeats."""
        self._session.detach(self.made)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not tracked: detached, deleted already, or inherited by a forked child.
        if not self._is_ours or not self._session.tracks(self.made):
            return
        try:
            await self.delete()
        except errors.OrchardError as failure:
            if error is None:
                raise
            _log.warning("sandbox %s could not be deleted: %s", self.sandbox_id, failure)


def _not_ready(info: SandboxInfo) -> errors.SandboxStartFailed:
    ended = info.state in {SandboxState.DELETING, SandboxState.DELETED}
    return errors.SandboxStartFailed(
        f"sandbox {info.sandbox_id} {'has ended' if ended else 'did not become ready'}: "
        f"{info.message or info.reason or info.state}",
        reason=info.reason,
        metadata={"sandbox_id": info.sandbox_id, "state": str(info.state)},
    )
