"""A judge that is no model: the same answer to the same question, in this process. For demos and tests.

It answers by the first rule whose text is part of the task's instruction; without one by the hash of the question. It
never looks at what an agent wrote, so it says nothing of its work.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from services.judge.answers.reading import Finish
from services.judge.backends.base import Ask, Reply
from services.judge.backends.settings import JudgeSettings, ScriptRule
from services.judge.model import Kind
from services.judge.prompting.schemas import CHOICES, verdict_key

_CHARACTERS_A_TOKEN = 4


class Scripted:
    """See the module."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings

    async def ask(self, ask: Ask) -> Reply:
        """See Backend."""
        rule = next((rule for rule in self._settings.script if rule.contains in ask.instruction), None)
        score = rule.score if rule else int(hashlib.sha256(ask.content_hash.encode()).hexdigest()[:8], 16) % 11 / 10
        why = f"The script has {rule.contains!r}." if rule else "The script has no rule; the question's hash decides."
        answer = {
            "ticket": ask.prompt.ticket,
            "reasoning": why,
            "evidence": sorted(ask.prompt.steps)[-1:],
            "abstain": bool(rule and rule.abstain),
            verdict_key(ask.kind): _verdict(ask, score, rule),
        }
        text = json.dumps(answer)
        return Reply(
            text=text,
            finish=Finish.STOP,
            words="scripted",
            model=self._settings.model,
            prompt_tokens=ask.prompt.characters // _CHARACTERS_A_TOKEN,
            completion_tokens=len(text) // _CHARACTERS_A_TOKEN,
        )

    async def close(self) -> None:
        """See Backend."""


def _verdict(ask: Ask, score: float, rule: ScriptRule | None) -> Any:
    if ask.kind is Kind.PAIRWISE:
        return "tie"
    if ask.kind in CHOICES:
        yes, no = CHOICES[ask.kind]
        return yes if score >= 0.5 else no
    if ask.kind is Kind.VALUE_CURVE:
        values = (rule and rule.values) or {0: score}
        return [{"state": state, "value": value} for state, value in sorted(values.items())]
    criteria = ask.prompt.schema["properties"]["scores"]["properties"]
    rounded = round(round(score / ask.step) * ask.step, 1)
    given = rule.scores if rule else {}
    return {name: {"reason": "scripted", "score": given.get(name, rounded)} for name in criteria}
