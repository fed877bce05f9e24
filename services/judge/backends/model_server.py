"""One request to a model server."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import httpx2
import orjson
from yarl import URL

from services.common.settings import SettingsError
from services.judge.backends.base import error_of_connection, error_of_status
from services.judge.backends.settings import HIDDEN

_MOST_BYTES: Final = 64 << 20
"""Of an answer. Beyond what any model writes: a server that never ends would fill the memory before its time is up."""
_KEEP_SECONDS: Final = 30.0
_WITH_KEYS: Final = frozenset({"authorization", "x-api-key", "proxy-authorization"})
_LEAST_OF_A_KEY: Final = 8
"""Characters. What is shorter guards nothing, and may be a word: servers on one's own machines are told "none"."""
_OF_EVERY_REQUEST: Final = frozenset({"accept", "content-type", "user-agent"})
"""Headers that any server may see; among the others are keys, each vendor's under its own name."""


class ModelServer:
    """Posts to one address.

    What a vendor's library knows is asked of it once: address, key and headers. Its way to a request goes over every
    option anew for each call, for three quarters of the processor time that a call then takes. Its own retries are not
    missed: they would be neither counted nor bounded by us. Cookies that a server sets are not sent back.

    Args:
        base: address of the API, with a name and password where it wants these.
        path: what is called, below the base.
        headers: of every call; what is no text is left out.
        timeout_seconds: for a connection, and for each pause between bytes.

    Raises:
        SettingsError: the environment names a proxy or authorities that cannot be used.
    """

    def __init__(self, base: httpx2.URL, path: str, headers: Mapping[str, Any], timeout_seconds: float) -> None:
        whole_path = base.raw_path.rstrip(b"/") + path.encode()
        url = base.copy_with(raw_path=whole_path, username=None, password=None)
        self._url = str(url)
        self._origin = URL(self._url).origin()
        self._headers = {name: value for name, value in headers.items() if isinstance(value, str)}
        if base.userinfo:
            # In the key's place, as the vendors' libraries have it.
            self._headers = {name: value for name, value in self._headers.items() if name.lower() != "authorization"}
            self._headers["Authorization"] = _basic(base.username, base.password)
        self._proxy, self._proxy_headers = None, dict[str, str]()
        if (proxy := _proxy_of(url)) is not None:
            self._proxy = str(proxy.url)
            # A proxy that opens a tunnel is told before there is one; any other reads the request itself.
            told = self._headers if url.scheme == "http" else self._proxy_headers
            if proxy.auth is not None:
                told["Proxy-Authorization"] = _basic(*proxy.auth)
        self._keys = _keys_in(self._headers | self._proxy_headers, base.password)
        self._ours = [name for name in self._headers if name.lower() not in _OF_EVERY_REQUEST]
        self._tls = _tls()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_seconds, sock_read=timeout_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Mapping[str, Any], idempotency_key: str) -> Any:
        """The JSON of the answer.

        Raises:
            CallError: there is no connection, or the status is none of success.
            ValueError: it is no JSON, or more than any model writes.
        """
        if self._session is None:
            self._session = self._connected()
        headers = {**self._headers, "Idempotency-Key": idempotency_key}
        try:
            async with self._session.post(
                self._url,
                data=orjson.dumps(body),
                headers=headers,
                proxy=self._proxy,
                proxy_headers=self._proxy_headers,
            ) as response:
                content = await _content_of(response)
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError) as error:
            raise error_of_connection(error) from None
        if not 200 <= response.status < 300:
            words = self._without_keys(_words_of(content))
            raise error_of_status(response.status, words, response.headers.get("retry-after"))
        # Of what models write, this takes more than orjson does: halves of surrogate pairs.
        return json.loads(content)

    async def close(self) -> None:
        """Close connections."""
        if self._session is not None:
            await self._session.close()

    def _without_keys(self, words: str) -> str:
        """What a server says is stored and told; some repeat what they were sent."""
        for key in self._keys:
            words = words.replace(key, HIDDEN)
        return words

    def _connected(self) -> aiohttp.ClientSession:
        # How many there are at once is the endpoint's to say.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS, ssl=self._tls)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            middlewares=(self._without_keys_elsewhere,),
        )

    async def _without_keys_elsewhere(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Of a server that sends us on to another one, aiohttp itself forgets only the header Authorization."""
        if request.url.origin() != self._origin:
            for name in self._ours:
                request.headers.popall(name, None)
        return await send(request)


def no_http() -> httpx2.AsyncClient:
    """For a vendor's library, which makes no call: what it makes of itself looks for proxies and certificates in the
    environment, and fails in words of its own.
    """
    return httpx2.AsyncClient(transport=httpx2.AsyncBaseTransport(), trust_env=False)


def _tls() -> ssl.SSLContext:
    """Certificates: the environment's, else those that the vendors' libraries bring, which a slim image lacks.

    Raises:
        SettingsError: they cannot be read.
    """
    try:
        return httpx2.create_ssl_context()
    except OSError as error:
        why = error.strerror or type(error).__name__
        message = f"certificates of authorities cannot be read ({why}); set SSL_CERT_FILE to a file of them"
        raise SettingsError(message) from None


def _proxy_of(url: httpx2.URL) -> httpx2.Proxy | None:
    """The proxy that the environment names for an address.

    aiohttp's own way to it would also take a password for the address from ~/.netrc, beside the key.

    Raises:
        SettingsError: it is of a kind that cannot be asked.
    """
    # NO_PROXY names hosts, or hosts with their port.
    if any(urllib.request.proxy_bypass(host) for host in (url.host, url.netloc.decode())):
        return None
    proxies = urllib.request.getproxies()
    address = proxies.get(url.scheme) or proxies.get("all")
    if not address:
        return None
    scheme, found, _rest = address.partition("://")
    fix = "set HTTP_PROXY and HTTPS_PROXY to an http:// one, or NO_PROXY to the host"
    if found and scheme not in {"http", "https"}:
        raise SettingsError(f"the environment names a {scheme} proxy for {url.host}; {fix}")
    try:
        proxy = httpx2.Proxy(address if found else f"http://{address}")
    except httpx2.InvalidURL:
        proxy = None
    if proxy is None or not proxy.url.host:
        # Not what it is: it may have a password.
        raise SettingsError(f"the proxy that the environment names for {url.host} has no address; {fix}")
    return proxy


def _keys_in(headers: Mapping[str, str], password: str) -> list[str]:
    """What nobody else may read, without the scheme that a header names before it."""
    values = [value.rpartition(" ")[2] for name, value in headers.items() if name.lower() in _WITH_KEYS]
    return [key for key in (*values, password) if len(key) >= _LEAST_OF_A_KEY]


def _basic(username: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{username}:{password}'.encode()).decode()}"


async def _content_of(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MOST_BYTES:
            response.close()
            raise ValueError(f"an answer of more than {_MOST_BYTES:,} bytes")
    return bytes(content)


def _words_of(content: bytes) -> str:
    """What a server says of its error: its message where it has one in the usual place, else all of it."""
    text = content.decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return text
    return message if isinstance(message, str) else text
