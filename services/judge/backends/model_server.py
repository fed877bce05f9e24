"""One request to a model server, by the HTTP client of a vendor's library."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import httpx2

from services.judge.backends.base import error_of_connection, error_of_status

_LENGTH: Final = b"content-length"


class ModelServer:
    """Posts to one address.

    What a vendor's library knows is asked of it once: address, key and headers. Its way to a request goes over every
    option anew for each call, for two thirds of the processor time that a call then takes. Its own retries are not
    missed: they would be neither counted nor bounded by us. Cookies that a server sets are not sent back.

    Args:
        http: the library's client: proxies and certificates of the environment, redirects, connections that are kept.
        base: address of the API.
        path: what is called, below the base.
        headers: of every call; what is no text is left out.
        timeout_seconds: for a connection, and for each pause between bytes.
    """

    def __init__(
        self, http: httpx2.AsyncClient, base: httpx2.URL, path: str, headers: Mapping[str, Any], timeout_seconds: float
    ) -> None:
        self._http = http
        url = base.copy_with(raw_path=base.raw_path.rstrip(b"/") + path.encode())
        texts = {name: value for name, value in headers.items() if isinstance(value, str)}
        like = http.build_request("POST", url, headers=texts, timeout=timeout_seconds)
        self._url = like.url
        self._headers = [(name, value) for name, value in like.headers.raw if name.lower() != _LENGTH]
        self._extensions = like.extensions

    async def post(self, body: Mapping[str, Any], idempotency_key: str) -> Any:
        """The JSON of the answer.

        Raises:
            CallError: there is no connection, or the status is none of success.
            ValueError: it is no JSON.
        """
        request = httpx2.Request(
            "POST",
            self._url,
            headers=[*self._headers, (b"Idempotency-Key", idempotency_key.encode())],
            content=json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(),
            extensions=dict(self._extensions),
        )
        try:
            response = await self._http.send(request)
        except (httpx2.RequestError, aiohttp.ClientError, ssl.SSLError) as error:
            raise error_of_connection(error) from None
        if not response.is_success:
            retry_after = response.headers.get("retry-after")
            raise error_of_status(response.status_code, _words_of(response.content), retry_after)
        # Of what models write, this takes more than orjson does: halves of surrogate pairs.
        return json.loads(response.content)


def _words_of(content: bytes) -> str:
    """What a server says of its error: its message where it has one in the usual place, else all of it."""
    text = content.decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return text
    return message if isinstance(message, str) else text
