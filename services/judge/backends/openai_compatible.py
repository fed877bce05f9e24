"""Judges behind an API of OpenAI's chat completions: OpenAI itself, vLLM, SGLang, llama.cpp, routers and gateways."""

from __future__ import annotations

from typing import Any, Final

import openai

from services.judge.answers.reading import Finish
from services.judge.backends.base import Ask, CallError, Reply, error_of_status
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason

_FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "content_filter": Finish.REFUSAL}


class OpenAICompatible:
    """Calls chat completions. The client's own retries are off: they would be neither counted nor bounded by us."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._client = openai.AsyncOpenAI(
            api_key=settings.key(),
            base_url=settings.base_url,
            max_retries=0,
            timeout=settings.timeout_seconds,
        )

    async def ask(self, ask: Ask) -> Reply:
        """See Backend."""
        try:
            raw = await self._client.chat.completions.with_raw_response.create(**self._request(ask))
            return _reply(raw.parse(), self._settings.model)
        except openai.APITimeoutError:
            raise CallError(Reason.TIMEOUT, "the judge did not answer in time", again=True) from None
        except openai.APIStatusError as error:
            retry_after = error.response.headers.get("retry-after")
            raise error_of_status(error.status_code, error.message, retry_after) from None
        except openai.APIConnectionError as error:
            cause = type(error.__cause__ or error).__name__
            message = f"the connection to the judge failed ({cause})"
            raise CallError(Reason.UNAVAILABLE, message, again=True) from None
        except (openai.OpenAIError, ValueError, TypeError, AttributeError, LookupError) as error:
            # A body that is no chat completion: the server, or something before it, is ill.
            message = f"the judge's server sent what is no chat completion ({type(error).__name__})"
            raise CallError(Reason.UNAVAILABLE, message, again=True) from None

    async def close(self) -> None:
        """See Backend."""
        await self._client.close()

    def _request(self, ask: Ask) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": ask.prompt.text}]
        content += [{"type": "image_url", "image_url": {"url": image.url}} for image in ask.prompt.images]
        request: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [
                {"role": "system", "content": ask.prompt.system},
                {"role": "user", "content": content if ask.prompt.images else ask.prompt.text},
            ],
            self._settings.max_tokens_field: ask.max_output_tokens,
            "extra_headers": {"Idempotency-Key": ask.idempotency_key},
            "extra_body": self._settings.extra_body,
        }
        if ask.temperature is not None:
            request["temperature"] = ask.temperature
        if self._settings.structured == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": ask.prompt.schema}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self._settings.structured == "json_object":
            request["response_format"] = {"type": "json_object"}
        return request


def _reply(completion: Any, model: str) -> Reply:
    choice = completion.choices[0]
    text, refusal = choice.message.content or "", getattr(choice.message, "refusal", None) or ""
    if not isinstance(text, str) or not isinstance(refusal, str):
        raise TypeError("content")
    reason = choice.finish_reason
    finish = Finish.REFUSAL if refusal else _FINISHES.get(reason, Finish.OTHER)
    usage = completion.usage
    details = getattr(usage, "prompt_tokens_details", None)
    return Reply(
        text=text,
        finish=finish,
        words=refusal or f"finish_reason {reason}",
        model=str(completion.model or model)[:256],
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        cached_tokens=_count(details, "cached_tokens"),
    )


def _count(usage: Any, name: str) -> int:
    value = getattr(usage, name, None)
    return value if isinstance(value, int) and value >= 0 else 0
