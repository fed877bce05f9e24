"""An id that is used again: its new sandbox has its own secret, and the old one's use has ended."""

import secrets

import grpc.aio
from orchard.admin.v1 import usage_service_pb2

from tests.support.wire import Wire, reason_of


async def token_of(wire: Wire, sandbox_id: str) -> bytes:
    while True:
        try:
            return await wire.output(sandbox_id, "printf %s $TOKEN")
        except grpc.aio.AioRpcError as error:
            # READY may be told a moment before the agent has it.
            assert reason_of(error) == "SECRET_ENV_PENDING"


async def test_every_sandbox_of_an_id_gets_its_own_secret(wire: Wire) -> None:
    name = f"again-{secrets.token_hex(4)}"
    for number in range(4):
        secret = f"{number}-{secrets.token_hex(8)}"
        await wire.ready(name, secret_env={"TOKEN": secret})
        assert await token_of(wire, name) == secret.encode()
        await wire.delete(name)
        await wire.wait(name, until_terminal=True)


async def test_what_was_deleted_is_used_no_longer(wire: Wire) -> None:
    run = secrets.token_hex(4)
    request = usage_service_pb2.GetUsageRequest(group_by_label="use")

    async def seconds() -> float:
        usages = (await wire.call(wire.usage.GetUsage, request)).usages
        return next((one.sandbox_seconds for one in usages if one.label_value == run), 0.0)

    name = await wire.ready(labels={"use": run})
    while not await seconds():
        pass
    await wire.delete(name)
    await wire.wait(name, until_terminal=True)
    last, now = -1.0, await seconds()
    while now != last:
        last, now = now, await seconds()
    assert now > 0
