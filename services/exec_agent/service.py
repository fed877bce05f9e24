"""Use cases of the agent: which commands there are, which may start, and how long they are kept."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.exec_agent.backlog import Backlog, Waiting
from services.exec_agent.execution import Execution, Host
from services.exec_agent.journal import BURIED_COUNT, KEPT_COUNT, Journal
from services.exec_agent.model import Command, End, Result, State
from services.exec_agent.oom import OomCounter
from services.exec_agent.process import Launcher, Target
from services.exec_agent.program import Programs
from services.exec_agent.reader import OutputReader
from services.exec_agent.records import History
from services.exec_agent.restoring import gone, in_order, past_of, restore, restore_waiting
from services.exec_agent.serial import SerialQueue
from services.exec_agent.settings import AgentConfig
from services.exec_agent.signals import SentSignals
from services.exec_agent.spool import Spool
from services.exec_agent.spools import SpoolStore
from services.exec_agent.start_command import START_EXEC_ID, start_command
from services.exec_agent.stdin import Stdin
from services.exec_agent.terminal import set_size
from services.exec_agent.waits import Waits

KEPT_SECONDS: Final = 3600.0
QUEUE_LIMIT: Final = 10_000
RUNNING_LIMIT: Final = 4_000
SANDBOX_SPOOL_LIMIT: Final = 1 << 30
_SWEEP_SECONDS: Final = 30.0
_SECRET_RETRY_SECONDS: Final = 0.2
_GONE_SECONDS: Final = 30.0
"""A process that hangs in the kernel may stay; the queue goes on nevertheless."""
_UNREADABLE = "it waited under an agent before this one, which could not note what became of it; it will not run"
_RESTARTED = "the agent was restarted while it ran; it was ended and will not run again"


class ExecService:
    """The single authority on what runs in this sandbox. All methods run on the event loop."""

    def __init__(self, config: AgentConfig, journal: Journal, launcher: Launcher, waits: Waits) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._journal = journal
        self._launcher = launcher
        self._spools = SpoolStore(config.state_fd, SANDBOX_SPOOL_LIMIT, journal)
        self._null_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        oom = OomCounter(config.oom_counter_fd, config.oom_event_fd)
        self._host = Host(waits, launcher, oom, self._null_fd, self._on_started, self._on_ended)
        self._programs = Programs(config, {})
        self._secret_pending = config.expects_secret_env
        self._held: dict[str, Execution] = {}
        self._ended: OrderedDict[str, Execution] = OrderedDict()
        self._tombstones: OrderedDict[str, Execution] = OrderedDict()
        self._outliving: set[Execution] = set()
        self._signals = SentSignals()
        self._backlog = Backlog(config.state_fd)
        self._queue = SerialQueue(self._backlog, self._start)
        self._active = 0
        self._sequence = 0
        self._stopping = False
        self._dying = self._restore(journal.take_history())
        if not self._secret_pending:
            self._run_start_command()
        self._go_on()

    # ------------------------------------------------------------ use cases

    def set_secret_env(self, secret_env: Mapping[str, str]) -> None:
        """Commands get these variables from now on."""
        self._programs = Programs(self._config, dict(secret_env))
        if self._secret_pending:
            self._secret_pending = False
            self._run_start_command()
            self._go_on()

    async def await_the_last(self) -> None:
        """Start serial commands once those are gone that ran under the agent before this one: their reapers kill them,
        which may take a moment.
        """
        await gone(self._dying, _GONE_SECONDS)
        self._dying = ()
        self._go_on()

    def _go_on(self) -> None:
        if not (self._secret_pending or self._dying or self._stopping):
            self._queue.go_on()

    def start(self, exec_id: str, command: Command) -> Execution:
        """Start or queue a command, or find the one that has this id.

        Raises:
            AlreadyExistsError: the id was used with another spec.
            FailedPreconditionError: EXEC_EXPIRED.
            UnavailableError: SECRET_ENV_PENDING.
            ResourceExhaustedError: too many commands wait or run.
        """
        known = self._held.get(exec_id)
        if known is not None:
            if known.command is not None and known.command.spec_hash != command.spec_hash:
                raise AlreadyExistsError(
                    f"exec id {exec_id!r} was used with another spec; choose a new id for a new command",
                    reason="EXEC_ID_REUSED",
                    exec_id=exec_id,
                )
            self._check_can_start(known)
            return known
        if self._journal.ended(exec_id):
            raise _expired(exec_id)
        if self._stopping:
            raise UnavailableError("the agent stops", reason="AGENT_STOPPING")
        self._check_can_start(None)
        waiting = len(self._queue)
        if waiting >= QUEUE_LIMIT or self._active - waiting >= RUNNING_LIMIT:
            raise ResourceExhaustedError(
                f"the sandbox already has {self._active:,} commands waiting or running; wait for some of them",
                reason="TOO_MANY_EXECS",
            )
        execution = self._add(exec_id, command, command.retained_limit)
        self._active += 1
        if command.concurrent:
            self._start(execution, command)
            return execution
        try:
            self._queue.put(execution, command)
        except ResourceExhaustedError:
            self._active -= 1
            del self._held[exec_id]
            raise
        return execution

    def knows(self, exec_id: str) -> bool:
        """Whether a command has or had this id."""
        return exec_id in self._held or self._journal.ended(exec_id)

    def find(self, exec_id: str) -> Execution:
        """A command that is held.

        Raises:
            NotFoundError: there never was one with this id.
            FailedPreconditionError: EXEC_EXPIRED.
            UnavailableError: SECRET_ENV_PENDING.
        """
        execution = self._held.get(exec_id)
        if execution is not None:
            self._check_can_start(execution)
            return execution
        if self._journal.ended(exec_id):
            raise _expired(exec_id)
        raise NotFoundError(f"the sandbox has no exec {exec_id!r}", reason="EXEC_NOT_FOUND", exec_id=exec_id)

    def _check_can_start(self, execution: Execution | None) -> None:
        """What is to start waits for the secret environment, also where an agent before this one accepted it. Whoever
        asks for it is told so: by that the gateway knows that it is to be delivered again.
        """
        if self._secret_pending and (execution is None or execution.state is State.QUEUED):
            raise UnavailableError(
                "the sandbox waits for its secret environment; retry. Should it stay so, the gateway of this call does"
                " not hold it (it was restarted, holds too many, or is not the one that made the sandbox): repeat the"
                " create with the same request id and secret_env",
                reason="SECRET_ENV_PENDING",
                retry_seconds=_SECRET_RETRY_SECONDS,
            )

    def read(self, execution: Execution, offset: int, *, follow: bool) -> OutputReader:
        """A reader from `offset` on, to be closed by the caller."""
        return OutputReader(execution, offset, follow=follow)

    def stdin_of(self, execution: Execution) -> Stdin:
        """Where a command's input goes; a closed one for what has ended without, or under an agent before this one.

        Raises:
            FailedPreconditionError: STDIN_NOT_OPEN.
        """
        command = execution.command
        if execution.stdin is not None and command is not None and (command.stdin_open or command.tty is not None):
            return execution.stdin
        if execution.result is not None:
            return Stdin.past()
        raise FailedPreconditionError(
            f"exec {execution.exec_id!r} takes no input: start it with stdin_mode PIPE, or with tty",
            reason="STDIN_NOT_OPEN",
            exec_id=execution.exec_id,
        )

    def resize(self, execution: Execution, rows: int, columns: int) -> None:
        """Set the size of a command's terminal; nothing happens if it has ended.

        Raises:
            FailedPreconditionError: NO_TTY.
        """
        if execution.result is not None:
            return
        if execution.command is None or execution.command.tty is None or execution.stdin is None:
            raise FailedPreconditionError(
                f"exec {execution.exec_id!r} has no terminal: start it with tty", reason="NO_TTY"
            )
        set_size(execution.stdin.descriptor, rows, columns)

    def signal(self, exec_id: str, target: Target, number: int, request_id: str = "") -> Execution:
        """Send a signal to a command that runs; a repeat under the same request id sends nothing.

        Raises:
            NotFoundError: there is none with this id.
            FailedPreconditionError: EXEC_EXPIRED, or EXEC_NOT_STARTED while it waits in the queue.
            AlreadyExistsError: the request id was used with another signal or target.
        """
        execution = self.find(exec_id)
        if execution in self._queue:
            raise FailedPreconditionError(
                f"exec {exec_id!r} waits in the queue; cancel it, or wait until it runs", reason="EXEC_NOT_STARTED"
            )
        # What has ended gets none.
        if execution.result is None and (not request_id or self._signals.is_new(exec_id, request_id, target, number)):
            execution.signal(target, number)
        return execution

    def cancel(self, exec_id: str) -> Execution:
        """End a command, or make sure that one that has not arrived yet never starts.

        Raises:
            FailedPreconditionError: EXEC_EXPIRED.
        """
        execution = self._held.get(exec_id)
        if execution is None:
            if self._journal.ended(exec_id):
                raise _expired(exec_id)
            return self._bury(exec_id, "it was cancelled before it arrived")
        execution.cancel(End.KILLED, "it was cancelled")
        return execution

    def newest_first(self, before: int | None) -> Iterator[Execution]:
        """Held commands with a sequence number below `before`."""
        for execution in reversed(self._held.values()):
            if before is None or execution.sequence < before:
                yield execution

    async def sweep(self) -> None:
        """Forget what ended too long ago, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            limit = self._loop.time() - KEPT_SECONDS
            for ended in (self._ended, self._tombstones):
                for execution in [e for e in ended.values() if e.end_monotonic < limit and not e.is_used]:
                    self._forget(ended, execution)
            self._forget_more_than(KEPT_COUNT, self._ended)
            self._outliving = {e for e in self._outliving if e.pump is not None and not e.pump.eof}
            self._tidy_journal()

    def interrupt(self) -> None:
        """The agent is about to stop: open calls end with UNAVAILABLE, and no command starts."""
        self._stopping = True
        self._queue.hold_up()
        for execution in self._held.values():
            execution.interrupt()

    def close(self) -> None:
        """The agent stops: running commands are ended by their reapers."""
        for execution in (*self._held.values(), *self._outliving):
            execution.close()
        os.close(self._null_fd)

    # ------------------------------------------------------------ starts and ends

    def _start(self, execution: Execution, command: Command) -> None:
        execution.start(command, self._programs, lambda: self._begin(execution))

    def _begin(self, execution: Execution) -> None:
        self._journal.begin(past_of(execution))
        execution.journalled = True
        self._backlog.remove(execution.exec_id)

    def _on_started(self, execution: Execution) -> None:
        """See Host.started."""
        self._journal.started(execution.exec_id, execution.pid, execution.start_ns)

    def _on_ended(self, execution: Execution) -> None:
        """See Host.ended."""
        self._signals.forget(execution.exec_id)
        noted = self._journal.end(past_of(execution))
        self._backlog.remove(execution.exec_id, noted=noted)
        if execution.command is not None:  # otherwise it never was active
            self._active -= 1
            self._ended[execution.exec_id] = execution
            self._forget_more_than(KEPT_COUNT, self._ended)
            self._queue.leave(execution)
        self._tidy_journal()

    # ------------------------------------------------------------ what is held

    def _add(self, exec_id: str, command: Command | None, retained: int) -> Execution:
        self._sequence += 1
        execution = Execution(exec_id, self._sequence, command, Spool(self._spools, exec_id, retained), self._host)
        self._held[exec_id] = execution
        return execution

    def _forget_more_than(self, count: int, ended: OrderedDict[str, Execution]) -> None:
        """Forget the first to have ended of more than so many, but none of which somebody still reads."""
        while len(ended) > count:
            execution = next((e for e in ended.values() if not e.is_used), None)
            if execution is None:
                return
            self._forget(ended, execution)

    def _forget(self, ended: OrderedDict[str, Execution], execution: Execution) -> None:
        del ended[execution.exec_id], self._held[execution.exec_id]
        execution.spool.remove()
        if execution.pump is not None and not execution.pump.eof:
            # A child of it still writes: read on, so that it does not get SIGPIPE, and throw it away.
            self._outliving.add(execution)

    def _bury(self, exec_id: str, why: str) -> Execution:
        execution = self._add(exec_id, None, 0)
        self._tombstones[exec_id] = execution
        execution.adopt(_result(End.NOT_STARTED, why))
        self._forget_more_than(BURIED_COUNT, self._tombstones)
        return execution

    def _restore(self, history: History) -> tuple[int, ...]:
        """Commands of agents before this one. Those that ran have been ended with it; none ever runs again. Those that
        waited go on.

        Returns:
            The processes of those that ran.
        """
        ended, begun = history.recent(time.time_ns() - int(KEPT_SECONDS * 1e9)), history.begun
        waiting = [one for one in self._backlog.read() if not self._has_begun(one.exec_id, begun)]
        for exec_id, sequence, command in in_order((*ended.values(), *begun.values()), waiting):
            self._sequence = sequence - 1
            self._add(exec_id, command, 0 if command is None else command.retained_limit)
        for exec_id, past in ended.items():
            restore(self._held[exec_id], past)
            group = self._ended if exec_id in history.ended else self._tombstones
            group[exec_id] = self._held[exec_id]
        for exec_id, past in begun.items():
            restore(self._held[exec_id], past)
            self._active += 1
            self._held[exec_id].adopt(_result(End.AGENT_RESTARTED, _RESTARTED))
        self._restore_waiting(waiting)
        self._spools.remove_others(self._held)
        return tuple(past.pid for past in begun.values() if past.pid)

    def _has_begun(self, exec_id: str, begun: Container[str]) -> bool:
        if exec_id in begun or self._journal.ended(exec_id):
            self._backlog.remove(exec_id)  # its agent was killed between the two
            return True
        return False

    def _restore_waiting(self, waiting: Iterable[Waiting]) -> None:
        for one in waiting:
            if one.command is None:
                self._bury(one.exec_id, _UNREADABLE)
                continue
            execution = self._held[one.exec_id]
            restore_waiting(execution, one)
            self._active += 1
            self._queue.put_back(execution, one.command)

    def _tidy_journal(self) -> None:
        if self._journal.overgrown:
            # In the order in which they ended: the last ones are kept.
            ended = (*self._ended.values(), *self._tombstones.values())
            running = (execution for execution in self._held.values() if execution.result is None)
            self._journal.rewrite(past_of(e, with_output=True) for e in (*ended, *running))

    def _run_start_command(self) -> None:
        if not self._config.start_argv or START_EXEC_ID in self._held or self._journal.ended(START_EXEC_ID):
            return
        self.start(START_EXEC_ID, start_command(self._config.start_argv))


def _result(end: End, message: str) -> Result:
    return Result(ended=end, message=message, end_ns=time.time_ns())


def _expired(exec_id: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"exec {exec_id!r} has ended and is no longer kept; it will not run again, choose a new id",
        reason="EXEC_EXPIRED",
        exec_id=exec_id,
    )
