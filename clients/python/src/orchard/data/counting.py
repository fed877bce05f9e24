"""How many tokens a text has: by a tokenizer's file, or by an estimate that says that it is one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from orchard.data.errors import MissingExtraError, OptionError, Where
from orchard.data.record import Record, text_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

CHARACTERS_PER_TOKEN: Final = 4
TOKENS_PER_MESSAGE: Final = 4
"""What a chat template adds to a message, about."""


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    @property
    def name(self) -> str:
        """What it counts by, for reports and manifests."""
        ...

    def count(self, text: str) -> int:
        """The tokens of a text."""
        ...


class Estimate:
    """A token for each four characters, rounded up: about right for English and code, and said to be an estimate."""

    name = f"estimate: a token for each {CHARACTERS_PER_TOKEN} characters"

    def count(self, text: str) -> int:
        """The estimate."""
        return -(-len(text) // CHARACTERS_PER_TOKEN)


class TokenizerFile:
    """Counts with a `tokenizer.json`, as the `tokenizers` library reads it.

    Raises:
        MissingExtraError: the library is not installed.
        OptionError: the file is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingExtraError("counting with a tokenizer's file", "tokenizers", "tokenizers") from None
        if not path.is_file():
            raise OptionError("is not there", where=Where(str(path)), fix="name a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises no other)
            raise OptionError(
                f"is no tokenizer: {error}", where=Where(str(path)), fix="name a tokenizer.json"
            ) from None
        self.name = f"tokenizer: {path.name}"

    def count(self, text: str) -> int:
        """The tokens of a text, without those that mark its beginning and end."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def counter_of(path: Path | None) -> TokenCounter:
    """The counter of a tokenizer's file; without one the estimate."""
    return Estimate() if path is None else TokenizerFile(path)


def tokens_of_steps(record: Record, steps: Iterable[pb.Step], counter: TokenCounter) -> int:
    """Tokens of some messages: their text, reasoning and calls, and what a template adds to each."""
    return sum(TOKENS_PER_MESSAGE + counter.count(written_text(record, step)) for step in steps)


def written_text(record: Record, step: pb.Step) -> str:
    """All text of a message."""
    calls = [f"{call.name}{call.arguments}" for call in step.tool_calls]
    return "\n".join(filter(None, (step.reasoning, text_of(step, record.bodies), *calls)))


def tokens_of(record: Record, path: Iterable[int], counter: TokenCounter | None = None) -> int:
    """Tokens of a conversation: as its last model call reported them, plus what is counted after it."""
    counter = counter or Estimate()
    steps = [record.steps[index] for index in path]
    for position in range(len(steps) - 1, -1, -1):
        call = steps[position].model_call
        known = (len(call.prompt_token_ids) or call.prompt_tokens) and (
            len(call.completion_token_ids) or call.completion_tokens
        )
        if known:
            read = len(call.prompt_token_ids) or call.prompt_tokens
            written = len(call.completion_token_ids) or call.completion_tokens
            return read + written + tokens_of_steps(record, steps[position + 1 :], counter)
    tools = counter.count(record.trajectory.tools_json)
    return tools + tokens_of_steps(record, steps, counter)
