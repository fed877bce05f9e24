"""Tenants and quotas against a real PostgreSQL, and how the scheduler hears of them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from orchard.admin.v1 import admin_pb2, tenant_service_pb2
from orchard.sandbox.v1 import lease_service_pb2, lease_service_pb2_grpc

from services.common.errors import InvalidArgumentError, PermissionDeniedError
from services.common.health import Health
from services.common.quota import UNLIMITED, Quota
from services.common.tokens import INTERNAL_AUDIENCE, PRINCIPAL_KEY, Signer, Verifier, generate_key, principal_of
from services.gateway.keys import Keys
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.servicer_tenants import TenantServicer
from services.gateway.store import GatewayStore
from services.gateway.tenants import Tenants
from tests.support.background import at_work

BACKSTOP = 110
KEY = generate_key()
Told = list[tuple[str, int, int]]


class Leases(lease_service_pb2_grpc.LeaseServiceServicer):
    """The scheduler's part: keeps what it was told, or refuses."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Told] = asyncio.Queue()
        self.refusals = 0

    async def NoteQuotas(self, request: lease_service_pb2.NoteQuotasRequest, context: Any) -> Any:
        who = principal_of(
            Verifier((KEY.public_key(),), INTERNAL_AUDIENCE).verify(dict(context.invocation_metadata())[PRINCIPAL_KEY])
        )
        assert who.roles == {"gateway"}
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self.told.put_nowait([(one.tenant, one.revision, one.quota.sandboxes) for one in request.quotas])
        return lease_service_pb2.NoteQuotasResponse()


@pytest.fixture
async def leases(tmp_path: Path) -> AsyncIterator[tuple[Leases, SchedulerClient]]:
    leases, server, address = Leases(), grpc.aio.server(), f"unix:{tmp_path}/s"
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(leases, server)
    server.add_insecure_port(address)
    await server.start()
    client = SchedulerClient(address, Signer(KEY))
    yield leases, client
    await client.close()
    await server.stop(0)


@pytest.fixture
async def tenants(store: GatewayStore, leases: tuple[Leases, SchedulerClient]) -> Tenants:
    return Tenants(store, leases[1])


class TestStore:
    async def test_a_quota_is_set_as_a_whole_and_its_revision_grows(self, store: GatewayStore) -> None:
        quota = Quota(0, 10, 2.5, 1 << 40, 0.5, 86_400_000)
        first = await store.set_quota("acme", quota)
        assert first.quota == Quota(first.quota.revision, 10, 2.5, 1 << 40, 0.5, 86_400_000)
        assert first.update_time is not None
        revisions = [first.quota.revision]
        for _ in range(3):  # within one millisecond too
            revisions.append((await store.set_quota("acme", Quota(sandboxes=1))).quota.revision)
        assert revisions == sorted(set(revisions))
        assert await store.quotas() == {"acme": Quota(revisions[-1], sandboxes=1)}

    async def test_tenants_are_those_with_a_quota_or_a_key(self, store: GatewayStore) -> None:
        for name in ("b", "a-1", "a", "ab"):
            await store.set_quota(name, Quota(sandboxes=1))
        for name in ("b", "c"):
            await Keys(store, Health()).create(name, "", frozenset({"user"}), None)
        pages, after = [], ""
        while page := await store.list_tenants("", after, 2):
            pages += page
            after = page[-1].tenant
        assert [(one.tenant, one.update_time is None) for one in pages] == [
            ("a", False),
            ("a-1", False),
            ("ab", False),
            ("b", False),
            ("c", True),
        ]
        assert [one.tenant for one in await store.list_tenants("b", "", 9)] == ["b"]
        assert await store.list_tenants("none", "", 9) == []


class TestTenants:
    async def test_a_principal_has_the_quota_as_soon_as_it_is_set(self, store: GatewayStore, tenants: Tenants) -> None:
        keys = Keys(store, Health(), quota_of=tenants.quota_of)
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)

        async def quota() -> Quota:
            bearer = {"authorization": f"Bearer {secret}"}
            return (await keys.authenticate("/orchard.sandbox.v1.SandboxService/GetSandbox", bearer)).quota

        assert await quota() is UNLIMITED
        for sandboxes in (1, 2):
            await tenants.set("acme", Quota(sandboxes=sandboxes))
            assert (await quota()).sandboxes == sandboxes
        await keys.refresh()
        assert (await quota()).sandboxes == 2

    async def test_only_an_admin_sets_them(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        with pytest.raises(PermissionDeniedError):
            await keys.authenticate("/orchard.admin.v1.TenantService/SetTenant", {"authorization": f"Bearer {secret}"})

    async def test_another_gateways_change_is_told_once(
        self, store: GatewayStore, leases: tuple[Leases, SchedulerClient], tenants: Tenants
    ) -> None:
        told = leases[0].told
        async with at_work(tenants.run_refresh(0.01), tenants.run_telling()):
            other = Tenants(store, leases[1])
            leases[0].refusals = 2
            first = await other.set("acme", Quota(sandboxes=1))
            assert await asyncio.wait_for(told.get(), BACKSTOP) == [("acme", first.quota.revision, 1)]
            second = await other.set("acme", Quota(sandboxes=2))
            assert await asyncio.wait_for(told.get(), BACKSTOP) == [("acme", second.quota.revision, 2)]
            assert tenants.quota_of("acme") == second.quota
            # What comes next is of the next change, so nothing was told twice.
            third = await other.set("b", Quota(sandboxes=3))
            assert await asyncio.wait_for(told.get(), BACKSTOP) == [("b", third.quota.revision, 3)]


class TestServicer:
    async def test_what_is_set_is_listed(self, tenants: Tenants) -> None:
        servicer = TenantServicer(tenants)
        quota = admin_pb2.Quota(
            sandboxes=0, cpu=1.5, memory_bytes=1 << 35, creates_per_second=2, maximum_lifetime=Duration(seconds=60)
        )
        request = tenant_service_pb2.SetTenantRequest(tenant="acme", quota=quota)
        made = (await servicer.SetTenant(request, None)).tenant
        assert made.quota == quota
        assert made.HasField("update_time")
        await servicer.SetTenant(tenant_service_pb2.SetTenantRequest(tenant="b"), None)
        first = await servicer.ListTenants(tenant_service_pb2.ListTenantsRequest(page_size=1), None)
        assert list(first.tenants) == [made]
        after = tenant_service_pb2.ListTenantsRequest(page_size=1, page_token=first.next_page_token)
        second = await servicer.ListTenants(after, None)
        assert [one.tenant for one in second.tenants] == ["b"]
        assert second.tenants[0].quota == admin_pb2.Quota()
        after.page_token = second.next_page_token
        assert await servicer.ListTenants(after, None) == tenant_service_pb2.ListTenantsResponse()

    @pytest.mark.parametrize(
        ("tenant", "quota", "field"),
        [
            ("Acme", {}, "tenant"),
            ("", {}, "tenant"),
            ("acme", {"sandboxes": -1}, "quota.sandboxes"),
            ("acme", {"cpu": float("nan")}, "quota.cpu"),
            ("acme", {"cpu": float("inf")}, "quota.cpu"),
            ("acme", {"memory_bytes": (1 << 60) + 1}, "quota.memory_bytes"),
            ("acme", {"creates_per_second": 0}, "quota.creates_per_second"),
            ("acme", {"maximum_lifetime": Duration(seconds=0)}, "quota.maximum_lifetime"),
        ],
    )
    async def test_bad_quotas(self, tenants: Tenants, tenant: str, quota: dict[str, Any], field: str) -> None:
        request = tenant_service_pb2.SetTenantRequest(tenant=tenant, quota=admin_pb2.Quota(**quota))
        with pytest.raises(InvalidArgumentError) as caught:
            await TenantServicer(tenants).SetTenant(request, None)
        assert [violation.field for violation in caught.value.violations] == [field]

    @pytest.mark.parametrize("token", ["x", "WyJhXHUwMDAwIl0"])  # ["a\0"]
    async def test_bad_tokens(self, tenants: Tenants, token: str) -> None:
        request = tenant_service_pb2.ListTenantsRequest(page_token=token)
        with pytest.raises(InvalidArgumentError) as caught:
            await TenantServicer(tenants).ListTenants(request, None)
        assert caught.value.violations[0].field == "page_token"
