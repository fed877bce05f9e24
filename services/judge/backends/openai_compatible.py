"""Judges behind an API of OpenAI's chat completions: OpenAI itself, vLLM, SGLang, llama.cpp, routers and gateways."""

from __future__ import annotations

from typing import Any, Final

import openai

from services.judge.answers.reading import Finish
from services.judge.backends.base import Ask, CallError, Reply, count_of
from services.judge.backends.model_server import ModelServer, no_http
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason

_FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "content_filter": Finish.REFUSAL}


class OpenAICompatible:
    """Calls chat completions."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        key, base = settings.key(), settings.base_url
        client = openai.AsyncOpenAI(api_key=key, base_url=base, http_client=no_http())
        headers = client.auth_headers | client.default_headers
        self._server = ModelServer(client.base_url, "/chat/completions", headers, settings.timeout_seconds)

    async def ask(self, ask: Ask) -> Reply:
        """See Backend."""
        body = self._request(ask)
        try:
            return _reply(await self._server.post(body, ask.idempotency_key), self._settings.model)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            # A body that is no chat completion: the server, or something before it, is ill.
            message = f"the judge's server sent what is no chat completion ({type(error).__name__})"
            raise CallError(Reason.UNAVAILABLE, message, again=True) from None

    async def close(self) -> None:
        """See Backend."""
        await self._server.close()

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
        }
        if ask.temperature is not None:
            request["temperature"] = ask.temperature
        if self._settings.structured == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": ask.prompt.schema}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self._settings.structured == "json_object":
            request["response_format"] = {"type": "json_object"}
        return request | self._settings.extra_body


def _reply(completion: Any, model: str) -> Reply:
    choice = completion["choices"][0]
    message, reason = choice["message"], choice.get("finish_reason")
    text, refusal = message.get("content") or "", message.get("refusal") or ""
    if not isinstance(text, str) or not isinstance(refusal, str):
        raise TypeError("content")
    usage = completion.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return Reply(
        text=text,
        finish=Finish.REFUSAL if refusal else _FINISHES.get(reason, Finish.OTHER),
        words=refusal or f"finish_reason {reason}",
        model=str(completion.get("model") or model)[:256],
        prompt_tokens=count_of(usage, "prompt_tokens"),
        completion_tokens=count_of(usage, "completion_tokens"),
        cached_tokens=count_of(details, "cached_tokens"),
    )
