"""Connections to the agents of sandboxes, found through the watcher's cache: no look-up, no poll, no store."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import grpc
import grpc.aio
from orchard.exec.v1 import agent_service_pb2, agent_service_pb2_grpc

from services.common.channel import connect
from services.common.errors import FailedPreconditionError, NotFoundError, UnavailableError
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.tasks import TaskGroup
from services.common.tls import ClientTls
from services.common.tokens import AGENT_TOKEN_KEY, Signer
from services.common.versions import MINIMUM_AGENT, works
from services.common.watch_cache import WatchCache

_UNKNOWN_SECONDS: Final = 2.0
_CHANNELS_KEPT: Final = 8192
_SECRET_SECONDS: Final = 5.0
_VERSION_SECONDS: Final = 5.0
_LEAVING_SECONDS: Final = 60.0
"""The watcher has told of a delete by then."""
_LEAVING_KEPT: Final = 65_536


@dataclass(slots=True)
class Agent:
    """The connection to one sandbox's agent."""

    tenant: str
    sandbox_id: str
    uid: str
    endpoint: str
    channel: grpc.aio.Channel
    works: bool = False
    """Whether its version is known and new enough."""
    open_calls: int = 0
    last_active: float = 0.0
    callables: dict[str, Any] = field(default_factory=dict)


class Agents:
    """Finds the agent of a sandbox and keeps its connection while the sandbox lives."""

    def __init__(self, cache: WatchCache, signer: Signer, tasks: TaskGroup, tls: ClientTls | None = None) -> None:
        self._cache = cache
        self._signer = signer
        self._tasks = tasks
        self._tls = tls
        self._agents: OrderedDict[str, Agent] = OrderedDict()
        self._leaving: OrderedDict[str, float] = OrderedDict()
        """When deletes of sandboxes were accepted, by uid; the oldest first."""

    async def find(self, tenant: str, sandbox_id: str) -> Agent:
        """The agent of a READY sandbox. An id that is not known yet, or not READY yet, is waited for: 2 s.

        Raises:
            NotFoundError: there is no such sandbox in this tenant.
            FailedPreconditionError: it has ended (SANDBOX_LOST), or its agent is too old (AGENT_TOO_OLD).
            UnavailableError: it is still starting.
            grpc.aio.AioRpcError: an agent that told the watcher no version does not answer.
        """
        seen = self._cache.get(tenant, sandbox_id)
        if seen is None or seen.state is State.STARTING:
            seen = await self._cache.wait(
                tenant, sandbox_id, lambda now: now.state is not State.STARTING, _UNKNOWN_SECONDS
            )
        if seen is None:
            if not self._cache.current:
                # It may well exist: nobody tells this gateway at the moment.
                raise UnavailableError("the gateway does not see the sandboxes now; retry", reason="SANDBOXES_UNSEEN")
            raise NotFoundError(
                f"there is no sandbox {sandbox_id!r}", reason="SANDBOX_NOT_FOUND", sandbox_id=sandbox_id
            )
        if seen.state is not State.READY:
            raise _not_ready(seen)
        if self._leaving.get(seen.uid, -math.inf) > time.monotonic() - _LEAVING_SECONDS:
            raise _not_ready(replace(seen, state=State.DELETING, reason=Reason.REQUESTED))
        agent = self._of(seen)
        if not agent.works:
            await self._check_version(agent, seen.agent_version)
        return agent

    async def _check_version(self, agent: Agent, version: str) -> None:
        if not version:
            # Of before agents told it with their health.
            stub: Any = agent_service_pb2_grpc.AgentServiceStub(agent.channel)
            with _kept(agent):
                answer = await stub.GetAgent(
                    agent_service_pb2.GetAgentRequest(sandbox_id=agent.sandbox_id),
                    metadata=(self.metadata(agent),),
                    timeout=_VERSION_SECONDS,
                )
            version = answer.version
        if not works(version):
            raise FailedPreconditionError(
                f"the agent of sandbox {agent.sandbox_id!r} has version {version!r}, and this gateway works with "
                f"{MINIMUM_AGENT} and newer: delete the sandbox and create it again",
                reason="AGENT_TOO_OLD",
                sandbox_id=agent.sandbox_id,
                version=version,
                minimum_version=MINIMUM_AGENT,
            )
        agent.works = True

    def _of(self, seen: Observed) -> Agent:
        agent = self._agents.get(seen.uid)
        if agent is None or agent.endpoint != seen.endpoint:
            agent = self._connect(seen)
        return agent

    def _connect(self, seen: Observed) -> Agent:
        self.forget(seen.uid)
        channel = connect(seen.endpoint, self._tls)
        agent = Agent(seen.tenant, seen.sandbox_id, seen.uid, seen.endpoint, channel)
        self._agents[seen.uid] = agent
        if len(self._agents) > _CHANNELS_KEPT:
            idle = next((uid for uid, kept in self._agents.items() if not kept.open_calls), seen.uid)
            if idle != seen.uid:
                self.forget(idle)
        return agent

    def forget(self, uid: str) -> None:
        """Close the connection to a sandbox that has ended."""
        agent = self._agents.pop(uid, None)
        if agent is not None:
            self._tasks.start(f"close agent {uid}", agent.channel.close(grace=1.0), forever=False)

    def leave(self, uid: str) -> None:
        """A delete was accepted: nothing goes to this sandbox any more, though the watcher has not told of it yet."""
        now = time.monotonic()
        self._leaving[uid] = now
        self._leaving.move_to_end(uid)
        while len(self._leaving) > _LEAVING_KEPT or next(iter(self._leaving.values())) <= now - _LEAVING_SECONDS:
            self._leaving.popitem(last=False)

    def metadata(self, agent: Agent) -> tuple[str, str]:
        """The token that only this agent accepts."""
        return (AGENT_TOKEN_KEY, self._signer.agent_token(agent.uid))

    def take_active(self) -> list[Agent]:
        """Agents that were used since the last call, or are being used."""
        active = []
        for agent in self._agents.values():
            if agent.open_calls or agent.last_active:
                active.append(agent)
                agent.last_active = 0.0
        return active

    @staticmethod
    def put_back(agents: list[Agent]) -> None:
        """The use of these, taken with `take_active`, could not be reported: the next report has it."""
        now = time.monotonic()
        for agent in agents:
            agent.last_active = agent.last_active or now

    @staticmethod
    def begin(agent: Agent) -> None:
        """A call to the agent begins."""
        agent.open_calls += 1

    @staticmethod
    def end(agent: Agent) -> None:
        """A call to the agent has ended."""
        agent.open_calls -= 1
        agent.last_active = time.monotonic()

    async def deliver_secret_env(self, seen: Observed, env: Mapping[str, str]) -> None:
        """Hand a secret environment to the agent of this incarnation of a sandbox, which is READY.

        Raises:
            grpc.aio.AioRpcError: it could not be delivered now.
        """
        agent = self._of(seen)
        stub = agent_service_pb2_grpc.AgentServiceStub(agent.channel)
        with _kept(agent):
            await stub.SetSecretEnv(
                agent_service_pb2.SetSecretEnvRequest(sandbox_id=seen.sandbox_id, secret_env=env),
                metadata=(self.metadata(agent),),
                timeout=_SECRET_SECONDS,
            )

    async def close(self) -> None:
        """Close every connection."""
        for agent in list(self._agents.values()):
            await agent.channel.close()
        self._agents.clear()


@contextmanager
def _kept(agent: Agent) -> Iterator[None]:
    """Around a call of the gateway's own: the connection is not closed to make room for another, and nobody uses it."""
    agent.open_calls += 1
    try:
        yield
    finally:
        agent.open_calls -= 1


def _not_ready(seen: Observed) -> FailedPreconditionError | UnavailableError:
    if seen.state is State.STARTING:
        return UnavailableError(
            f"sandbox {seen.sandbox_id!r} is still starting; retry",
            reason="SANDBOX_STARTING",
            sandbox_id=seen.sandbox_id,
        )
    why = f" ({seen.reason.name}{': ' if seen.message else ''}{seen.message})" if seen.reason else ""
    return FailedPreconditionError(
        f"sandbox {seen.sandbox_id!r} has ended{why}",
        reason="SANDBOX_LOST",
        sandbox_id=seen.sandbox_id,
        state=seen.state.name,
        state_reason=seen.reason.name,
    )
