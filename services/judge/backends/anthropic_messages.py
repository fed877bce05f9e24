"""Judges behind Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, Final

import anthropic

from services.judge.answers.reading import Finish
from services.judge.backends.base import Ask, CallError, Reply, count_of
from services.judge.backends.model_server import ModelServer, no_http
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason

_FINISHES: Final = {
    "end_turn": Finish.STOP,
    "stop_sequence": Finish.STOP,
    "max_tokens": Finish.LENGTH,
    "model_context_window_exceeded": Finish.LENGTH,
    "refusal": Finish.REFUSAL,
}


class AnthropicMessages:
    """Calls Messages."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        key, base = settings.key(), settings.base_url
        client = anthropic.AsyncAnthropic(api_key=key, base_url=base, http_client=no_http())
        headers = client.auth_headers | client.default_headers
        self._server = ModelServer(client.base_url, "/v1/messages", headers, settings.timeout_seconds)

    async def ask(self, ask: Ask) -> Reply:
        """See Backend."""
        body = self._request(ask)
        try:
            return _reply(await self._server.post(body, ask.idempotency_key), self._settings.model)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            # A body that is no message: the server, or something before it, is ill.
            message = f"the judge's server sent what is no message ({type(error).__name__})"
            raise CallError(Reason.UNAVAILABLE, message, again=True) from None

    async def close(self) -> None:
        """See Backend."""
        await self._server.close()

    def _request(self, ask: Ask) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": ask.prompt.text}]
        for image in ask.prompt.images:
            source = {"type": "base64", "media_type": image.media_type, "data": image.base64}
            content.append({"type": "image", "source": source})
        request: dict[str, Any] = {
            "model": self._settings.model,
            "system": ask.prompt.system,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": ask.max_output_tokens,
        } | self._settings.extra_body
        if ask.temperature is not None:
            request["temperature"] = ask.temperature
        if self._settings.structured == "json_schema":
            request["output_config"] = {"format": {"type": "json_schema", "schema": ask.prompt.schema}}
        return request


def _reply(message: Any, model: str) -> Reply:
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    usage, reason = message.get("usage"), message.get("stop_reason")
    cached = count_of(usage, "cache_read_input_tokens")
    return Reply(
        text=text,
        finish=_FINISHES.get(reason, Finish.OTHER),
        words=f"stop_reason {reason}",
        model=str(message.get("model") or model)[:256],
        prompt_tokens=count_of(usage, "input_tokens") + cached + count_of(usage, "cache_creation_input_tokens"),
        completion_tokens=count_of(usage, "output_tokens"),
        cached_tokens=cached,
    )
