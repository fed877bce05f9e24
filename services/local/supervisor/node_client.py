"""Asks the node daemon what this machine can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ANSWER_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the machine gives to sandboxes; see GetNodeResponse."""

    user_ids: str
    limits: str
    gaps: tuple[str, ...]


async def ask_node(address: str, signing_key: Path) -> NodeFacts | None:
    """The node's answer, or None if it has none at the moment."""
    import grpc.aio
    from orchard.node.v1 import node_service_pb2, node_service_pb2_grpc

    from services.common.server import CHANNEL_OPTIONS
    from services.common.tokens import PRINCIPAL_KEY, Principal, Signer, load_private_key

    token = Signer(load_private_key(signing_key)).principal_token(
        Principal("default", "supervisor", frozenset({"admin"}))
    )
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = node_service_pb2_grpc.NodeServiceStub(channel)
        try:
            node = await stub.GetNode(
                node_service_pb2.GetNodeRequest(), metadata=((PRINCIPAL_KEY, token),), timeout=_ANSWER_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
    return NodeFacts(node.user_ids, node.limits, tuple(node.gaps))
