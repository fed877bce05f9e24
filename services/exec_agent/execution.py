"""One command from its acceptance to its end.

The end has three parts: the command's own process exits, its tree is ended if the platform ended it, and what stands in
its pipes is taken.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.common.errors import OrchardError, ResourceExhaustedError, UnavailableError
from services.exec_agent.latch import Latch
from services.exec_agent.model import Command, End, Result, State
from services.exec_agent.oom import OomCounter
from services.exec_agent.process import Exited, Launcher, Process, Stage, Target
from services.exec_agent.process_spec import ProcessSpec
from services.exec_agent.program import Programs, start_error
from services.exec_agent.pump import OutputPump
from services.exec_agent.spool import Spool
from services.exec_agent.standard import Standard
from services.exec_agent.stdin import Stdin
from services.exec_agent.waits import Timer, Waits

DRAIN_SECONDS: Final = 0.06
"""How long an ended command's pipes are still read where a child of it holds them open."""
_KILL_PATIENCE_SECONDS: Final = 2.0
"""After KILL a process that hangs in the kernel may stay; its command is reported nevertheless."""
_START_PATIENCE_SECONDS: Final = 30.0
"""A start takes a millisecond; user code may have stopped the launcher."""
_SHELL_KILLED: Final = 128 + signal.SIGKILL
_LOST = "a process of the platform inside the sandbox was killed, and the command with it"


@dataclass(frozen=True, slots=True)
class Host:
    """What an execution needs of its agent."""

    waits: Waits
    launcher: Launcher
    oom: OomCounter
    null_fd: int
    """/dev/null, open for reading."""
    started: Callable[[Execution], None]
    """Called once, when its process runs."""
    ended: Callable[[Execution], None]
    """Called once, when the execution has ended."""


class Execution:
    """A command and how it stands. All methods run on the event loop."""

    def __init__(self, exec_id: str, sequence: int, command: Command | None, spool: Spool, host: Host) -> None:
        """`command` is None for an id that is only known to have ended."""
        self._loop = asyncio.get_running_loop()
        self._host = host
        self.exec_id = exec_id
        self.sequence = sequence
        self.command = command
        self.create_ns = time.time_ns()
        self.start_ns = 0
        self.end_monotonic = 0.0
        self.pid = 0
        self.state = State.QUEUED
        self.result: Result | None = None
        self.start_error: OrchardError | None = None
        self.interrupted = False
        self.journalled = False
        """Whether the journal has its beginning."""
        self.spool = spool
        self.pump: OutputPump | None = None
        self.stdin: Stdin | None = None
        if command is not None and (command.stdin_open or command.tty is not None):
            self.stdin = Stdin(terminal=command.tty is not None)
        self.begun = Latch(self._loop, host.waits)
        """Set when it has started or will not."""
        self.done = Latch(self._loop, host.waits)
        self._process: Process | None = None
        self._spec: ProcessSpec | None = None
        self._exited: Exited | None = None
        self._end_ns = 0
        self._ending: tuple[End, str] | None = None
        self._sent: set[int] = set()
        self._oom_before = 0
        self._calls = 0
        self._limit_timer: Timer | None = None
        self._end_timer: Timer | None = None
        self._orphan_timer: Timer | None = None

    # ------------------------------------------------------------ start

    def queue(self, command: Command, waited: float) -> None:
        """It waits behind others, and has done so for `waited` seconds."""
        if command.queue_timeout is not None:
            if waited >= command.queue_timeout:  # that may have passed while there was no agent
                self._queue_timed_out()
                return
            self._limit_timer = self._host.waits.call_later(command.queue_timeout - waited, self._queue_timed_out)
        self._watch_orphan()

    def _queue_timed_out(self) -> None:
        seconds = self.command.queue_timeout if self.command is not None else None
        self.cancel(End.NOT_STARTED, f"it waited longer than its queue timeout of {seconds:g} s")

    def start(self, command: Command, programs: Programs, begin: Callable[[], None]) -> None:
        """Start it now; `begin` writes the journal first. A failure is an end too, see `start_error`."""
        self._cancel(self._limit_timer)
        standard = Standard()
        try:
            self._spec = programs.resolve(command)
            standard.open(command, self._spec.identity, self._host.null_fd)
            begin()
            self._spawn(self._spec, command, standard)
        except OrchardError as error:
            standard.close()
            self._fail(error)
        except OSError as error:
            standard.close()
            self._fail(
                ResourceExhaustedError(
                    f"the agent can start no more commands now: {error.strerror}; end some first",
                    reason="TOO_MANY_EXECS",
                )
            )

    def _spawn(self, spec: ProcessSpec, command: Command, standard: Standard) -> None:
        given, outputs, stdin = standard.given, standard.outputs, standard.stdin
        self._oom_before = self._host.oom.read()
        self._process = self._host.launcher.spawn(spec, standard.descriptors, self, lambda: self._handed_over(given))
        standard.given, standard.outputs, standard.stdin = [], {}, -1
        if command.stdin:
            self.stdin = Stdin.of(command.stdin)
        if self.stdin is not None:
            self.stdin.open(stdin)
        self.pump = OutputPump(self._host.waits, self.spool, outputs, command.output_limit, self._over_limit)
        self._watch_orphan()

    def _handed_over(self, given: list[int]) -> None:
        """The launcher has it, or it was given up. A thousand that start at once wait for each other before that."""
        for descriptor in given:
            os.close(descriptor)
        given.clear()
        if self.result is None:
            self._limit_timer = self._host.waits.call_later(_START_PATIENCE_SECONDS, self._start_stuck)

    def _fail(self, error: OrchardError) -> None:
        self.start_error = error
        self._finish(End.NOT_STARTED, error.message)

    # ------------------------------------------------------------ what the launcher reports (ProcessEvents)

    def on_started(self, pid: int) -> None:
        """See ProcessEvents."""
        self.pid = pid
        self.start_ns = time.time_ns()
        self.state = State.RUNNING
        self._host.started(self)
        self._cancel(self._limit_timer)
        if self.command is not None and self.command.timeout is not None and self._ending is None:
            self._limit_timer = self._host.waits.call_later(self.command.timeout, self._timed_out)
        self.begun.set()

    def on_failed(self, stage: Stage, error: int) -> None:
        """See ProcessEvents."""
        if self._ending is not None:
            self._finish(End.NOT_STARTED, self._ending[1])
        elif self.command is not None and self._spec is not None:
            self._fail(start_error(stage, error, self.command, self._spec, self.command.user))

    def on_exited(self, exited: Exited) -> None:
        """See ProcessEvents."""
        self._exited = exited
        self._end_ns = time.time_ns()
        self._cancel(self._limit_timer)
        self._cancel(self._orphan_timer)
        if self._ending is None:
            self._take_rest(exited)
        elif exited.tree_empty:
            self._conclude()
        # Otherwise the platform ended it: it has ended when its tree has.

    def _take_rest(self, exited: Exited) -> None:
        """Take what it wrote last.

        A pipe that a child of it holds open is read a little longer, one that slow readers hold up until they move.
        """
        pump = self.pump
        if pump is None:
            return
        if pump.drain() and (exited.tree_empty or pump.eof):
            self._conclude()
        else:
            pump.on_eof = self._conclude
            self._end_timer = self._host.waits.call_later(DRAIN_SECONDS, self._rest_taken)

    def _rest_taken(self) -> None:
        if self.pump is None or self.pump.drain():
            self._conclude()
        else:
            self._end_timer = self._host.waits.call_later(DRAIN_SECONDS, self._rest_taken)

    def on_empty(self) -> None:
        """See ProcessEvents."""
        if self._ending is not None:
            self._conclude()
        elif self._exited is not None and self.result is None:
            self._cancel(self._end_timer)
            self._take_rest(self._exited)

    def on_lost(self) -> None:
        """See ProcessEvents."""
        if self._ending is None and self._exited is None:
            self._ending = (End.AGENT_RESTARTED, _LOST)
        self._conclude()

    # ------------------------------------------------------------ ends that the platform brings about

    def cancel(self, end: End, message: str) -> None:
        """End it, from outside: out of the queue, or TERM, and KILL after its grace."""
        if self.result is not None or self._exited is not None or self._ending is not None:
            return
        if self._process is None:
            self._finish(End.NOT_STARTED, message)
            return
        self._ending = (end, message)
        self._cancel(self._limit_timer)
        grace = self.command.kill_grace if self.command is not None else 0.0
        if grace > 0:
            self._process.signal(Target.TREE, signal.SIGTERM)
            if self.command is not None and self.command.tty is not None:
                # Its terminal goes: shells at a prompt heed nothing else, and what ^Z has stopped must hear of it.
                self._process.signal(Target.TREE, signal.SIGHUP)
                self._process.signal(Target.TREE, signal.SIGCONT)
            self._end_timer = self._host.waits.call_later(grace, self._kill)
        else:
            self._kill()

    def signal(self, target: Target, number: int) -> None:
        """Pass a signal on to a running command."""
        if self._process is not None and self._exited is None:
            self._sent.add(number)
            if target is Target.TREE and number == signal.SIGKILL:
                self._process.kill()
            else:
                self._process.signal(target, number)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._end_timer = self._host.waits.call_later(_KILL_PATIENCE_SECONDS, self._conclude)

    def _timed_out(self) -> None:
        seconds = self.command.timeout if self.command is not None else None
        self.cancel(End.TIMED_OUT, f"it ran longer than its timeout of {seconds:g} s")

    def _start_stuck(self) -> None:
        self._host.launcher.kill()
        self.on_lost()

    def _over_limit(self) -> None:
        self.cancel(End.OUTPUT_LIMIT, self._limit_message())

    def _orphaned(self) -> None:
        seconds = self.command.orphan_timeout if self.command is not None else None
        self.cancel(End.ORPHANED, f"no call for it was open for {seconds:g} s")

    # ------------------------------------------------------------ calls that are open for it

    @property
    def is_used(self) -> bool:
        """Whether a call for this exec is open."""
        return self._calls > 0

    def call_opened(self) -> None:
        """A call for this exec began: it is no orphan."""
        self._calls += 1
        self._cancel(self._orphan_timer)

    def call_closed(self) -> None:
        """A call for this exec ended."""
        self._calls -= 1
        self._watch_orphan()

    def _watch_orphan(self) -> None:
        seconds = self.command.orphan_timeout if self.command is not None else None
        if seconds is not None and self._calls == 0 and self.result is None and self._exited is None:
            self._cancel(self._orphan_timer)
            self._orphan_timer = self._host.waits.call_later(seconds, self._orphaned)

    # ------------------------------------------------------------ end

    def _conclude(self) -> None:
        """Everything is known that will be: say how it ended."""
        if self.result is not None:
            return
        if self.pump is not None:
            self.pump.drain(force=True)
        if self._ending is not None:
            self._finish(*self._ending)
        elif self._exited is not None:
            self._finish(*self._natural_end(self._exited))

    def _limit_message(self) -> str:
        limit = self.command.output_limit if self.command is not None else 0
        return f"it wrote more than {limit:,} bytes, its output limit"

    def _natural_end(self, exited: Exited) -> tuple[End, str]:
        code = os.waitstatus_to_exitcode(exited.status)
        suspicious = code in (-signal.SIGKILL, _SHELL_KILLED) or (exited.child_killed and code != 0)
        if suspicious and signal.SIGKILL not in self._sent and self._host.oom.read() != self._oom_before:
            return End.OUT_OF_MEMORY, "the sandbox's memory limit ended it; give the sandbox more memory"
        if self.pump is not None and self.pump.cut:
            # It ended before it could be told to. What is kept is not all that it wrote: that is no good result.
            return End.OUTPUT_LIMIT, self._limit_message()
        if code >= 0:
            return End.EXITED, ""
        if -code in self._sent:
            return End.KILLED, f"it was sent signal {-code}"
        return End.SIGNALLED, f"signal {-code} ({signal.strsignal(-code) or 'unknown'}) ended it"

    def _finish(self, end: End, message: str) -> None:
        if self.result is not None:
            return
        exited = self._exited
        code = os.waitstatus_to_exitcode(exited.status) if exited else 0
        self.result = Result(
            ended=end,
            exit_code=code if end is End.EXITED else -1,
            signal=-code if code < 0 else 0,
            message=message,
            end_ns=self._end_ns if end is End.EXITED else time.time_ns(),
            user_us=exited.user_us if exited else 0,
            system_us=exited.system_us if exited else 0,
            peak_bytes=exited.peak_bytes if exited else 0,
        )
        self._settle(self._loop.time())

    def adopt(self, result: Result) -> None:
        """It is known to have ended like this, before this agent or without a start."""
        self.result = result
        self._settle(self._loop.time())

    def _settle(self, now: float) -> None:
        self.state = State.ENDED
        self.end_monotonic = now
        for timer in (self._limit_timer, self._end_timer, self._orphan_timer):
            self._cancel(timer)
        if self._process is not None:
            self._process.detach()
        if self.stdin is not None:
            self.stdin.finish() if self._exited is not None else self.stdin.close()
        if self.pump is not None:
            self.pump.on_eof = None
        self.spool.finish()
        self._host.ended(self)
        self.begun.set()
        self.done.set()

    def interrupt(self) -> None:
        """The agent is about to stop: open calls end now."""
        self.interrupted = True
        if self.stdin is not None:
            self.stdin.interrupt()
        self.begun.wake_all()
        self.done.wake_all()
        self.spool.notify()

    def check_interrupted(self) -> None:
        """Raise UnavailableError if the agent stops before the command's end."""
        if self.interrupted and self.result is None:
            raise UnavailableError("the agent stops", reason="AGENT_STOPPING")

    def close(self) -> None:
        """The agent stops: a running command is ended by its reaper."""
        for timer in (self._limit_timer, self._end_timer, self._orphan_timer):
            self._cancel(timer)
        if self._process is not None:
            self._process.detach()
        if self.stdin is not None:
            self.stdin.close()
        if self.pump is not None:
            self.pump.close()
        self.spool.close()

    @staticmethod
    def _cancel(timer: Timer | None) -> None:
        if timer is not None:
            timer.cancel()
