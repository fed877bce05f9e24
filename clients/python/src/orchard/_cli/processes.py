"""Commands of a sandbox, whoever started them: ps, logs, kill."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import os
import stat
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.execution import exit_codes, tell_end, write_chunk
from orchard._cli.output import (
    ExecId,
    Json,
    SandboxId,
    age,
    client,
    complete_exec,
    describe,
    one_line,
    print_json,
    show,
    table,
)

if TYPE_CHECKING:
    from orchard import ExecInfo, OutputChunk, Process, Sandbox

_WIDTH: Final = 500
"""Of a table that is no terminal's: an id has at most 64 characters, a command line here 256."""


def ps(
    sandbox: SandboxId,
    running: Annotated[bool, typer.Option("--running", "-r", help="Only those that have not ended.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids alone.")] = False,
    json: Json = False,
) -> None:
    """List the commands of a sandbox, newest first, also those that have ended.

    Command lines are cut to the width of the terminal; the platform keeps 256 characters of each.
    """
    with client() as api:
        execs = api.attach(sandbox).list_execs()
    found = list(islice((one for one in execs if not running or one.ended is None), limit))
    if json:
        print_json(found)
    elif quiet:
        for one in found:
            typer.echo(one.exec_id)
    else:
        rows = [
            (one.exec_id, _state(one), age(one.create_time), _duration(one), one_line(one.command)) for one in found
        ]
        show(table(("EXEC ID", "STATE", "AGE", "DURATION", "COMMAND"), rows, cut="COMMAND"), width=_WIDTH)


def _state(info: ExecInfo) -> str:
    """In words, with the exit code or the signal."""
    if info.ended == "exited":
        return f"exited {info.exit_code}"
    if info.ended == "signalled":
        return f"signalled {info.signal}"
    return str(info.ended or info.state)


def _duration(info: ExecInfo) -> str:
    """From its start to its end, or until now; empty if it has not started."""
    if info.start_time is None:
        return ""
    end = info.end_time or dt.datetime.now(dt.UTC)
    seconds = max(0.0, (end - info.start_time).total_seconds())
    return f"{seconds:.1f}s" if seconds < 10 else age(info.start_time, now=end)


def logs(
    sandbox: SandboxId,
    exec_id: ExecId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on to its end, and exit with its exit code, as exec does.")
    ] = False,
) -> None:
    """Show the output of a command: what is retained of it, to stdout and stderr as it was written.

    Ctrl-C, or a reader that has read enough, ends this alone; the command runs on. "start" is the id of the sandbox's
    start command.
    """
    if not follow:
        with client() as api:
            _print(api.attach(sandbox).process(exec_id).output(follow=False))
        return
    with exit_codes(), client() as api:
        found = api.attach(sandbox)
        _print(found.portal.iterate(_while_read(found.asynchronous.process(exec_id).output())))
        if (result := found.process(exec_id).poll(output=False)) is None:
            raise RuntimeError("its output has ended, and it has not")
        # What is missing was told where it is missing.
        code = tell_end(dataclasses.replace(result, dropped_bytes=0), whole=False)
    raise typer.Exit(code)


def _print(output: Generator[OutputChunk, None, None]) -> None:
    # It is closed before its client is, also where what is written cannot be.
    with closing(output):
        for chunk in output:
            if chunk.missing:
                told = f"{chunk.missing:,} bytes of the output are missing here: no longer retained"
                typer.echo(f"orchard: {told}", err=True)
            write_chunk(chunk)


async def _while_read(output: AsyncGenerator[OutputChunk, None]) -> AsyncGenerator[OutputChunk, None]:
    """The output, as long as somebody reads what is written here.

    Raises:
        BrokenPipeError: nobody does any more. Also where there is nothing to write, which is how one would learn of it.
    """
    loop, ours = asyncio.get_running_loop(), sys.stdout.fileno()
    gone = asyncio.Event()
    # Nothing can be read from this end: it is ready once the other one is closed.
    is_pipe = stat.S_ISFIFO(os.fstat(ours).st_mode)
    if is_pipe:
        loop.add_reader(ours, gone.set)
    end = loop.create_task(gone.wait(), name="reader of standard output")
    coming: asyncio.Task[OutputChunk] | None = None
    try:
        while True:
            coming = loop.create_task(anext(output), name="output")
            await asyncio.wait((coming, end), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise BrokenPipeError
            try:
                chunk = coming.result()
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        if is_pipe:
            loop.remove_reader(ours)
        tasks = [task for task in (coming, end) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await output.aclose()


def kill(
    sandbox: SandboxId,
    exec_ids: Annotated[
        list[str],
        typer.Argument(
            help="The commands' ids, as `orchard exec -d` and `orchard ps` print them.",
            metavar="EXEC_ID",
            autocompletion=complete_exec,
        ),
    ],
    signal: Annotated[
        str | None,
        typer.Option("--signal", "-s", metavar="SIGNAL", help="Send this one instead, like INT, SIGINT or 2."),
    ] = None,
    json: Json = False,
) -> None:
    """End commands with all their processes: TERM, and KILL after their grace, 5 s by default. Those that wait in the
    queue never start.

    With --signal that signal alone is sent, and what it does is the command's choice. Says of each what was done.
    """
    number = None if signal is None else _signal_number(signal)
    done: dict[str, Any] = {"signalled": [], "ended": [], "failed": {}}
    with client() as api:
        for exec_id, info in _found(api.attach(sandbox), exec_ids, done, quiet=json):
            _end(api.attach(sandbox).process(exec_id), info, number, done, quiet=json)
    if json:
        print_json(done)
    if done["failed"]:
        raise typer.Exit(1)


def _signal_number(text: str) -> int:
    from orchard._client.errors import InvalidArgument
    from orchard._client.signal_numbers import signal_number

    try:
        number = int(text) if text.isdecimal() else signal_number(text)
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description, param_hint="--signal") from None
    if not 1 <= number <= 64:
        raise typer.BadParameter(f"{number} is no signal; it must be from 1 to 64", param_hint="--signal")
    return number


def _found(sandbox: Sandbox, exec_ids: list[str], done: dict[str, Any], *, quiet: bool) -> list[tuple[str, ExecInfo]]:
    """Those that the sandbox knows, each once. All are asked for before anything is done to one."""
    from orchard._client.errors import ExecExpired, ExecNotFound

    found = []
    for exec_id in dict.fromkeys(exec_ids):
        try:
            found.append((exec_id, sandbox.process(exec_id).info()))
        except ExecNotFound as error:
            _fail(exec_id, error, done)
        except ExecExpired:
            _tell_ended(exec_id, "long ago", done, quiet=quiet)
    return found


def _end(process: Process, info: ExecInfo, number: int | None, done: dict[str, Any], *, quiet: bool) -> None:
    from orchard import OrchardError

    exec_id = process.exec_id
    if info.ended is not None:
        _tell_ended(exec_id, _state(info), done, quiet=quiet)
        return
    try:
        if number is None:
            process.cancel()
        else:
            process.signal(number)
    except OrchardError as error:
        _fail(exec_id, error, done)
        return
    done["signalled"].append(exec_id)
    if not quiet:
        typer.echo(f"{exec_id}: cancelled" if number is None else f"{exec_id}: sent signal {number}")


def _tell_ended(exec_id: str, how: str, done: dict[str, Any], *, quiet: bool) -> None:
    done["ended"].append(exec_id)
    if not quiet:
        typer.echo(f"{exec_id}: had ended already: {how}")


def _fail(exec_id: str, error: Exception, done: dict[str, Any]) -> None:
    done["failed"][exec_id] = describe(error)
    typer.echo(f"orchard: {exec_id}: {done['failed'][exec_id]}", err=True)
