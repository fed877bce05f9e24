"""One environment of Harbor, method by method; fails loudly where it differs from what Harbor expects."""

import asyncio
import sys
import tomllib
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, SandboxBuildFailedError
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.error_policy import policy_for
from harbor.models.trial.paths import TrialPaths
from orchard import AsyncSandboxClient, FileNotFound, SandboxState
from orchard.harness.harbor import MemoryLimitExceededError, OrchardEnvironment, RuntimeRequestError

task, folder = map(Path, sys.argv[1:])


def make(name: str, *, network: NetworkMode = NetworkMode.NO_NETWORK, **options: Any) -> BaseEnvironment:
    config = tomllib.loads((task / "task.toml").read_text())["environment"]
    return OrchardEnvironment(
        environment_dir=task / "environment",
        environment_name="calc",
        session_id=name,
        trial_paths=TrialPaths(folder / name),
        task_env_config=EnvironmentConfig(**config),
        network_policy=NetworkPolicy(network_mode=network),
        **{"image": "", **options},
    )


async def raises(kind: type[BaseException], work: Any) -> BaseException:
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def commands(env: BaseEnvironment) -> None:
    done = await env.exec("pwd; echo $GREETING $A; echo oops >&2; exit 3", env={"A": "1"})
    assert (done.stdout, done.stderr, done.return_code) == ("/app\nhello 1\n", "oops\n", 3), done
    with env.scoped_exec_env({"A": "2"}):
        assert (await env.exec("echo $A", env={"A": "1"})).stdout == "2\n"
    assert (await env.exec("pwd", cwd="/usr")).stdout == "/usr\n"
    assert (await env.exec("pwd", cwd="/missing")).return_code == 126
    assert (await env.exec("id -un", user="nobody", cwd="/")).stdout == "nobody\n"
    with env.with_default_user(65534):
        assert (await env.exec("id -u", cwd="/")).stdout == "65534\n"

    done = await env.exec("echo begun; sleep 3456 & sleep 3456", timeout_sec=1)
    assert (done.stdout, done.return_code) == ("begun\n", 124), done
    assert "timeout" in done.stderr, done
    # A command that says the same of itself is believed, and remarked upon by nobody.
    done = await env.exec("exit 124")
    assert (done.stderr, done.return_code) == ("", 124), done

    # A cancelled one ends in the sandbox too.
    running = asyncio.create_task(env.exec("touch /tmp/begun; sleep 3457"))
    while not await env.is_file("/tmp/begun"):
        pass
    running.cancel()
    await raises(asyncio.CancelledError, running)
    while (await env.exec("pgrep -f '[s]leep 345'")).stdout:
        pass

    seen: list[tuple[str, str]] = []

    async def callback(text: str, stream: str) -> None:
        seen.append((stream, text))

    with env.scoped_output_callback(callback):
        done = await env.exec("echo a; echo b >&2")
    assert (done.stdout, done.stderr) == ("a\n", "b\n"), done
    assert sorted(seen) == [("stderr", "b\n"), ("stdout", "a\n")], seen


async def files(env: BaseEnvironment) -> None:
    # The task's own files came with the start, and the folders for logs are everybody's.
    assert await env.is_file("/app/calc.py")
    assert (await env.exec("touch /logs/agent/x /logs/verifier/x /logs/artifacts/x", user="nobody")).return_code == 0
    source = folder / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    await env.exec("mkdir -p /there && echo old > /there/kept")
    await env.upload_dir(source, "/there")
    assert (await env.exec("cat /there/kept; /there/deep/run.sh")).stdout == "old\nran\n"
    await env.upload_file(source / "deep" / "run.sh", "/there/other.sh")
    await env.exec("ln -s /etc/passwd /there/outside; mkfifo /there/pipe")
    await env.download_dir("/there", folder / "back")
    found = sorted(str(path.relative_to(folder / "back")) for path in (folder / "back").rglob("*"))
    assert found == ["deep", "deep/run.sh", "kept", "other.sh"], found
    await env.download_file("/there/kept", folder / "one")
    assert (folder / "one").read_text() == "old\n"
    await raises(FileNotFound, env.download_file("/missing", folder / "two"))
    assert not (folder / "two").exists()


async def main() -> None:
    # Refused before anything is made.
    for options, why in (
        ({"image": None}, "docker_image"),
        ({"network": NetworkMode.ALLOWLIST}, "allowlist"),
        ({"imagine": 1}, "imagine"),
    ):
        try:
            make("refused", **options)
        except ValueError as error:
            assert why in str(error), error
        else:
            raise AssertionError(f"{options} were taken")

    env = make("first")
    await env.start(force_build=False)
    await commands(env)
    await files(env)
    async with AsyncSandboxClient() as client:
        assert (await client.get(env.sandbox.sandbox_id)).info.network == "none"
        # Without its sandbox nothing is a result.
        await client.delete(env.sandbox.sandbox_id)
        error = await raises(RuntimeRequestError, env.exec("true"))
        await raises(RuntimeRequestError, env.upload_file(task / "task.toml", "/x"))
        for kind in (type(error), MemoryLimitExceededError, SandboxBuildFailedError):
            policy = policy_for(kind.__name__)
            assert (policy.should_retry, policy.should_grade, policy.has_valid_reward) == (True, False, False), kind
        await env.stop(delete=True)
        await env.stop(delete=True)

        # What cannot be made is no attempt either, and leaves nothing.
        missing = make("missing", image="nobody/imported-this:1")
        await raises(SandboxBuildFailedError, missing.start(force_build=False))
        await missing.stop(delete=True)

        kept = make("kept")
        await kept.start(force_build=False)
        sandbox_id = kept.sandbox.sandbox_id
        await kept.stop(delete=False)
        assert (await client.get(sandbox_id)).info.state is SandboxState.READY
        await client.delete(sandbox_id)


asyncio.run(main())
print("done")
