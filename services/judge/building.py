"""The prompts of one question, each built once however many votes are asked for; large ones not in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from services.judge.model import Question
from services.judge.prompting.prompts import Prompt, build_prompt

LARGE: Final = 256 << 10
"""Characters and bytes of a question that take the event loop longer than a thread costs (a few milliseconds)."""

T = TypeVar("T")


def size_of(question: Question) -> int:
    """About how much a question holds: characters of its texts, bytes of its images."""
    task = question.task
    size = sum(map(len, (task.instruction, task.patch, task.gold_patch, task.tests, task.final_response)))
    for steps in question.attempts:
        for step in steps:
            size += len(step.text) + len(step.reasoning)
            for call in step.calls:
                size += len(call.arguments)
    return size + sum(len(image.data) for image in question.images.values())


async def worked_out(question: Question, function: Callable[[], T]) -> T:
    """What a function gives that goes over the whole question; in a thread where that takes long."""
    return await asyncio.to_thread(function) if size_of(question) > LARGE else function()


class Prompts:
    """The prompts of a question: its attempts as they stand, and the other way round."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._built: dict[bool, tuple[Question, Prompt]] = {}
        self._turn = asyncio.Lock()

    async def of(self, *, swapped: bool = False) -> tuple[Question, Prompt]:
        """The question as it is put, and its prompt."""
        async with self._turn:
            if swapped not in self._built:
                question = self._question
                if swapped:
                    question = replace(question, attempts=question.attempts[::-1])
                self._built[swapped] = question, await worked_out(question, lambda: build_prompt(question))
            return self._built[swapped]
