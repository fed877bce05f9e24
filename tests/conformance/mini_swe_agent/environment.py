"""One environment of mini-swe-agent, method by method; fails loudly where it differs from what the harness expects."""

import gc
import json

from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted
from orchard import InvalidArgument, SandboxClient, SandboxLost, SandboxState

KIND = "orchard.harness.mini_swe_agent.OrchardEnvironment"
client = SandboxClient()


def wait_deleted(sandbox_id: str) -> None:
    assert client.get(sandbox_id).wait_ended(60).state is SandboxState.DELETED


def raises(kind: type[BaseException], function, *arguments, **options) -> BaseException:
    try:
        function(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


environment = get_environment({"environment_class": KIND, "cwd": "/tmp", "env": {"A": "1"}, "forward_env": ["B", "A"]})


def run(command: str, **options) -> dict:
    return environment.execute({"command": command}, **options)


# Both streams in order, status, variables, directory; bytes that are no text.
done = run("echo out; echo err >&2; echo $A $B; pwd; exit 3")
assert (done["output"], done["returncode"], done["exception_info"]) == ("out\nerr\n1 two\n/tmp\n", 3, ""), done
assert run("pwd", cwd="/usr")["output"] == "/usr\n"
assert run(r"printf 'a\377b\r\n'")["output"] == "a\ufffdb\r\n"
assert run("kill -9 $$")["returncode"] == 137
assert run("[[ -n $BASH_VERSION ]]")["returncode"] == 0
assert run("exit 124")["exception_info"] == ""

# A timeout keeps what was written, and ends what was started.
done = run("echo begun; sleep 3456 & sleep 3456", timeout=1)
assert done["returncode"] == -1, done
assert done["output"] == "begun\n", done
assert "timeout" in done["exception_info"], done
assert run("pgrep -f '[s]leep 3456'")["output"] == ""

# What the agent does wrong is an observation.
assert run("pwd", cwd="/missing")["returncode"] == 126
assert run("echo a\0b")["returncode"] == 126
assert "missing" in run("cat missing")["output"]

# The end: the first line, and only after success.
run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; exit 1")
run("echo; echo hello; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
submitted = raises(Submitted, run, r"printf '\n COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT \nthe\r\npatch\n'")
assert submitted.messages[0]["extra"] == {"exit_status": "Submitted", "submission": "the\r\npatch\n"}, submitted
assert submitted.messages[0]["role"] == "exit"

# What trajectories and templates get.
kept = json.loads(json.dumps(environment.serialize()))["info"]["config"]
assert kept["environment"]["cwd"] == "/tmp", kept
assert kept["environment_type"].endswith(".OrchardEnvironment"), kept
variables = environment.get_template_vars(extra="x")
assert (variables["system"], variables["extra"], variables["cwd"]) == ("Linux", "x", "/tmp"), variables

# bash as a login shell, and another interpreter.
login = get_environment({"environment_class": KIND, "interpreter": ["bash", "-lc"]})
assert login.execute({"command": "shopt -q login_shell"})["returncode"] == 0
login.cleanup()
login.cleanup()
wait_deleted(login.sandbox_id)
snake = get_environment({"environment_class": KIND, "interpreter": ["python3", "-c"]})
assert snake.execute({"command": "print(6 * 7)"})["output"] == "42\n"

# Nobody called cleanup: the environment is no longer referred to.
snake_id = snake.sandbox_id
del snake
gc.collect()
wait_deleted(snake_id)

# Wrong options are told at once, and leave no sandbox behind.
before = {info.sandbox_id for info in client.list()}
raises(ValueError, get_environment, {"environment_class": KIND, "run_args": []})
error = raises(InvalidArgument, get_environment, {"environment_class": KIND, "cwd": "/testbed-that-is-missing"})
assert "cwd" in str(error), error
raises(InvalidArgument, get_environment, {"environment_class": KIND, "env": {"A=B": "1"}})
made = get_environment({"environment_class": KIND, "cwd": "/tmp/made", "create_cwd": True})
assert made.execute({"command": "pwd"})["output"] == "/tmp/made\n"
made.cleanup()
for info in client.list():
    if info.sandbox_id not in before:
        wait_deleted(info.sandbox_id)

# A sandbox that is gone is no observation.
client.delete(environment.sandbox_id)
raises(SandboxLost, run, "true")
assert isinstance(environment.failure, SandboxLost)
environment.cleanup()
client.close()
print("done")
