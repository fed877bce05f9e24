"""The synchronous faces of forwards and endpoints."""

from __future__ import annotations

from types import TracebackType

from orchard._client.portal import Portal
from orchard._client.ports.endpoint import AsyncExposedEndpoint
from orchard._client.ports.forward import AsyncPortForward
from orchard._client.ports.types import Address


class PortForward:
    """Listens on this machine while `with` lasts. See AsyncPortForward."""

    def __init__(self, portal: Portal, forward: AsyncPortForward) -> None:
        self._portal = portal
        self._forward = forward

    @property
    def open_connections(self) -> int:
        """How many connections there are now."""
        return self._forward.open_connections

    def close(self) -> None:
        """Stop listening and reset what is open. Can be repeated."""
        self._portal.run(self._forward.close())

    def __enter__(self) -> Address:
        """Listen. See AsyncPortForward.__aenter__."""
        return self._portal.run(self._forward.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ExposedEndpoint:
    """Keeps an endpoint open inside a sandbox while `with` lasts. See AsyncExposedEndpoint."""

    def __init__(self, portal: Portal, endpoint: AsyncExposedEndpoint) -> None:
        self._portal = portal
        self._endpoint = endpoint

    def close(self) -> None:
        """Close it, and its connections with it. Can be repeated."""
        self._portal.run(self._endpoint.close())

    def __enter__(self) -> Address:
        """Open it; the address is one inside the sandbox. See AsyncExposedEndpoint.__aenter__."""
        return self._portal.run(self._endpoint.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._endpoint.__aexit__(kind, error, traceback))
