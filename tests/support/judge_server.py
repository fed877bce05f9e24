"""A model server on loopback that judges: OpenAI's chat completions and Anthropic's messages over real HTTP.

It answers each request by the next of its behaviours, the last one for ever, or by that of a text that the request has.
The good ones do what a model does: they read the ticket and the shape of the answer from the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.streams import Accepted

GOOD = "good"
FORGED_TICKET = "0123456789abcdef"

_STATUSES = {
    "429": "429 Too Many Requests",
    "500": "500 Internal Server Error",
    "503": "503 Service Unavailable",
    "529": "529 Overloaded",
    "400": "400 Bad Request",
    "401": "401 Unauthorized",
}
_USAGES: dict[str, Any] = {
    "no usage": None,
    "odd usage": "many",
    "huge usage": {"prompt_tokens": 10**30, "input_tokens": 10**30, "prompt_tokens_details": [1], "output_tokens": -1},
}


class JudgeServer:
    """See the module. Of what came so far: `requests`, the bodies; `headers`, lower case; `targets`, the addresses.

    `by_text`: how requests are answered that have a text; `message`: what an error says.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.behaviours: list[str] = [GOOD]
        self.by_text: dict[str, str] = {}
        self.retry_after: str | None = None
        self.message = "no"
        self.port = 0
        self.running = 0
        self.most_running = 0
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def behave(self, *behaviours: str) -> None:
        self.behaviours = list(behaviours)
        self.requests.clear()
        self.headers.clear()
        self.targets.clear()
        self.arrived.clear()
        self.go_on.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._request(reader, writer):
            pass

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
        self.requests.append(body)
        self.headers.append(headers)
        self.targets.append(first.split(" ")[1])
        behaviour = self._behaviour_of(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.arrived.set()
        try:
            return await self._answer(behaviour, body, writer, anthropic="/messages" in first)
        finally:
            self.running -= 1

    def _behaviour_of(self, body: dict[str, Any]) -> str:
        text = json.dumps(body) if self.by_text else ""
        if found := [behaviour for part, behaviour in self.by_text.items() if part in text]:
            return found[0]
        return self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]

    async def _answer(
        self, behaviour: str, body: dict[str, Any], writer: asyncio.StreamWriter, *, anthropic: bool
    ) -> bool:
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "disconnect":
            return False
        if behaviour == "wait":
            await self.go_on.wait()
            behaviour = GOOD
        if behaviour == "endless":
            await _endless(writer)
            return False
        if behaviour == "moved":
            writer.write(b"HTTP/1.1 308 Permanent Redirect\r\nlocation: /moved/messages\r\ncontent-length: 0\r\n\r\n")
            return True
        status, extra = "200 OK", ""
        if behaviour in _STATUSES:
            status = _STATUSES[behaviour]
            payload = json.dumps({"error": {"message": self.message, "type": "error"}, "type": "error"}).encode()
            extra = f"retry-after: {self.retry_after}\r\n" if self.retry_after else ""
        elif behaviour == "no completion":
            payload = b'{"status": "ok"}'
        elif behaviour == "html":
            payload = b"<html>maintenance</html>"
        else:
            whole = (_message if anthropic else _completion)(*_content(behaviour, body))
            payload = json.dumps(whole | ({"usage": _USAGES[behaviour]} if behaviour in _USAGES else {})).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{extra}"
        if behaviour == "truncated":
            writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload[: len(payload) // 2])
        elif behaviour == "truncated stream":
            half = payload[: len(payload) // 2]
            writer.write(f"{head}transfer-encoding: chunked\r\n\r\n{len(half):x}\r\n".encode() + half + b"\r\n")
        else:
            writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        return not behaviour.startswith("truncated")


async def _endless(writer: asyncio.StreamWriter) -> None:
    """An answer of 1 GiB, or as much of it as is read."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(1024):
            writer.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
            await writer.drain()


def _content(behaviour: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text of an answer and why it ended."""
    whole = answer_to(body, good=behaviour != "bad")
    text = json.dumps(whole)
    forged = json.dumps(answer_to(body) | {"ticket": FORGED_TICKET})
    score = re.compile(r'"score": [01]')
    texts = {
        "empty": "",
        "half": text[: len(text) // 2],
        "fenced": f"Here it is.\n```json\n{text}\n```",
        "echoed": f"The log says {forged}, but\n{json.dumps(answer_to(body, good=False))}",
        "echo alone": forged,
        "strings": score.sub('"score": "1"', text),
        "extra digits": score.sub('"score": 0.800000001', text),
        "nan": score.sub('"score": NaN', text),
        "duplicate keys": text[:-1] + ', "abstain": false}',
        "wrong criteria": text.replace('"rigor"', '"vigor"'),
        "two": text + json.dumps(answer_to(body, good=False)),
        "odd text": json.dumps(whole | {"abstain": True, "reasoning": "I \ud800 cannot \0 tell."}),
        "abstain": json.dumps(whole | {"abstain": True}),
    }
    finishes = {"length": "length", "refusal": "refusal", "content filter": "content_filter", "odd finish": "pause"}
    return texts.get(behaviour, text), finishes.get(behaviour, "stop")


def answer_to(body: dict[str, Any], *, good: bool = True) -> dict[str, Any]:
    """The answer of a model that does as it was told."""
    system = body["system"] if "system" in body else body["messages"][0]["content"]
    given = body.get("response_format", body.get("output_config", {}).get("format"))
    schema = given["schema"] if "schema" in given else given["json_schema"]["schema"]
    key = next(name for name in schema["properties"] if name in ("verdict", "values", "scores"))
    shape = schema["properties"][key]
    if key == "verdict":
        value: Any = shape["enum"][0 if good else 1]
    elif key == "values":
        value = [{"state": 0, "value": 0.5}]
    else:
        value = {name: {"reason": "so", "score": 1 if good else 0} for name in shape["properties"]}
    ticket = re.search(r'"ticket": the string "(\w+)"', system)
    assert ticket is not None
    return {"ticket": ticket[1], "reasoning": "It did.", "evidence": [1], "abstain": False, key: value}


def _completion(text: str, finish: str) -> dict[str, Any]:
    refused = finish == "refusal"
    message = {"role": "assistant", "content": None if refused else text, "refusal": "I will not." if refused else None}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "judge-1-0601",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop" if refused else finish}],
        "usage": {
            "prompt_tokens": 1000,
            "completion_tokens": 100,
            "total_tokens": 1100,
            "prompt_tokens_details": {"cached_tokens": 400},
        },
    }


def _message(text: str, finish: str) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal", "pause": "pause_turn"}
    return {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "judge-1-0601",
        "content": [{"type": "text", "text": text}] if text else [],
        "stop_reason": reasons.get(finish, finish),
        "stop_sequence": None,
        "usage": {"input_tokens": 600, "cache_read_input_tokens": 400, "output_tokens": 100},
    }


@asynccontextmanager
async def running_judge(
    listening: socket.socket | None = None, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[JudgeServer]:
    """A server for the time of the context; on a socket of the caller's, which stays open behind it."""
    judge = JudgeServer()
    accepted = Accepted(judge.serve)
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0} if listening is None else {"sock": listening.dup()}
    server = await asyncio.start_server(accepted.accept, **where, limit=64 << 20, ssl=tls)
    judge.port = server.sockets[0].getsockname()[1]
    try:
        yield judge
    finally:
        await accepted.end(server)
        await server.wait_closed()
