"""Texts of the benchmark's trajectories: prose, code and logs, as an agent that fixes a bug in Python sees them.

Code and prose come from the standard library of the Python that runs this: windows of its files and paragraphs of its
docstrings, chosen at random, none repeated on purpose. Logs are made line by line: paths, line numbers and functions of
that code, durations and hashes at random. How much information is in it is measured too (`compressed_share`).
"""

from __future__ import annotations

import lzma
import os
import random
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

from orchard import Step, ToolCall

MEAN_STEPS: Final = 47
MEAN_TOKENS: Final = 21_000
CHARACTERS_A_TOKEN: Final = 3.2
"""Of code and logs in the vocabularies of today's models."""
_TURNS: Final = (10, 35)  # each a call and its answer, after a system prompt and a task: 47 steps on average
_THOUGHT: Final = (150, 700)
_ANSWER: Final = (1200, 3600)
_SYSTEM_BYTES: Final = 3000
_TASK_BYTES: Final = 2200
_CORPUS_BYTES: Final = 16 << 20


class Generator:
    """Trajectories of a coding agent: the same for the same number on one Python."""

    @cached_property
    def _files(self) -> list[tuple[str, list[str]]]:
        root, files, size = Path(os.__file__).parent, [], 0
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in path.parts or "dist-packages" in path.parts or path.stat().st_size < 4096:
                continue
            text = path.read_text(errors="replace")
            files.append((str(path.relative_to(root)), text.splitlines()))
            size += len(text)
            if size > _CORPUS_BYTES:
                break
        return files

    @cached_property
    def _paragraphs(self) -> list[str]:
        texts = ("\n".join(lines) for _name, lines in self._files)
        documents = (document for text in texts for document in re.findall(r'"""(.+?)"""', text, re.DOTALL))
        parts = (re.sub(r"\s+", " ", part).strip() for document in documents for part in document.split("\n\n"))
        return [part for part in parts if len(part) > 60]

    @cached_property
    def _functions(self) -> list[str]:
        return [name for _, lines in self._files for line in lines for name in re.findall(r"^\s*def (\w+)", line)]

    def steps(self, number: int) -> list[Step]:
        """A system prompt, a task, and turns of a thought with a call and the call's output."""
        rng = random.Random(number)
        here = rng.sample(self._files, 12)
        # All attempts share the system prompt, as a harness's do.
        made = [Step.system(self._prose(random.Random(-1), _SYSTEM_BYTES))]
        made.append(Step.user(self._prose(rng, _TASK_BYTES // 2) + "\n\n" + self._traceback(rng, here)))
        for _turn in range(rng.randint(*_TURNS)):
            command, output = rng.choice((self._read, self._read, self._grep, self._tests))(rng, here)
            call = ToolCall(f"call_{rng.getrandbits(48):012x}", "bash", f'{{"command": "{command}"}}')
            made.append(Step.assistant(self._prose(rng, rng.randint(*_THOUGHT)), tool_calls=[call]))
            made.append(Step.tool(call.call_id, output))
        return made

    def _prose(self, rng: random.Random, size: int) -> str:
        parts: list[str] = []
        while sum(map(len, parts)) < size:
            parts.append(rng.choice(self._paragraphs))
        return "\n\n".join(parts)[:size]

    def _read(self, rng: random.Random, here: Sequence[tuple[str, list[str]]]) -> tuple[str, str]:
        name, lines = rng.choice(here)
        size, first, taken = rng.randint(*_ANSWER), rng.randrange(max(1, len(lines) - 60)), []
        for line in lines[first:]:
            taken.append(line)
            size -= len(line) + 1
            if size < 0:
                break
        return f"sed -n {first + 1},{first + len(taken)}p src/{name}", "\n".join(taken)

    def _grep(self, rng: random.Random, here: Sequence[tuple[str, list[str]]]) -> tuple[str, str]:
        word, size, found = rng.choice(self._functions), rng.randint(*_ANSWER), []
        while size > 0:
            name, lines = rng.choice(here)
            at = rng.randrange(len(lines))
            if lines[at].strip():
                found.append(f"src/{name}:{at + 1}:{lines[at]}")
                size -= len(found[-1]) + 1
        return f"grep -rn {word} src/", "\n".join(found)

    def _tests(self, rng: random.Random, here: Sequence[tuple[str, list[str]]]) -> tuple[str, str]:
        size, lines = rng.randint(*_ANSWER), [f"collected {rng.randint(20, 900)} items", ""]
        while sum(map(len, lines)) < size - 900:
            name = rng.choice(here)[0].replace("/", "/test_")
            took, state = rng.expovariate(3.0), rng.choices(("PASSED", "FAILED", "SKIPPED"), (20, 2, 1))[0]
            lines.append(f"tests/test_{name}::test_{rng.choice(self._functions)} {state} [{took:.3f}s]")
        lines.append(self._traceback(rng, here))
        passed, seconds = rng.randint(20, 900), rng.expovariate(0.1)
        lines.append(f"==== {rng.randint(1, 9)} failed, {passed} passed in {seconds:.2f}s ====")
        return f"git checkout {rng.getrandbits(28):07x} && python -m pytest -v", "\n".join(lines)

    def _traceback(self, rng: random.Random, here: Sequence[tuple[str, list[str]]]) -> str:
        frames = ["Traceback (most recent call last):"]
        for _ in range(rng.randint(3, 7)):
            name, lines = rng.choice(here)
            at = rng.randrange(len(lines))
            frames.append(f'  File "/testbed/src/{name}", line {at + 1}, in {rng.choice(self._functions)}')
            frames.append(f"    {lines[at].strip()}")
        error = rng.choice(("ValueError", "KeyError", "TypeError"))
        return "\n".join([*frames, f"{error}: {rng.choice(self._functions)}"])


def text_of(steps: Sequence[Step]) -> str:
    """All text of steps, in a row."""
    return "\n".join(step.text + "".join(call.arguments for call in step.tool_calls) for step in steps)


def compressed_share(generator: Generator, numbers: range) -> float:
    """What xz, at its strongest, makes of the texts of some trajectories, each by itself: a bound from above on the
    information in them. English prose and code have 2 to 2.5 bits a character by it, a share of 0.25 to 0.3.
    """
    texts = [text_of(generator.steps(number)).encode() for number in numbers]
    packed = sum(len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in texts)
    return packed / sum(map(len, texts))
