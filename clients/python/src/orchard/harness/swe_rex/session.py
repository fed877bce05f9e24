"""A shell that keeps its directory and variables: bash on a terminal, whose prompt tells where a command ends.

Commands reach it as a file that it reads, so that they may have any length, lines and quotes; after each it prints a
mark with the exit code, then its prompt. Mark and prompt have a random name, and the shell is told of them in two
halves, so that nothing but the shell prints them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionNotInitializedError,
)
from swerex.runtime.abstract import Action, BashAction, BashInterruptAction, BashObservation

from orchard._client import errors
from orchard._client.options import Terminal
from orchard._client.process import AsyncProcess
from orchard._client.sandbox import AsyncSandbox

_START_SECONDS: Final = 120.0
_CHECK_SECONDS: Final = 60.0
# Shorter waits would be for the network and not for the command.
_LEAST_INTERRUPT_SECONDS: Final = 2.0
_INTERRUPTED: Final = 130
# What of a command's output is held at most; the beginning is dropped.
_KEPT_BYTES: Final = 64 << 20
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_QUIET: Final = "stty -echo -onlcr"
_WIDE: Final = Terminal(rows=24, columns=512, term="dumb")


@dataclass(frozen=True, slots=True)
class _Part:
    """Output up to a prompt, and the mark in it."""

    output: str
    number: int | None = None
    """Of the command whose mark it is; None without one: the shell was interrupted."""
    exit_code: int = _INTERRUPTED


class BashSession:
    """One shell of a sandbox. Its calls run one at a time; an interrupt may come while another waits."""

    def __init__(self, sandbox: AsyncSandbox, name: str) -> None:
        self._sandbox = sandbox
        self._name = name
        self._process: AsyncProcess | None = None
        self._token = secrets.token_hex(8)
        self._prompt = f"<{self._token}>".encode()
        self._marks = re.compile(rb"<%b:(\d+):(\d+)>" % self._token.encode())
        self._script = f"/tmp/.orchard-{self._token}"  # noqa: S108 (its name cannot be guessed)
        self._buffer = bytearray()
        self._offset = 0
        self._number = 0
        self._running = asyncio.Lock()

    async def start(self, sources: Sequence[str], timeout: float) -> str:
        """Start the shell, then let it read files within `timeout` seconds; returns what they print.

        Raises:
            SessionNotInitializedError: the sandbox has no bash.
            CommandTimeoutError: the files took too long.
        """
        try:
            self._process = await self._sandbox.start(["bash", "--noediting", "-i"], tty=_WIDE)
        except errors.CommandNotStarted as error:
            raise SessionNotInitializedError(f"sessions need bash: {error}") from error
        try:
            await self._synchronise(_START_SECONDS, line=_QUIET)
            if not sources:
                return ""
            command = "\n".join(f". {shlex.quote(path)}" for path in sources)
            part = await self._command(command, timeout)
        except BaseException:
            await self._process.cancel()
            raise
        return part.output

    async def close(self) -> None:
        """End the shell with all that it started."""
        if self._process is not None:
            await self._process.cancel()

    async def run(self, action: Action) -> BashObservation:
        """Run an action; see OrchardRuntime.run_in_session."""
        if isinstance(action, BashInterruptAction):
            return await self._interrupt(action)
        async with self._running:
            if action.is_interactive_command or action.is_interactive_quit:
                return await self._interact(action)
            return await self._run(action)

    async def _run(self, action: BashAction) -> BashObservation:
        await self._sandbox.write_file(self._script, action.command + "\n", mode=0o600)
        await self._check_syntax(action.command)
        part, expected = await self._read_command(action)
        exit_code = None if expected or action.check == "ignore" else part.exit_code
        if action.check == "raise" and exit_code is None:
            raise NoExitCodeError(f"{action.command!r} has not ended: {expected!r} came first")
        if action.check == "raise" and exit_code != 0:
            said = f"Command {action.command!r} failed with exit code {exit_code}. Here is the output:\n{part.output!r}"
            raise NonZeroExitCodeError(f"{action.error_msg}: {said}" if action.error_msg else said)
        return BashObservation(output=part.output, exit_code=exit_code, expect_string=expected)

    async def _check_syntax(self, command: str) -> None:
        """Before it is run, as SWE-ReX does; half of a wrong command would run otherwise."""
        checked = await self._sandbox.exec(["bash", "-n", self._script], timeout=_CHECK_SECONDS, concurrent=True)
        if not checked.ok:
            stderr = checked.stderr.replace(self._script, "bash")
            raise BashIncorrectSyntaxError(
                f"bash does not take the command {command!r}:\n{stderr}",
                extra_info={"bash_stdout": checked.stdout, "bash_stderr": stderr},
            )

    async def _read_command(self, action: BashAction) -> tuple[_Part, str]:
        """Run the script; returns its output, and the expected text that came before its end, if one did."""
        number = await self._type(f". {self._script}")
        try:
            async with asyncio.timeout(action.timeout):
                return await self._wait(number, action.expect)
        except TimeoutError as error:
            if isinstance(error, errors.OrchardError):
                raise
            why = f"timeout after {action.timeout} seconds while running command {action.command!r}"
            raise CommandTimeoutError(why) from error

    async def _command(self, command: str, timeout: float) -> _Part:
        await self._sandbox.write_file(self._script, command + "\n", mode=0o600)
        part, _ = await self._read_command(BashAction(command=command, timeout=timeout))
        return part

    async def _interact(self, action: BashAction) -> BashObservation:
        """Type a line to whatever program has the terminal, and wait for what it says then, or for its end."""
        await self._write(f"{action.command}\n")
        try:
            async with asyncio.timeout(action.timeout):
                part, expected = await self._wait(None, action.expect)
        except TimeoutError as error:
            if isinstance(error, errors.OrchardError):
                raise
            why = f"timeout after {action.timeout} seconds while running command {action.command!r}"
            raise CommandTimeoutError(why) from error
        output = part.output
        if action.is_interactive_quit:
            # Such programs turn echo on.
            await self._synchronise(_START_SECONDS, line=_QUIET)
        else:
            output = output.lstrip().removeprefix(action.command).strip()
        return BashObservation(output=output, exit_code=0, expect_string=expected)

    async def _interrupt(self, action: BashInterruptAction) -> BashObservation:
        """End what runs: ^C, again and again, then KILL."""
        waits = max(action.timeout, _LEAST_INTERRUPT_SECONDS)
        kill = "\x1a", "kill -9 %%\n"
        for keys in [*[("\x03",)] * max(1, action.n_retry), kill]:
            for key in keys:
                await self._write(key)
            is_waited_for = self._running.locked()
            try:
                async with asyncio.timeout(waits):
                    await self._running.acquire()
            except TimeoutError:
                continue
            try:
                # Who waits for the command sees its prompt. Where that was over already, ^C brings one more, which is
                # not to pass for the end of the next one.
                output = await self._synchronise(waits)
            except CommandTimeoutError:
                continue
            finally:
                self._running.release()
            return BashObservation(output="" if is_waited_for else output.strip(), exit_code=0)
        raise CommandTimeoutError(f"session {self._name!r} could not be interrupted")

    async def _synchronise(self, seconds: float, *, line: str = ":") -> str:
        """Have the shell at its prompt, with nothing of earlier commands to come; returns what came until then."""
        number = await self._type(line)
        output = ""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    part, _ = await self._wait(None, ())
                    output += part.output
                    if part.number == number:
                        return output
        except TimeoutError as error:
            if isinstance(error, errors.OrchardError):
                raise
            raise CommandTimeoutError(f"the shell did not come to its prompt within {seconds:g} s") from error

    async def _type(self, line: str) -> int:
        """Type a line and have the shell print a mark after it, then its prompt; returns the mark's number."""
        self._number += 1
        half = len(self._token) // 2
        first, second = self._token[:half], self._token[half:]
        mark = f"printf '<%s%s:%d:%d>' {first} {second} {self._number} $?"
        # Set each time, since the command may have set one of its own.
        prompt = f"PS1='<{first}''{second}>' PS2= PS0= PROMPT_COMMAND="
        await self._write(f"{line}; {mark}; {prompt}\n")
        return self._number

    async def _write(self, text: str) -> None:
        if self._process is None:
            raise SessionNotInitializedError("the session was not started")
        try:
            await self._process.write(text)
        except errors.StdinClosed as error:
            raise SessionDoesNotExistError(f"the shell of session {self._name!r} has ended") from error

    async def _wait(self, number: int | None, expect: Sequence[str]) -> tuple[_Part, str]:
        """Read up to the prompt after a command's mark (None: up to any prompt), or to a text that is expected.

        A prompt without a mark is that of a shell that was interrupted, and ends the wait too.
        """
        if self._process is None:
            raise SessionNotInitializedError("the session was not started")
        patterns = [(text, re.compile(text)) for text in expect]
        async with aclosing(self._process.output(self._offset)) as chunks:
            while True:
                while (part := self._next_part()) is not None:
                    if number is None or part.number in (number, None):
                        return part, ""
                if patterns and (found := self._take_expected(patterns)) is not None:
                    return found
                chunk = await anext(chunks, None)
                if chunk is None:
                    return await self._ended(), ""
                self._offset = chunk.offset + len(chunk.data)
                self._buffer += chunk.data
                del self._buffer[: max(0, len(self._buffer) - _KEPT_BYTES)]

    def _next_part(self) -> _Part | None:
        """What stands before the next prompt."""
        end = self._buffer.find(self._prompt)
        if end < 0:
            return None
        data = bytes(self._buffer[:end])
        del self._buffer[: end + len(self._prompt)]
        marks = list(self._marks.finditer(data))
        if not marks:
            return _Part(_text(data))
        mark = marks[-1]
        return _Part(_text(data[: mark.start()]), int(mark[1]), int(mark[2]))

    def _take_expected(self, patterns: Sequence[tuple[str, re.Pattern[str]]]) -> tuple[_Part, str] | None:
        """The output before the first of the expected texts, if one is there."""
        # What is left may begin or end within a character, the rest of which is still to come.
        text = self._buffer.decode(errors="surrogateescape")
        matches = [(match.start(), match.end(), name) for name, one in patterns if (match := one.search(text))]
        if not matches:
            return None
        start, end, name = min(matches)
        self._buffer = bytearray(text[end:].encode(errors="surrogateescape"))
        return _Part(_text(text[:start].encode(errors="surrogateescape"))), name

    async def _ended(self) -> _Part:
        """The last part of a shell that has ended, as by `exit`.

        Raises:
            SessionDoesNotExistError: that had been told already.
            SandboxLost, CommandInterrupted: the platform ended it.
        """
        if self._process is None or (self._number < 0 and not self._buffer):
            raise SessionDoesNotExistError(f"the shell of session {self._name!r} has ended")
        result = await self._process.wait()
        data, self._buffer, self._number = bytes(self._buffer), bytearray(), -1
        code = result.exit_code if result.exit_code >= 0 else 128 + result.signal
        return _Part(_text(data), -1, code)


def _text(data: bytes) -> str:
    """Output as text, without the escape sequences that only a terminal understands."""
    return _ESCAPES.sub("", data.decode(errors="backslashreplace")).replace("\r\n", "\n")
