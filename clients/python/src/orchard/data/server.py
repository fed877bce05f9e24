"""Trajectories of a platform: read for exports and curation, and stored from files (see storing.py)."""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchard._client.errors import NotFound
from orchard.data.nodes import compact
from orchard.data.record import Record
from orchard.data.storing import Stored, store, store_all
from orchard.trajectory.v1 import trajectory_pb2 as pb

if TYPE_CHECKING:
    from orchard import SandboxClient

__all__ = ["ServerBodies", "ServerSource", "Stored", "store", "store_all"]


class ServerBodies(Mapping[str, bytes]):
    """Bodies that a platform keeps, fetched when they are asked for."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client

    def __getitem__(self, sha256: str) -> bytes:
        try:
            return self._client.trajectories.bodies.get(sha256)
        except NotFound:
            raise KeyError(sha256) from None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat()


@dataclass(frozen=True, slots=True)
class ServerSource:
    """Trajectories of a platform by filter, as of a moment, so that what is added meanwhile changes nothing.

    Attributes:
        client: of the platform.
        filters: which ones; see orchard.TrajectoryFilter.
        as_of: those that were created before this; ISO 8601.
    """

    client: SandboxClient
    filters: Mapping[str, Any]
    as_of: str = field(default_factory=_now)

    @property
    def identity(self) -> str:
        """A hash of the filters."""
        return hashlib.sha256(compact({"filters": _plain(self.filters)}).encode()).hexdigest()

    def at(self, as_of: str) -> ServerSource:
        """The same as of another moment."""
        return replace(self, as_of=as_of)

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Trajectories after a place: the token of the export."""
        bodies = ServerBodies(self.client)
        for one in self.client.trajectories.export(resume_token=after, **self._filters()):
            yield Record(one.message, one.step_messages, one.value_messages, bodies), one.resume_token

    def headers(self) -> Iterator[pb.Trajectory]:
        """The descriptions of all trajectories."""
        found = self.client.trajectories.export(metadata_only=True, **self._filters())
        return (one.message for one in found)

    def _filters(self) -> dict[str, Any]:
        before = dt.datetime.fromisoformat(self.as_of)
        given = self.filters.get("created_before")
        return {**self.filters, "created_before": min(before, given) if given else before}


def _plain(value: Any) -> Any:
    """Filters as JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return value.value if isinstance(value, enum.Enum) else value
