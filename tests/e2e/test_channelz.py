"""channelz names every peer: an admin may ask the gateway, and the machine's own user an internal socket."""

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from orchard.admin.v1 import admin_pb2, key_service_pb2

from tests.support.platform import PlatformProcess
from tests.support.wire import Wire

REQUEST = channelz_pb2.GetServersRequest()


async def test_of_the_gateway_for_admins_alone(wire: Wire) -> None:
    channelz = channelz_pb2_grpc.ChannelzStub(wire.channel)
    assert (await channelz.GetServers(REQUEST, metadata=wire.metadata, timeout=110)).server
    request = key_service_pb2.CreateKeyRequest(tenant="default", roles=[admin_pb2.ROLE_USER])
    user = (("authorization", f"Bearer {(await wire.call(wire.keys.CreateKey, request)).secret}"),)
    for metadata, status in (((), grpc.StatusCode.UNAUTHENTICATED), (user, grpc.StatusCode.PERMISSION_DENIED)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channelz.GetServers(REQUEST, metadata=metadata, timeout=110)
        assert caught.value.code() == status


@pytest.mark.parametrize("service", ["watcher", "node"])
async def test_of_internal_services_on_their_sockets(platform: PlatformProcess, service: str) -> None:
    async with grpc.aio.insecure_channel(f"unix:{platform.run}/{service}.sock") as channel:
        assert (await channelz_pb2_grpc.ChannelzStub(channel).GetServers(REQUEST, timeout=110)).server
