"""A deployment of SWE-ReX, method by method; fails loudly where it differs from what SWE-ReX's own runtime does."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from orchard import AsyncSandboxClient, SandboxLost, SandboxState
from orchard.harness.swe_rex import OrchardDeployment, OrchardDeploymentConfig, OrchardRuntime
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

folder = Path(sys.argv[1])


async def raises(kind: type[BaseException], work: Any) -> BaseException:
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def commands(runtime: OrchardRuntime) -> None:
    def run(command: Any, **options: Any) -> Any:
        return runtime.execute(Command(command=command, **options))

    expected = CommandResponse(stdout="out\n", stderr="err\n", exit_code=3)
    assert await run("echo out; echo err >&2; exit 3", shell=True) == expected
    assert (await run(["echo", "a b"])).stdout == "a b\n"
    assert (await run("pwd", cwd="/usr")).stdout == "/usr\n"
    assert (await run(["sh", "-c", "echo $A"], env={"A": "1"})).stdout == "1\n"
    assert (await run("echo out; echo err >&2", shell=True, merge_output_streams=True)).stdout == "out\nerr\n"
    assert (await run(["no-such-program"])).exit_code == 127
    assert (await run(r"printf '\377'", shell=True)).stdout == "\\xff"
    await raises(CommandTimeoutError, run(["sleep", "3456"], timeout=1))
    error = await raises(NonZeroExitCodeError, run(["false"], check=True, error_msg="it failed"))
    assert str(error).startswith("it failed: "), error


async def files(runtime: OrchardRuntime) -> None:
    await runtime.write_file(WriteFileRequest(path="/tmp/new/a.txt", content="ü\r\n"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/new/a.txt"))).content == "ü\r\n"
    latin = ReadFileRequest(path="/tmp/new/a.txt", encoding="latin-1")
    assert (await runtime.read_file(latin)).content == "Ã¼\r\n"
    await raises(UnicodeDecodeError, runtime.read_file(ReadFileRequest(path="/tmp/new/a.txt", encoding="ascii")))
    await raises(FileNotFoundError, runtime.read_file(ReadFileRequest(path="/missing")))
    (folder / "up").mkdir()
    (folder / "up" / "one").write_text("1")
    await runtime.upload(UploadRequest(source_path=str(folder / "up"), target_path="/tmp/up"))
    assert (await runtime.read_file(ReadFileRequest(path="/tmp/up/one"))).content == "1"


async def a_late_interrupt(runtime: OrchardRuntime, run: Any) -> None:
    """It comes as the command is over, and nobody knows yet: the next one is not taken for interrupted."""
    session = runtime._sessions["default"]
    process, begin = session._process, session._offset
    assert process is not None
    output, write, told = process.output, process.write, asyncio.Event()

    async def prompts(count: int) -> None:
        seen = b""
        async for chunk in output(begin):
            seen += chunk.data
            if seen.count(session._prompt) >= count:
                return

    async def held(offset: int) -> Any:
        async for chunk in output(offset):
            if session._prompt in chunk.data:
                await told.wait()
            yield chunk

    async def late(data: Any) -> None:
        if data == "\x03":
            await runtime.write_file(WriteFileRequest(path="/tmp/over", content=""))
            await prompts(1)
        await write(data)
        if data == "\x03":
            await prompts(2)
            asyncio.get_running_loop().call_soon(told.set)

    process.output, process.write = held, late  # type: ignore[method-assign, assignment]
    waiting = asyncio.create_task(run("touch /tmp/begun; until test -e /tmp/over; do sleep 0.02; done; echo over"))
    while (await runtime.execute(Command(command=["test", "-e", "/tmp/begun"]))).exit_code:
        pass
    await runtime.run_in_session(BashInterruptAction(timeout=60))
    del process.output, process.write
    assert await waiting == BashObservation(output="over\n", exit_code=0)
    assert await run("echo next") == BashObservation(output="next\n", exit_code=0)


async def sessions(runtime: OrchardRuntime) -> None:
    def run(command: str, **options: Any) -> Any:
        return runtime.run_in_session(BashAction(command=command, **{"timeout": 60, **options}))

    await runtime.write_file(WriteFileRequest(path="/tmp/start.sh", content="echo hello; PS1='mine> '; export B=2\n"))
    request = CreateBashSessionRequest(startup_source=["/tmp/start.sh"], startup_timeout=60)
    assert (await runtime.create_session(request)).output == "hello\n"
    await raises(SessionExistsError, runtime.create_session(CreateBashSessionRequest()))

    # Directory and variables stay, with those of the start.
    assert await run("cd /usr && export A=1") == BashObservation(output="", exit_code=0)
    assert (await run('pwd; echo $A "$B"; echo err >&2')).output == "/usr\n1 2\nerr\n"
    # No newline is made up, and none is lost; what looks like a prompt is output.
    assert (await run("printf 'a\\n\\nb'")).output == "a\n\nb"
    assert (await run("echo 'mine> '; echo '$PS1!'")).output == "mine> \n$PS1!\n"
    assert (await run("cat <<'END'\n$x \"y\" 'z'\nEND\necho $(( 1 +\n1 ))")).output == "$x \"y\" 'z'\n2\n"
    long = "x" * 20_000
    assert (await run(f"echo {long}")).output == f"{long}\n"
    assert (await run("seq 200000 | tail -n 1; printf '\\033[31mred\\033[0m'")).output == "200000\nred"

    # How it ended, and what is made of it.
    assert (await run("(exit 7)", check="silent")).exit_code == 7
    assert (await run("false", check="ignore")).exit_code is None
    error = await raises(NonZeroExitCodeError, run("echo no; false", error_msg="it failed"))
    assert str(error).startswith("it failed: "), error
    assert "no" in str(error), error
    error = await raises(BashIncorrectSyntaxError, run("touch /tmp/half; if then"))
    assert error.extra_info["bash_stderr"], error
    assert (await run("ls /tmp/half", check="silent")).exit_code == 2

    # A timeout leaves it to run until it is interrupted; the shell is the same after that.
    await raises(CommandTimeoutError, run("echo begun; sleep 3456; echo never", timeout=1))
    stopped = await runtime.run_in_session(BashInterruptAction(timeout=30))
    assert "begun" in stopped.output, stopped
    assert (await run("echo $A; pgrep -f '[s]leep 3456'", check="silent")).output == "1\n"
    # So does one that does not mind ^C.
    await raises(CommandTimeoutError, run("sh -c 'trap \"\" INT; while :; do sleep 1; done'", timeout=1))
    await runtime.run_in_session(BashInterruptAction(timeout=10, n_retry=1))
    assert (await run("echo $A")).output == "1\n"
    # One that is over by itself is not taken for the next.
    await raises(CommandTimeoutError, run("sleep 3; echo late", timeout=1))
    assert (await run("echo $A")).output == "1\n"
    # While somebody waits for it.
    waiting = asyncio.create_task(run("touch /tmp/waits; sleep 3456", timeout=600, check="silent"))
    while (await runtime.execute(Command(command=["test", "-e", "/tmp/waits"]))).exit_code:
        pass
    await runtime.run_in_session(BashInterruptAction(timeout=60))
    assert (await waiting).exit_code == 130

    await a_late_interrupt(runtime, run)

    # An interactive program: what is typed, what it says, and its end.
    python = "PYTHON_BASIC_REPL=1 python3 -q"
    said = await run(python, is_interactive_command=True, expect=[">>> "])
    assert said.expect_string == ">>> ", said
    said = await run("print(6 * 7)", is_interactive_command=True, expect=[">>> "])
    assert (said.output, said.exit_code) == ("42", 0), said
    await run("quit()", is_interactive_quit=True)
    # Of a character of which only the first byte is there the rest may follow.
    halves = r"import os; os.write(1, b'ready\xc3'); input(); os.write(1, b'\xbc\n>>> '); input()"
    await run(f'python3 -c "{halves}"', is_interactive_command=True, expect=["ready"])
    said = await run("", is_interactive_command=True, expect=[">>> "])
    assert said.output == "ü", said
    await run("", is_interactive_quit=True)
    assert (await run("echo $A")).output == "1\n"

    # Others beside it, and its end.
    await runtime.create_session(CreateBashSessionRequest(session="other"))
    assert (await run("echo ${A:-none}", session="other")).output == "none\n"
    assert (await run("echo bye; exit 5", session="other", check="silent")).exit_code == 5
    await raises(SessionDoesNotExistError, run("true", session="other"))
    await runtime.close_session(CloseBashSessionRequest(session="other"))
    await raises(SessionDoesNotExistError, run("true", session="other"))
    await run("sleep 3458 &")
    await runtime.close_session(CloseBashSessionRequest())
    while (await runtime.execute(Command(command=["pgrep", "-f", "[s]leep 3458"]))).stdout:
        pass


async def main() -> None:
    config = OrchardDeploymentConfig(sandbox_options={"labels": {"run": "rex"}})
    deployment = config.get_deployment()
    try:
        deployment.runtime  # noqa: B018
    except DeploymentNotStartedError:
        pass
    else:
        raise AssertionError("a runtime without a start")
    steps: list[str] = []

    class Hook:
        def on_custom_step(self, message: str) -> None:
            steps.append(message)

    deployment.add_hook(Hook())
    await deployment.start()
    assert steps, "the hook heard nothing"
    assert await deployment.is_alive()
    runtime = deployment.runtime
    await commands(runtime)
    await files(runtime)
    await sessions(runtime)
    await runtime.create_session(CreateBashSessionRequest(session="left"))
    await runtime.close()

    async with AsyncSandboxClient() as client:
        # Without its sandbox nothing is a result.
        await client.delete(runtime.sandbox.sandbox_id)
        await raises(SandboxLost, runtime.execute(Command(command=["true"])))
        alive = await deployment.is_alive(timeout=60)
        assert not alive
        assert "SANDBOX_LOST" in alive.message, alive
        await deployment.stop()

        async with asyncio.timeout(120):
            second = OrchardDeployment()
            await second.start()
            sandbox_id = second.runtime.sandbox.sandbox_id
            await second.stop()
            await second.stop()
            assert (await (await client.get(sandbox_id)).wait_ended()).state is SandboxState.DELETED
    await raises(DeploymentStartupError, OrchardDeployment(image="nobody/imported-this:1").start())


asyncio.run(main())
print("done")
