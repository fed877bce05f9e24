"""Asks the node daemon what this machine can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.local.supervisor.channel import open_channel

_ANSWER_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the machine gives to sandboxes; see GetNodeResponse."""

    user_ids: str
    limits: str
    gaps: tuple[str, ...]


async def ask_node(address: str) -> NodeFacts | None:
    """The node's answer, or None if it has none at the moment."""
    async with open_channel(address) as channel:
        from grpc.aio import AioRpcError
        from orchard.node.v1 import node_service_pb2, node_service_pb2_grpc

        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        try:
            node = await stub.GetNode(node_service_pb2.GetNodeRequest(), timeout=_ANSWER_SECONDS)
        except AioRpcError:
            return None
    return NodeFacts(node.user_ids, node.limits, tuple(node.gaps))
