"""The life of sandboxes through the whole platform, by generated stubs."""

import asyncio
import secrets

import grpc
import pytest
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from tests.support.wire import Wire, reason_of, seconds

READY = sandbox_pb2.SANDBOX_STATE_READY
DELETED = sandbox_pb2.SANDBOX_STATE_DELETED


def unique() -> str:
    return f"t-{secrets.token_hex(5)}"


async def test_a_sandbox_from_create_to_delete(wire: Wire) -> None:
    name = unique()
    created = await wire.create(name, labels={"team": "blue"}, env={"GREETING": "hello"})
    assert created.state in (sandbox_pb2.SANDBOX_STATE_QUEUED, sandbox_pb2.SANDBOX_STATE_STARTING)
    assert created.spec.ttl.seconds == 86_400
    states = [sandbox.state for sandbox in await wire.wait(name)]
    assert states[-1] == READY
    assert states == sorted(states)
    assert await wire.output(name, 'echo "$GREETING from $(hostname)"') == b"hello from sandbox\n"
    ready = await wire.get(name)
    assert (ready.create_time, ready.expire_time, ready.request_id) == (
        created.create_time,
        created.expire_time,
        created.request_id,
    )
    assert ready.ready_time.ToMilliseconds() >= ready.create_time.ToMilliseconds()
    gone = await wire.delete(name)
    assert gone.state in (sandbox_pb2.SANDBOX_STATE_DELETING, DELETED)
    end = (await wire.wait(name, until_terminal=True))[-1]
    assert (end.state, end.reason) == (DELETED, sandbox_pb2.SANDBOX_REASON_REQUESTED)
    assert (await wire.delete(name)).state == DELETED
    async with asyncio.timeout(110):
        code = grpc.StatusCode.UNAVAILABLE
        while code == grpc.StatusCode.UNAVAILABLE:  # the gateway may hear of it a moment after the scheduler
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.run(name, "true")
            code = caught.value.code()
    assert (code, reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "SANDBOX_LOST")


async def test_a_repeated_create_makes_one_sandbox(wire: Wire) -> None:
    request_id = unique()
    made = await asyncio.gather(*(wire.create(request_id=request_id, labels={"a": "b"}) for _ in range(20)))
    assert len({sandbox.sandbox_id for sandbox in made}) == 1
    listed = await wire.call(wire.sandboxes.ListSandboxes, sandbox_service_pb2.ListSandboxesRequest(page_size=1000))
    assert [s.sandbox_id for s in listed.sandboxes if s.request_id == request_id] == [made[0].sandbox_id]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create(request_id=request_id, labels={"a": "c"})
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert reason_of(caught.value) == "REQUEST_ID_REUSED"
    await wire.delete(made[0].sandbox_id)


async def test_an_id_that_lives_is_taken(wire: Wire) -> None:
    name = await wire.ready(unique())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create(name)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ALREADY_EXISTS, "SANDBOX_EXISTS")
    first = await wire.get(name)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.delete(name, uid="another")
    assert reason_of(caught.value) == "UID_MISMATCH"
    await wire.delete(name, uid=first.uid)
    await wire.wait(name, until_terminal=True)
    again = await wire.ready(name)
    assert (await wire.get(again)).uid != first.uid
    await wire.delete(name)


async def test_what_is_deleted_runs_nothing_more(wire: Wire) -> None:
    """Nobody has to wait for that after the delete."""
    for _ in range(5):
        name = await wire.ready()
        await wire.delete(name)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.run(name, "true")
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "SANDBOX_LOST")


async def test_time_to_live_ends_it_and_can_be_extended(wire: Wire) -> None:
    longer = (await wire.create(ttl=seconds(10))).sandbox_id
    await wire.call(
        wire.sandboxes.UpdateSandbox, sandbox_service_pb2.UpdateSandboxRequest(sandbox_id=longer, ttl=seconds(600))
    )
    assert (await wire.wait(longer))[-1].state == READY
    # It ends when the other one would have, and no earlier.
    short = (await wire.create(ttl=seconds(10))).sandbox_id
    end = (await wire.wait(short, until_terminal=True))[-1]
    assert (end.state, end.reason) == (DELETED, sandbox_pb2.SANDBOX_REASON_EXPIRED)
    assert (await wire.get(longer)).state == READY
    await wire.delete(longer)


async def test_an_idle_sandbox_ends_and_a_used_one_does_not(wire: Wire) -> None:
    idle = await wire.ready(idle_timeout=seconds(3))
    busy = await wire.ready(idle_timeout=seconds(12))
    command = asyncio.ensure_future(wire.run(busy, "sleep 14", wait=30))
    end = (await wire.wait(idle, until_terminal=True))[-1]
    assert end.reason == sandbox_pb2.SANDBOX_REASON_EXPIRED
    assert (await command).exec.result.exit_code == 0
    assert (await wire.get(busy)).state == READY
    await wire.delete(busy)


async def test_without_heartbeats_it_ends(wire: Wire) -> None:
    # The second ends when the first would have without its heartbeats, and no earlier; a busy machine misses a few.
    alive, dead = await wire.ready(heartbeat_timeout=seconds(14)), await wire.ready(heartbeat_timeout=seconds(15))
    waiting = asyncio.ensure_future(wire.wait(dead, until_terminal=True))
    while not waiting.done():
        beat = await wire.call(
            wire.sandboxes.Heartbeat, sandbox_service_pb2.HeartbeatRequest(sandbox_ids=[alive, "never-was"])
        )
        assert list(beat.missing_sandbox_ids) == ["never-was"]
        await asyncio.wait([waiting], timeout=1)
    assert waiting.result()[-1].reason == sandbox_pb2.SANDBOX_REASON_EXPIRED
    assert (await wire.get(alive)).state == READY
    await wire.delete(alive)


async def test_lists_filter_and_page(wire: Wire) -> None:
    group = unique()
    names = [(await wire.create(labels={"group": group, "odd": str(n % 2)})).sandbox_id for n in range(7)]

    async def listed(**more) -> list[str]:
        found, token = [], ""
        while True:
            request = sandbox_service_pb2.ListSandboxesRequest(page_size=2, page_token=token, **more)
            page = await wire.call(wire.sandboxes.ListSandboxes, request)
            assert len(page.sandboxes) <= 2
            found += [sandbox.sandbox_id for sandbox in page.sandboxes]
            token = page.next_page_token
            if not token:
                return found

    assert sorted(await listed(labels={"group": group})) == sorted(names)
    assert sorted(await listed(labels={"group": group, "odd": "1"})) == sorted(names[1::2])
    for name in names[:3]:
        await wire.delete(name)
        await wire.wait(name, until_terminal=True)
    assert sorted(await listed(labels={"group": group})) == sorted(names[3:])
    assert sorted(await listed(labels={"group": group}, states=[DELETED])) == sorted(names[:3])
    for name in names[3:]:
        await wire.delete(name)


async def test_a_burst_queues_and_every_sandbox_becomes_ready(wire: Wire) -> None:
    group = unique()
    names = await asyncio.gather(*(wire.ready(labels={"group": group}) for _ in range(40)))
    outputs = await asyncio.gather(*(wire.output(name, "echo $((6 * 7))") for name in names))
    assert outputs == [b"42\n"] * 40
    await asyncio.gather(*(wire.delete(name) for name in names))
    ends = await asyncio.gather(*(wire.wait(name, until_terminal=True) for name in names))
    assert {end[-1].reason for end in ends} == {sandbox_pb2.SANDBOX_REASON_REQUESTED}


async def test_one_deleted_while_it_is_made_leaves_nothing(wire: Wire) -> None:
    for _ in range(10):
        created = await wire.create()
        await wire.delete(created.sandbox_id)
        end = (await wire.wait(created.sandbox_id, until_terminal=True))[-1]
        assert (end.state, end.reason) == (DELETED, sandbox_pb2.SANDBOX_REASON_REQUESTED)


async def test_sandboxes_do_not_see_each_other(wire: Wire) -> None:
    one, two = await wire.ready(), await wire.ready()
    await wire.output(one, "echo mine > /tmp/file; echo mine > /usr/share/orchard-test; (sleep 60 &) ; echo ok")
    assert await wire.output(two, "cat /tmp/file /usr/share/orchard-test 2>/dev/null; true") == b""
    assert b"sleep 60" not in await wire.output(two, "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done")
    for name in (one, two):
        await wire.delete(name)


async def test_other_tenants_see_nothing(wire: Wire) -> None:
    from orchard.admin.v1 import admin_pb2, key_service_pb2

    name = await wire.ready()
    made = await wire.call(
        wire.keys.CreateKey, key_service_pb2.CreateKeyRequest(tenant="other", roles=[admin_pb2.ROLE_USER])
    )
    other = wire.with_key(made.secret)
    for attempt in (other.get(name), other.run(name, "true"), other.delete(name), other.wait(name)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attempt
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "SANDBOX_NOT_FOUND")
    same = await other.ready(name)
    assert (await other.get(same)).uid != (await wire.get(name)).uid
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other.call(other.keys.ListKeys, key_service_pb2.ListKeysRequest())
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    await other.delete(same)
    await wire.call(wire.keys.RevokeKey, key_service_pb2.RevokeKeyRequest(key_id=made.key.key_id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await other.get(name)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert await wire.output(name, "echo still here") == b"still here\n"
    await wire.delete(name)


async def test_usage_is_added_up(wire: Wire) -> None:
    from orchard.admin.v1 import usage_service_pb2

    label = unique()
    name = await wire.ready(labels={"run": label}, resources=sandbox_pb2.Resources(cpu=2, memory_bytes=1 << 30))
    await wire.output(name, "sleep 1")
    await wire.delete(name)
    await wire.wait(name, until_terminal=True)
    request = usage_service_pb2.GetUsageRequest(group_by_label="run")
    async with asyncio.timeout(110):
        while True:
            found = [one for one in (await wire.call(wire.usage.GetUsage, request)).usages if one.label_value == label]
            if found and found[0].sandbox_seconds > 1:
                break
            await asyncio.sleep(0.1)  # written behind the scenes, about once a second
    (usage,) = found
    assert usage.sandboxes == 1
    assert 1 < usage.sandbox_seconds < 600
    assert usage.cpu_hours == pytest.approx(usage.sandbox_seconds * 2 / 3600)
