"""Carries connections of sandboxes to endpoints of the platform: agents listen and announce, only the gateway dials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc.aio
from orchard.exec.v1 import tunnel_service_pb2, tunnel_service_pb2_grpc

from services.common.errors import NotFoundError
from services.common.logs import get_logger
from services.common.sockets import KEEPALIVE_SECONDS, Connection, dial
from services.gateway.agents_client import Agent, Agents
from services.gateway.settings import Endpoint
from services.gateway.streams import OpenStreams

if TYPE_CHECKING:
    from services.gateway.streams import Context

_log = get_logger(__name__)

DIAL_SECONDS: Final = 10.0


class Endpoints:
    """The endpoints that the operator offers, and the connections to them."""

    def __init__(self, agents: Agents, offered: Mapping[str, Endpoint]) -> None:
        self._agents = agents
        self._offered = offered
        self._streams = OpenStreams()

    def end_streams(self) -> None:
        """The server stops: close every endpoint with UNAVAILABLE."""
        self._streams.end()

    def find(self, name: str) -> Endpoint:
        """The endpoint of a name.

        Raises:
            NotFoundError: the operator offers none (ENDPOINT_NOT_FOUND).
        """
        found = self._offered.get(name)
        if found is None:
            offered = f"there are {', '.join(sorted(self._offered))}" if self._offered else "none is offered here"
            raise NotFoundError(
                f"there is no endpoint {name!r}: {offered}; the operator sets ORCHARD_GATEWAY_ENDPOINTS",
                reason="ENDPOINT_NOT_FOUND",
                endpoint=name,
            )
        return found

    async def serve(
        self, agent: Agent, name: str, port: int, request_id: str, context: Context
    ) -> AsyncGenerator[int, None]:
        """Have the agent listen, and carry its connections until this is left. Yields the port, once.

        Raises:
            NotFoundError: see `find`.
            UnavailableError: the gateway stops.
            grpc.aio.AioRpcError: the agent refuses, or is gone.
        """
        endpoint = self.find(name)
        stub: Any = tunnel_service_pb2_grpc.TunnelServiceStub(agent.channel)
        request = tunnel_service_pb2.ServeEndpointRequest(sandbox_id=agent.sandbox_id, port=port, request_id=request_id)
        call = stub.ServeEndpoint(request, metadata=(self._agents.metadata(agent),))
        carried: set[asyncio.Task[None]] = set()
        try:
            with self._streams.ending(call, context):
                async for event in call:
                    if event.HasField("listening"):
                        yield event.listening.port
                    elif event.HasField("connection"):
                        carrying = self._carry(agent, stub, name, endpoint, event.connection)
                        task = asyncio.get_running_loop().create_task(carrying, name=f"carry to endpoint {name}")
                        carried.add(task)
                        task.add_done_callback(carried.discard)
        finally:
            for task in list(carried):
                task.cancel()
            await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(
        self, agent: Agent, stub: Any, name: str, endpoint: Endpoint, start: tunnel_service_pb2.EndpointConnection
    ) -> None:
        """Take one connection and carry it to its end. The agent resets it when the call ends before that."""
        self._agents.begin(agent)
        call = stub.AcceptConnection(metadata=(self._agents.metadata(agent),))
        try:
            await call.write(tunnel_service_pb2.AcceptConnectionRequest(sandbox_id=agent.sandbox_id, start=start))
            if await call.read() is grpc.aio.EOF:
                return
            connection = await dial(*endpoint, timeout=DIAL_SECONDS)
            try:
                await _exchange(call, connection)
            finally:
                connection.reset()
        except (OSError, TimeoutError) as error:
            _log.warning("a connection to an endpoint broke", endpoint=name, sandbox=agent.sandbox_id, error=str(error))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            _log.debug("a program broke its connection to an endpoint", endpoint=name, error=str(error))
        finally:
            call.cancel()
            self._agents.end(agent)


async def _exchange(call: Any, connection: Connection) -> None:
    """Carry bytes both ways until both sides have ended.

    Raises:
        OSError: the endpoint broke the connection.
        grpc.aio.AioRpcError, asyncio.InvalidStateError: the program inside the sandbox did, or the agent is gone.
    """
    loop = asyncio.get_running_loop()
    into = loop.create_task(_into_the_sandbox(call, connection), name="carry into a sandbox")
    out = loop.create_task(_out_of_the_sandbox(call, connection), name="carry out of a sandbox")
    try:
        await asyncio.wait({into, out}, return_when=asyncio.FIRST_COMPLETED)
        if into.done():
            into.result()
        await out
    finally:
        into.cancel()
        out.cancel()
        await asyncio.gather(into, out, return_exceptions=True)


async def _into_the_sandbox(call: Any, connection: Connection) -> None:
    """Never ends by itself: signs of life go on for as long as the call lasts."""
    receiving: asyncio.Future[bytes] | None = connection.receive()
    while True:
        request = tunnel_service_pb2.AcceptConnectionRequest(keepalive=True)
        if receiving is None:
            await asyncio.sleep(KEEPALIVE_SECONDS)
        else:
            done, _ = await asyncio.wait({receiving}, timeout=KEEPALIVE_SECONDS)
            if done:
                data = receiving.result()
                receiving = connection.receive() if data else None
                request = tunnel_service_pb2.AcceptConnectionRequest(data=data)
                if not data:
                    request = tunnel_service_pb2.AcceptConnectionRequest(eof=True)
        await call.write(request)


async def _out_of_the_sandbox(call: Any, connection: Connection) -> None:
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.eof:
            connection.send_eof()
        elif response.data:
            await connection.send(response.data)
    connection.close()
