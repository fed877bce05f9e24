"""orchard exec and orchard shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.output import Json, SandboxId, client, complete_exec, fail, pairs, print_json, seconds

if TYPE_CHECKING:
    from orchard import ExecResult, OutputChunk, Sandbox

# As `docker exec` and shells have it.
PLATFORM_ERROR: Final = 125
_START_CODES: Final = {"COMMAND_NOT_EXECUTABLE": 126, "COMMAND_NOT_FOUND": 127}
_END_CODES: Final = {"timed_out": 124, "out_of_memory": 137, "killed": 137, "output_limit": 137}
_INPUT_BYTES: Final = 512 << 10
_ORPHAN_SECONDS: Final = 60.0
# A shell that reads its start-up files as at a prompt, and keeps the PATH of the image, which a login shell may not.
_SHELL: Final = 'b=$(command -v bash) && exec "$b"; exec sh'


def exec_command(  # noqa: PLR0917 (options of the command line)
    sandbox: SandboxId,
    command: Annotated[
        list[str],
        typer.Argument(
            help="One argument is a shell command line; several are a program and its arguments. Options go before the "
            "sandbox."
        ),
    ],
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Can be repeated.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Where it runs.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Who runs it: name or name:group.")] = None,
    timeout: Annotated[str | None, typer.Option(help='Like 10m, or "none". Default: 1h.')] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Send standard input, of any size, as it comes.")
    ] = False,
    tty: Annotated[
        bool, typer.Option("--tty", "-t", help="Give it a terminal like this one; with -i its keys go there.")
    ] = False,
    merge_stderr: Annotated[bool, typer.Option(help="Send its stderr to stdout, in exact order.")] = False,
    concurrent: Annotated[bool, typer.Option(help="Do not wait for the commands before it.")] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Start it, print its exec id and return; it runs on. `orchard ps` tells how it stands, `orchard logs` "
            "shows its output, `orchard kill` ends it.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Run a command in a sandbox. Its output streams as it is written, and its exit code is passed on.

    Ctrl-C ends the command; with -it it is a key like any other, and Enter ~ . leaves (see orchard shell). Other exit
    codes: 124 timed out, 125 an error of the platform, 126 and 127 as in a shell, 128 + N ended by signal N.
    """
    _check_terminal(tty, json=json, background=background)
    options: dict[str, Any] = {
        "env": pairs("--env", env),
        "cwd": workdir,
        "user": user,
        "merge_stderr": merge_stderr or None,
        "concurrent": concurrent or None,
        "input": _read_stdin() if stdin and (json or background) else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if timeout is not None:
        options["timeout"] = None if timeout == "none" else seconds("--timeout", timeout)
    command = command_words(command)
    program: str | list[str] = command[0] if len(command) == 1 else command
    with exit_codes():
        if (stdin or tty) and not json and not background:
            code = _attach(sandbox, program, options, stdin=stdin, tty=tty)
        else:
            with client() as api:
                code = _run(api.attach(sandbox), program, options, background=background, json=json)
    raise typer.Exit(code)


def shell_command(
    sandbox: SandboxId,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Can be repeated.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Where it starts.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Whose shell: name or name:group.")] = None,
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach",
            "-a",
            metavar="EXEC_ID",
            help="Go on with a terminal that was left.",
            autocompletion=complete_exec,
        ),
    ] = None,
) -> None:
    """Open a shell in a sandbox: bash where it has that, else sh.

    It is as a shell here: keys, colours, full-screen programs and the size of the window are those of this terminal. A
    connection that is lost is made anew, and nothing is lost with it. Enter ~ . leaves and lets it run on; --attach
    goes on with it. Enter ~ ~ types a ~. Its exit code is passed on.
    """
    if not _has_terminal():
        typer.echo(
            f"orchard: a shell needs a terminal, and standard input and output are no terminal here; to pipe, "
            f"`orchard exec -i {sandbox} -- sh`",
            err=True,
        )
        raise typer.Exit(2)
    if attach is not None and (env or workdir or user):
        raise typer.BadParameter("goes without --env, --workdir and --user: it runs already", param_hint="--attach")
    options = {"env": pairs("--env", env), "cwd": workdir, "user": user}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    with exit_codes():
        code = _attach(sandbox, _SHELL, given, stdin=True, tty=True, exec_id=attach)
    raise typer.Exit(code)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Errors exit with codes that leave the command's own to the command."""
    from orchard import CommandNotStarted, OrchardError

    try:
        yield
    except CommandNotStarted as error:
        fail(error, code=_START_CODES.get(error.reason, PLATFORM_ERROR))
    except OrchardError as error:
        fail(error, code=PLATFORM_ERROR)


def _has_terminal() -> bool:
    return os.isatty(0) and os.isatty(1)


def _check_terminal(tty: bool, *, json: bool = False, background: bool = False) -> None:
    if tty and (json or background):
        raise typer.BadParameter("goes neither with --json nor with --detach", param_hint="--tty")
    if tty and not _has_terminal():
        raise typer.BadParameter(
            "standard input and output are no terminal here; to pipe, give -i alone", param_hint="--tty"
        )


def _attach(sandbox_id: str, program: str | list[str], options: dict[str, Any], **how: Any) -> int:
    import asyncio

    return asyncio.run(_run_attached(sandbox_id, program, options, **how))


async def _run_attached(
    sandbox_id: str,
    program: str | list[str],
    options: dict[str, Any],
    *,
    stdin: bool,
    tty: bool,
    exec_id: str | None = None,
) -> int:
    """Run a command with the standard descriptors of this program, or go on with the one that has `exec_id`."""
    from orchard import AsyncSandboxClient
    from orchard._cli.terminal import Detached, Left, Session, local_terminal

    async with AsyncSandboxClient() as api:
        sandbox = api.attach(sandbox_id)
        offset = 0
        if exec_id is not None:
            process = sandbox.process(exec_id)
            # What was on the screen was shown; the new size makes full-screen programs draw theirs anew.
            offset = (await process.info()).output_size
        elif tty:
            process = await sandbox.start(program, **{"tty": local_terminal(), **options})
        else:
            piped = {
                "stdin": True,
                "timeout": 3600.0,
                "concurrent": False,
                "orphan_timeout": _ORPHAN_SECONDS,
                **options,
            }
            process = await sandbox.start(program, **piped)
        try:
            result = await Session(process, stdin=stdin, terminal=tty, offset=offset).run()
        except Detached:
            again = f"orchard shell {sandbox_id} --attach {process.exec_id}"
            typer.echo(f"\norchard: left; it runs on, and `{again}` goes on with it", err=True)
            return 0
        except Left as left:
            return 128 + left.number
    return tell_end(result, whole=not tty)


def command_words(words: list[str]) -> list[str]:
    """What the command is: all behind the sandbox, or behind a "--" there."""
    if words[0] == "--":
        if len(words) == 1:
            raise typer.BadParameter("is missing behind --", param_hint="COMMAND...")
        return words[1:]
    if words[0].startswith("-") and " " not in words[0]:
        raise typer.BadParameter(
            f"{words[0]} stands where the command begins: options go before the sandbox, as in "
            f"`orchard exec OPTIONS SANDBOX COMMAND` (--help lists them), or put -- before a command that begins with "
            f"a dash",
            param_hint="COMMAND...",
        )
    return words


def _run(sandbox: Sandbox, program: str | list[str], options: dict[str, Any], *, background: bool, json: bool) -> int:
    if background:
        process = sandbox.start(program, **options)
        if json:
            print_json({"exec_id": process.exec_id, "pid": process.pid})
        else:
            typer.echo(process.exec_id)
            _tell_where_it_is(sandbox.sandbox_id, process.exec_id)
        return 0
    if json:
        result = sandbox.exec(program, **options)
        print_json(_document(result))
        return exit_code(result)
    stream = sandbox.exec_stream(program, **options)
    for chunk in stream:
        write_chunk(chunk)
    return tell_end(stream.result, whole=True)


def _tell_where_it_is(sandbox_id: str, exec_id: str) -> None:
    """To a person; a program has the id, which is all on standard output."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        this = f"{sandbox_id} {exec_id}"
        typer.echo(
            f"orchard: it runs on; `orchard logs -f {this}` follows its output, `orchard kill {this}` ends it", err=True
        )


def tell_end(result: ExecResult, *, whole: bool) -> int:
    """Say what is to be said of an end; the exit code. `whole`: output that is missing must not pass for a success."""
    if result.ended not in ("exited", "signalled"):
        typer.echo(f"orchard: {result.describe()}", err=True)
    code = exit_code(result)
    if not result.dropped_bytes:
        return code
    typer.echo(f"orchard: {result.dropped_bytes:,} bytes of the output are missing: nobody read them in time", err=True)
    return code or (PLATFORM_ERROR if whole else 0)


def write_chunk(chunk: OutputChunk) -> None:
    """Write output to the stream here that it had there."""
    target = sys.stderr.buffer if chunk.stream == "stderr" else sys.stdout.buffer
    target.write(chunk.data)
    target.flush()


def exit_code(result: ExecResult) -> int:
    """The exit code that stands for a result."""
    if result.ended == "exited":
        return result.exit_code
    if result.ended == "signalled":
        return 128 + result.signal
    return _END_CODES.get(str(result.ended), PLATFORM_ERROR)


def _document(result: ExecResult) -> dict[str, Any]:
    return {
        "exec_id": result.exec_id,
        "ended": result.ended,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout_bytes,
        "stderr": result.stderr_bytes,
        "duration": result.duration,
        "user_cpu": result.user_cpu,
        "system_cpu": result.system_cpu,
        "peak_memory_bytes": result.peak_memory_bytes,
        "output_size": result.output_size,
        "dropped_bytes": result.dropped_bytes,
        "message": result.message,
    }


def _read_stdin() -> bytes:
    data = bytearray()
    while part := os.read(sys.stdin.fileno(), 1 << 16):
        data += part
        if len(data) > _INPUT_BYTES:
            raise typer.BadParameter(
                "with --json or --detach it is over 512 KiB; copy it in with `orchard cp` and redirect it",
                param_hint="--stdin",
            )
    return bytes(data)
