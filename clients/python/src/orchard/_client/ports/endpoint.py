"""An endpoint of the platform as a port inside a sandbox."""

from __future__ import annotations

import asyncio
import logging
import os
from types import TracebackType
from typing import Any, Final

from orchard._client import errors
from orchard._client.ports.forward import check_port
from orchard._client.ports.types import Address
from orchard._client.session import Session
from orchard._client.status import CallFailed
from orchard.exec.v1 import endpoint_service_pb2

_log: Final = logging.getLogger("orchard")
LOOPBACK: Final = "127.0.0.1"


class AsyncExposedEndpoint:
    """Keeps an endpoint open inside a sandbox while `async with` lasts, through broken connections to the platform."""

    def __init__(self, session: Session, sandbox_id: str, endpoint: str, port: int) -> None:
        check_port("port", port, minimum=0)
        self._session = session
        self._sandbox_id = sandbox_id
        self._request = endpoint_service_pb2.OpenEndpointRequest(
            sandbox_id=sandbox_id, endpoint=endpoint, port=port, request_id=os.urandom(8).hex()
        )
        self._opened: asyncio.Future[int] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Address:
        """Open it; the address is one inside the sandbox.

        Raises:
            NotFound: there is no such endpoint (ENDPOINT_NOT_FOUND).
            PortInUse: the port inside is taken.
            SandboxLost: the sandbox has ended.
        """
        loop = asyncio.get_running_loop()
        self._opened = loop.create_future()
        self._task = loop.create_task(self._keep(self._opened), name=f"expose to {self._sandbox_id}")
        try:
            either: set[asyncio.Future[Any]] = {self._opened, self._task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            return Address(LOOPBACK, self._opened.result())
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it, and its connections with it.

        Raises, unless the body did:
            SandboxLost: the sandbox ended meanwhile.
            Unavailable: the endpoint ended meanwhile (ENDPOINT_LOST); `__cause__` is why.
        """
        lost = self._lost()
        await self.close()
        if lost is None:
            return
        if error is None:
            raise lost
        error.add_note(f"orchard: {lost}")

    def _lost(self) -> errors.OrchardError | None:
        """What to raise for an end that nobody asked for. Whatever it was, it is none of the program inside."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        why = self._task.exception()
        if isinstance(why, errors.ClientClosed):
            return None
        if why is None or isinstance(why, errors.SandboxLost):
            return why
        name, port = self._request.endpoint, self._request.port
        lost = errors.Unavailable(
            f"endpoint {name} at port {port} of sandbox {self._sandbox_id} ended while it was in use: {why}",
            reason="ENDPOINT_LOST",
            metadata={"endpoint": name, "port": str(port)},
        )
        lost.__cause__ = why
        return lost

    async def close(self) -> None:
        """Close it, and its connections with it. Can be repeated."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self, opened: asyncio.Future[int]) -> None:
        """Hold the call that keeps it open, and repeat it when it breaks."""
        transport = self._session.transport
        retry, context = transport.retry(), transport.context()
        try:
            while True:
                try:
                    async with transport.stream(lambda c: c.endpoint.OpenEndpoint, self._request, context) as stream:
                        async for response in stream:
                            retry.succeeded()
                            if not opened.done():
                                opened.set_result(response.opened.port)
                                # The same one again, whoever asks for it.
                                self._request.port = response.opened.port
                    raise errors.Unavailable("the platform ended the endpoint without a word")
                except CallFailed as error:
                    await transport.pause_or_raise(error, retry, self._sandbox_id)
        except errors.OrchardError as error:
            if opened.done() and not isinstance(error, errors.ClientClosed):
                _log.warning("endpoint %s of sandbox %s ended: %s", self._request.endpoint, self._sandbox_id, error)
            raise
