"""Runs mini-swe-agent with scripted answers in a folder; it saves its trajectory to the file that is named."""

import sys
from pathlib import Path

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicToolcallModel, make_toolcall_output


def answer(text: str, call_id: str, command: str) -> dict:
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "{command}"}}'}}
    return make_toolcall_output(text, [call], [{"command": command, "tool_call_id": call_id}])


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat patch.txt"
ANSWERS = [
    answer("Look first.", "c1", "cat calc.py"),
    answer("A command that fails.", "c2", "cat missing.py"),
    answer("Hand it in.", "c3", SUBMIT),
]

output, workspace = map(Path, sys.argv[1:])
(workspace / "calc.py").write_text("def add(a, b):\n    return a - b\n")
(workspace / "patch.txt").write_text("diff --git a/calc.py b/calc.py\n-    return a - b\n+    return a + b\n")
agent = DefaultAgent(
    DeterministicToolcallModel(outputs=ANSWERS),
    LocalEnvironment(cwd=str(workspace)),
    system_template="You fix bugs.",
    instance_template="Fix this: {{task}}",
    cost_limit=100.0,
)
agent.run("the sum in calc.py is wrong")
agent.save(output, {"instance_id": "calc__calc-1"})
