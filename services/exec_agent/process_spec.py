"""What the launcher is told of a command."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.exec_agent.launcher import protocol as wire
from services.exec_agent.users import ResolvedUser

_BIG: Final = 1 << 20
"""From this size on the stack limit is raised: the kernel gives arguments a quarter of it, pointers included."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What the launcher needs to start a command."""

    argv: Sequence[str]
    env: bytes
    """encode_env's result, NUL-terminated entries."""
    env_count: int
    cwd: str
    identity: ResolvedUser | None
    """None: the agent's own."""
    tty: bool = False
    """Its standard input is a terminal, and becomes the controlling one of its session."""

    def encode(self) -> bytes:
        """The launcher's message."""
        arguments = "\0".join(self.argv)
        body = b"".join((os.fsencode(self.cwd), b"\0", arguments.encode(), b"\0", self.env))
        groups = self.identity.groups if self.identity else ()
        size = wire.SPEC.size + 4 * len(groups) + len(body)
        flags = wire.SPEC_USER if self.identity else 0
        if size + 8 * (len(self.argv) + self.env_count) > _BIG:
            flags |= wire.SPEC_BIG
        if self.tty:
            flags |= wire.SPEC_TTY
        if size > wire.INLINE_LIMIT:
            flags |= wire.SPEC_MEMFD
        uid, gid = (self.identity.uid, self.identity.gid) if self.identity else (0, 0)
        header = wire.SPEC.pack(size, flags, uid, gid, len(groups), len(self.argv), self.env_count)
        return b"".join((header, struct.pack(f"={len(groups)}I", *groups), body)) if groups else header + body


def encode_env(env: Mapping[str, str]) -> bytes:
    """An environment as NUL-terminated KEY=VALUE entries. That of an image need not be UTF-8: see os.fsdecode."""
    return b"".join([f"{key}={value}\0".encode("utf-8", "surrogateescape") for key, value in env.items()])
