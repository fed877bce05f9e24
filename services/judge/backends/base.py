"""What every judge is to the service, whichever API it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.judge.answers.reading import Finish
from services.judge.model import Kind, Reason
from services.judge.prompting.prompts import Prompt

MOST_DELAY_SECONDS: Final = 60.0
"""Between two tries of a call. Some servers ask for hours; whoever waits holds what others wait for."""
_MOST_TOKENS: Final = 1 << 32
"""That one call can have taken."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One call.

    Attributes:
        step: distance between the scores of a rubric.
        content_hash: of the question; equal questions have equal ones, whatever their random words.
        idempotency_key: the same for every try of this call, for servers that know such keys.
    """

    kind: Kind
    prompt: Prompt
    content_hash: str
    instruction: str
    step: float
    temperature: float | None
    max_output_tokens: int
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came. `words`: what the server says of the finish, or of a refusal."""

    text: str
    finish: Finish
    words: str
    model: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class CallError(Exception):
    """A call gave no answer.

    Attributes:
        reason: a word of Reason.
        again: whether it may help to call again.
        retry_after_seconds: what the server asked for, within MOST_DELAY_SECONDS.
        made: whether a call was made at all.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        again: bool,
        retry_after_seconds: float | None = None,
        made: bool = True,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.again = again
        self.retry_after_seconds = retry_after_seconds
        self.made = made


class Backend(Protocol):
    """Calls one model."""

    async def ask(self, ask: Ask) -> Reply:
        """One call, without any retry.

        Raises:
            CallError: it gave no answer.
        """

    async def close(self) -> None:
        """Close connections."""


def count_of(usage: Any, name: str) -> int:
    """A count of tokens; 0 where the server does not tell, or tells what is none.

    An answer that was paid for is not thrown away for the count beside it.
    """
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else 0


def error_of_connection(error: BaseException) -> CallError:
    """What it means that a client library gave up a connection. Its own classes take a server that hangs up for one
    that is slow, so what it rests on decides.
    """
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(one, TimeoutError) for one in chain):
        return CallError(Reason.TIMEOUT, "the judge did not answer in time", again=True)
    message = f"the connection to the judge failed ({type(chain[-1]).__name__})"
    return CallError(Reason.UNAVAILABLE, message, again=True)


def error_of_status(status: int, message: str, retry_after: str | None) -> CallError:
    """What an HTTP status of a model server means. The message is the server's, shortened."""
    seconds = _seconds(retry_after)
    told = f"the judge answered with status {status}: {message}"[:500]
    if status == 429:
        return CallError(Reason.RATE_LIMITED, told, again=True, retry_after_seconds=seconds)
    if status in (408, 409) or status >= 500:
        return CallError(Reason.UNAVAILABLE, told, again=True, retry_after_seconds=seconds)
    if status in (401, 403):
        return CallError(Reason.UNAUTHENTICATED, f"the judge refuses the key (status {status})", again=False)
    return CallError(Reason.REJECTED, told, again=False)


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header in seconds; its form as a date is not used by model servers."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return min(seconds, MOST_DELAY_SECONDS) if seconds >= 0 else None
