"""An evaluation with scripted answers, in sandboxes; prints what came of each sample."""

import asyncio
import json
import sys

from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from orchard import AsyncSandboxClient
from orchard.harness.inspect_ai import OrchardSandboxConfig, OrchardSandboxEnvironment

LOGINS = []


@scorer(metrics=[accuracy()])
def mended():
    async def score(state, target):
        environment = sandbox()
        LOGINS.append((await environment.connection(user="nobody")).command)
        done = await environment.exec(["python3", "-c", "import calc; assert calc.add(2, 3) == 5"])
        return Score(value=1 if done.success else 0, explanation=await environment.read_file("calc.py"))

    return score


@scorer(metrics=[accuracy()])
def lenient():
    """Says yes whatever there is: what a broken sandbox must not come to."""

    async def score(state, target):
        return Score(value=1)

    return score


def run(commands, judge, **options):
    outputs = [ModelOutput.for_tool_call("mockllm/model", "bash", {"command": command}) for command in commands]
    outputs.append(ModelOutput.from_content("mockllm/model", "Done."))
    for output in outputs:
        # Otherwise it is counted with a tokenizer from the network.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=outputs)
    config = OrchardSandboxConfig(working_directory="/work/sample", options={"labels": {"run": "7"}, **options})
    task = Task(
        dataset=[
            Sample(
                input="Mend calc.py.",
                files={"calc.py": "def add(a, b):\n    return a - b\n"},
                setup="#!/bin/sh\ntest -f calc.py",
            )
        ],
        solver=[use_tools(bash(timeout=3000)), generate()],
        scorer=judge(),
        sandbox=SandboxEnvironmentSpec("orchard", config),
        name="calc (tests)",
    )
    log = eval(task, model=model, display="none", log_dir=sys.argv[1], fail_on_error=False)[0]
    sample = log.samples[0]
    tools = [
        message.error.message if message.error else message.text
        for message in sample.messages
        if message.role == "tool"
    ]
    scores = {name: score.value for name, score in (sample.scores or {}).items()}
    return {"status": log.status, "scores": scores, "tools": tools, "error": sample.error and sample.error.message}


async def left():
    async with AsyncSandboxClient() as client:
        for info in [info async for info in client.list(labels={"harness": "inspect-ai"})]:
            await (await client.get(info.sandbox_id)).wait_ended(60)


async def cleaned():
    """What `inspect sandbox cleanup` takes: one by its id, then all that samples left."""
    ids = []
    for _ in range(3):
        made = await OrchardSandboxEnvironment.sample_init("left behind", None, {})
        ids.append(made["default"].sandbox.sandbox_id)
    await OrchardSandboxEnvironment.cli_cleanup(ids[0])
    async with AsyncSandboxClient() as client:
        first = (await (await client.get(ids[0])).wait_ended(60)).state
        others = [(await client.get(one)).info.state for one in ids[1:]]
        await OrchardSandboxEnvironment.cli_cleanup(None)
        ended = [(await (await client.get(one)).wait_ended(60)).state for one in ids[1:]]
    return [first, *others, *ended]


found = {
    "mended": run(["cat calc.py", "sed -i 's/a - b/a + b/' calc.py"], mended),
    "left alone": run(["ls"], mended),
    # Its time is up while the model's command runs.
    "lost": run(["sleep 2000"], lenient, ttl=30),
}
asyncio.run(left())
found["cleaned"] = asyncio.run(cleaned())
found["logins"] = LOGINS
print(json.dumps(found))
