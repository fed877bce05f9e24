"""What the node daemon asks of its zygote: plain values that travel as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from services.local.runtime.identity import Identity

WRITE_MAPS: Final = "write"
RUN_MAP_TOOLS: Final = "tools"


@dataclass(frozen=True, slots=True)
class Range:
    """`count` user and group ids of a sandbox from `inside` on, and where on the machine they begin."""

    inside: int
    outside_user: int
    outside_group: int
    count: int


@dataclass(frozen=True, slots=True)
class Ids:
    """How the ids of a sandbox are mapped.

    Attributes:
        level: "shifted", "subids" or "single"; what GetNode says.
        ranges: the maps.
        how: WRITE_MAPS (the kernel lets us) or RUN_MAP_TOOLS (newuidmap and newgidmap).
        own_user: run bwrap as this id of the machine; None: as the daemon's own.
        mapped_layers: the lower layers are mounted with their ids shifted.
    """

    level: str
    ranges: tuple[Range, ...]
    how: str
    own_user: int | None = None
    mapped_layers: bool = False

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Ids:
        """From dataclasses.asdict."""
        return cls(**{**values, "ranges": tuple(Range(**r) for r in values["ranges"])})

    @property
    def owner(self) -> int:
        """The machine's id of the sandbox's root."""
        return self.ranges[0].outside_user

    @property
    def switchable(self) -> bool:
        """Whether there is more than one id."""
        return sum(r.count for r in self.ranges) > 1

    @property
    def privileged(self) -> bool:
        """Whether the daemon has the privilege to own things as any id."""
        return self.own_user is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """One sandbox to start, or to give a fresh agent.

    Attributes:
        folder: its folder, as the zygote sees it, with `state/` for the agent.
        socket_folder: where the agent's socket goes.
        ids: the id maps.
        bwrap: arguments of bwrap apart from descriptors and the command.
        layers: how many overlays `bwrap` names: upper and work folders u/0.. and w/0..
        host_network: it stays in the machine's network namespace.
        most_processes: bound by rlimit, where there are no control groups; zero: not here.
        agent: fields of AgentConfig apart from descriptors; None starts the namespaces alone, as a probe.
        waits: the agent goes on when it is told its fields, instead of having them from here (claim).
        init: join the namespaces of this process instead of making new ones.
        remove: make nothing; remove these folders, as root of a namespace with these ids.
    """

    folder: str
    socket_folder: str
    ids: Ids
    bwrap: tuple[str, ...] = ()
    layers: int = 0
    host_network: bool = False
    most_processes: int = 0
    agent: Mapping[str, Any] | None = None
    waits: bool = False
    init: Identity | None = None
    remove: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """From bytes."""
        values = json.loads(data)
        values["ids"] = Ids.from_values(values["ids"])
        values["bwrap"] = tuple(values["bwrap"])
        values["remove"] = tuple(values["remove"])
        values["init"] = None if values["init"] is None else Identity(**values["init"])
        return cls(**values)
