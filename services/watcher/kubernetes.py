"""The Kubernetes runtime as the watcher sees it: Pods through the API server, over connections of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import aiohttp

from services.common import pods
from services.common.kubernetes import KubernetesClient
from services.watcher.model import Event
from services.watcher.pod_states import project
from services.watcher.pod_watch import DEFAULT_TIMING, ConnectionLostError, PodWatch, Timing

_CONNECT_SECONDS: Final = 10.0
# Without compression: a list inside the cluster is cheaper to send than to unpack.
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}
# A peer that went away without a word is noticed by the kernel within 25 s; the read timeout is for one that hangs.
_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class KubernetesRuntime:
    """Watches the sandboxes' Pods of one namespace."""

    def __init__(self, client: KubernetesClient, namespace: str, timing: Timing = DEFAULT_TIMING) -> None:
        """Use `client`, which must serve nobody else."""
        self._watch = PodWatch(_Pods(client, namespace), project, pods.SELECTOR, timing)

    def watch(self) -> AsyncIterator[Event]:
        """See model.Runtime."""
        return self._watch.events()

    def counts(self) -> Mapping[str, int]:
        """How often each of these has happened, by name."""
        return self._watch.counts


class _Pods:
    """See pod_watch.PodApi."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    @asynccontextmanager
    async def get(
        self, query: Mapping[str, str], *, answer_seconds: float, read_seconds: float
    ) -> AsyncIterator[_Answer]:
        """See pod_watch.PodApi."""
        response = await self._ask(query, answer_seconds, read_seconds)
        try:
            _keep_alive(response)
            yield _Answer(response, read_seconds)
        finally:
            # What has not ended is of no use to the next request.
            response.close()

    async def _ask(
        self, query: Mapping[str, str], answer_seconds: float, read_seconds: float
    ) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(answer_seconds) as limit:
                with _translated(read_seconds):
                    return await self._client.send(
                        "GET",
                        self._path,
                        query=query,
                        headers=_HEADERS,
                        # Apart: one number would end a healthy watch.
                        timeout=aiohttp.ClientTimeout(
                            connect=_CONNECT_SECONDS, sock_connect=_CONNECT_SECONDS, sock_read=read_seconds
                        ),
                    )
        except TimeoutError:
            if not limit.expired():
                raise
            raise ConnectionLostError(f"the API server did not answer within {answer_seconds:g} s") from None

    def forget_credentials(self) -> None:
        """See pod_watch.PodApi."""
        self._client.forget_credentials()


class _Answer:
    """See pod_watch.Answer."""

    def __init__(self, response: aiohttp.ClientResponse, read_seconds: float) -> None:
        self._response = response
        self._read_seconds = read_seconds
        self.status = response.status
        self.retry_after = response.headers.get("Retry-After", "")

    async def body(self) -> bytes:
        """See pod_watch.Answer."""
        with _translated(self._read_seconds):
            return await self._response.read()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """See pod_watch.Answer."""
        content = self._response.content
        with _translated(self._read_seconds):
            while not content.at_eof():
                # Chunks as they were sent, which is one event each: nothing is joined to be cut again.
                chunk, _ends = await content.readchunk()
                if chunk:
                    yield chunk


@contextmanager
def _translated(read_seconds: float) -> Iterator[None]:
    try:
        yield
    except aiohttp.ConnectionTimeoutError:
        raise ConnectionLostError(f"no connection to the API server within {_CONNECT_SECONDS:g} s") from None
    except TimeoutError:
        raise ConnectionLostError(f"the API server sent nothing for {read_seconds:g} s", silent=True) from None
    except (aiohttp.ClientError, OSError) as error:
        raise ConnectionLostError(f"the API server: {error or type(error).__name__}") from error


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    connection = response.connection
    transport = connection.transport if connection is not None else None
    peer = transport.get_extra_info("socket") if transport is not None else None
    if peer is not None:
        for option in _KEEP_ALIVE:
            peer.setsockopt(*option)
