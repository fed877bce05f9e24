"""The methods of a sandbox that deal with ports."""

from __future__ import annotations

from orchard._client.ports.endpoint import AsyncExposedEndpoint
from orchard._client.ports.forward import AsyncPortForward
from orchard._client.ports.types import OnForward
from orchard._client.session import Session
from orchard._client.units import Seconds


class AsyncPorts:
    """Connections into a sandbox and out of it, also where it has no network."""

    _session: Session
    _sandbox_id: str

    def forward(
        self,
        port: int,
        *,
        local_port: int = 0,
        bind: str = "127.0.0.1",
        host: str = "",
        wait: Seconds = 0.0,
        on_event: OnForward | None = None,
    ) -> AsyncPortForward:
        """Make a TCP port of the sandbox one of this machine, while `async with` lasts.

        async with sandbox.forward(80) as address:
            ...  # address.url is like "http://127.0.0.1:43210"

        The server may start later: connections are refused until then. While bytes move, the sandbox is renewed as by
        a heartbeat.

        Args:
            port: where the server inside listens.
            local_port: where to listen here. 0: a free port.
            bind: the address to listen on here. Anyone who reaches it reaches the server.
            host: the address inside that the server listens on, one of the sandbox's own. Empty: loopback.
            wait: how long a connection waits for a server that does not listen yet, in seconds.
            on_event: is told of each connection.

        Raises, when it is entered:
            PortInUse: the local port is taken.
            InvalidArgument: an option breaks a rule.
        """
        return AsyncPortForward(
            self._session,
            self._sandbox_id,
            port,
            local_port=local_port,
            bind=bind,
            host=host,
            wait=wait,
            on_event=on_event,
        )

    def expose(self, endpoint: str, port: int = 0) -> AsyncExposedEndpoint:
        """Make an endpoint of the platform a port on 127.0.0.1 inside the sandbox, while `async with` lasts.

        async with sandbox.expose("llm") as address:
            await sandbox.exec("python agent.py", env={"OPENAI_BASE_URL": f"{address.url}/v1"})

        Works without a network. Which endpoints there are is the operator's choice (docs/ports.md).

        Args:
            endpoint: its name.
            port: where it listens inside. 0: a free port.

        Raises, when it is entered:
            NotFound: there is no such endpoint (ENDPOINT_NOT_FOUND).
            PortInUse: the port inside is taken.

        Raises, when it is left without an error:
            SandboxLost: the sandbox ended meanwhile.
            Unavailable: the endpoint ended meanwhile (ENDPOINT_LOST).
        """
        return AsyncExposedEndpoint(self._session, self._sandbox_id, endpoint, port)
