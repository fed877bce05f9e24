"""Tenants and their quotas: set here, read from memory, told to the scheduler when they change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.common.quota import UNLIMITED, Quota

_log = get_logger(__name__)

_TOLD_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant; without `update_time`, one whose quota was never set."""

    tenant: str
    quota: Quota
    update_time: datetime | None


class TenantStore(Protocol):
    """Where quotas are kept."""

    async def set_quota(self, tenant: str, quota: Quota) -> Tenant:
        """Store a quota under a revision above the one before."""

    async def quotas(self) -> Mapping[str, Quota]:
        """Every quota that was set."""

    async def list_tenants(self, tenant: str, after: str, count: int) -> list[Tenant]:
        """Tenants with a quota or a key, by name, after a name."""


class QuotaSink(Protocol):
    """Where changes are told."""

    async def note_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Tell of quotas that have changed.

        Raises:
            UnavailableError: it did not take them; tell again.
        """


class Tenants:
    """The quotas of every tenant, as of the last look."""

    def __init__(self, store: TenantStore, sink: QuotaSink) -> None:
        self._store = store
        self._sink = sink
        self._known: dict[str, Quota] = {}
        self._untold: dict[str, Quota] = {}
        self._changed = asyncio.Event()

    def quota_of(self, tenant: str) -> Quota:
        """What a tenant may have."""
        return self._known.get(tenant, UNLIMITED)

    async def set(self, tenant: str, quota: Quota) -> Tenant:
        """Set a quota: here at once, on other gateways at their next look."""
        made = await self._store.set_quota(tenant, quota)
        self._note(tenant, made.quota)
        return made

    async def list_page(self, tenant: str, after: str, count: int) -> list[Tenant]:
        """One tenant, or all, by name."""
        return await self._store.list_tenants(tenant, after, count)

    def _note(self, tenant: str, quota: Quota) -> None:
        if quota.revision > self.quota_of(tenant).revision:
            self._known[tenant] = self._untold[tenant] = quota
            self._changed.set()

    async def run_refresh(self, every_seconds: float) -> None:
        """Look for changes again and again, for ever. With the database away, what is known goes on."""
        while True:
            try:
                for tenant, quota in (await self._store.quotas()).items():
                    self._note(tenant, quota)
            except UnavailableError:
                # Whoever reads the keys says so; it is the same database.
                _log.debug("quotas could not be read")
            await asyncio.sleep(every_seconds)

    async def run_telling(self) -> None:
        """Tell the scheduler of changes, for ever: queued creates need not wait for their tenant's next call then."""
        backoff = Backoff(0.1, 5.0)
        while True:
            await self._changed.wait()
            batch = dict(list(self._untold.items())[:_TOLD_AT_ONCE])
            try:
                await self._sink.note_quotas(batch)
            except UnavailableError as error:
                _log.warning("the scheduler was not told of quotas", tenants=len(batch), why=error.message)
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            for tenant, quota in batch.items():
                # A newer one may have come meanwhile.
                if self._untold[tenant] is quota:
                    del self._untold[tenant]
            if not self._untold:
                self._changed.clear()
