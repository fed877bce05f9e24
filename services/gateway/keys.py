"""API keys: made once, stored hashed, checked from memory.

A key is `ork_<key id>_<secret>`. The secret has 256 random bits, so one SHA-256 is a sufficient hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from services.common.errors import NotFoundError, UnauthenticatedError, UnavailableError
from services.common.health import Health
from services.common.interceptor import Metadata, current_call
from services.common.logs import get_logger
from services.common.quota import UNLIMITED, Quota
from services.common.tokens import Principal
from services.gateway import scopes as rules
from services.gateway.store import ApiKey, GatewayStore, utc_now

_log = get_logger(__name__)

DEPENDENCY: Final = "database"
_PREFIX: Final = "ork"
_UNKNOWN_KEPT: Final = 10_000
_UNKNOWN_SECONDS: Final = 3.0
_LOOK_UPS_WAITING: Final = 100
_KEY_ID: Final = re.compile(r"[0-9a-f]{12}")


class Keys:
    """The keys of every tenant, and the gateway's authenticator."""

    def __init__(
        self,
        store: GatewayStore,
        health: Health,
        *,
        quota_of: Callable[[str], Quota] = lambda _tenant: UNLIMITED,
        look_ups: int = 2,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """`look_ups` of unknown ids at once, which anybody can make up: fewer than the store has connections."""
        self._store = store
        self._health = health
        self._quota_of = quota_of
        self._clock = clock
        self._now = now
        self._known: dict[str, tuple[ApiKey, Principal]] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._look_ups = asyncio.Semaphore(look_ups)
        self._looking_up = 0
        # Grows with each change: what was read under an older number may have a revoked key, or lack a new one.
        self._generation = 0

    async def create(
        self,
        tenant: str,
        name: str,
        roles: frozenset[str],
        ttl: timedelta | None,
        *,
        scopes: frozenset[str] = frozenset(),
    ) -> tuple[ApiKey, str]:
        """Make a key; returns it and its secret form, which nobody can show again."""
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now = self._now()
        key = ApiKey(key_id, tenant, name, _hash(secret), roles, now, now + ttl if ttl else None, None, scopes)
        await self._store.add_key(key)
        self._generation += 1
        self._remember(key)
        return key, f"{_PREFIX}_{key_id}_{secret}"

    async def list_page(self, tenant: str, before: tuple[datetime, str] | None, count: int) -> list[ApiKey]:
        """Keys of a tenant, or of all, newest first."""
        return await self._store.list_keys(tenant, before, count)

    async def revoke(self, key_id: str, tenant: str = "") -> ApiKey:
        """Stop a key, of this tenant if one is given: here at once, on other gateways at their next refresh.

        Raises:
            NotFoundError: there is no such key.
        """
        try:
            key = await self._store.revoke_key(key_id, self._now(), tenant)
        finally:
            # Also where the answer was lost: it may be revoked, and whoever shows it has it read again.
            self._generation += 1
            known = self._known.get(key_id)
            if known is not None and tenant in ("", known[0].tenant):
                del self._known[key_id]
        if key is None:
            raise NotFoundError(f"there is no key {key_id!r}", reason="KEY_NOT_FOUND", key_id=key_id)
        return key

    async def run_refresh(self, every_seconds: float) -> None:
        """Read the keys again and again, for ever. With the database away, known keys go on working."""
        while True:
            try:
                await self.refresh()
                await self._health.well(DEPENDENCY)
            except UnavailableError as error:
                await self._health.unwell(DEPENDENCY, error.message, detail=error.cause)
            await asyncio.sleep(every_seconds)

    async def refresh(self) -> None:
        """Read the keys once.

        Raises:
            UnavailableError: the database is away.
        """
        generation = -1
        while generation != self._generation:
            generation = self._generation
            keys = await self._store.working_keys(self._now())
        self._known = {key.key_id: (key, _principal(key)) for key in keys}

    async def authenticate(self, method: str, metadata: Metadata) -> Principal:
        """See interceptor.Authenticator. Scopes are checked here, before anything is looked for."""
        call = current_call.get(None)
        scheme, _, presented = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise UnauthenticatedError(
                "the call carries no API key; send it as metadata 'authorization: Bearer <key>'", reason="KEY_MISSING"
            )
        prefix, _, rest = presented.partition("_")
        key_id, _, secret = rest.partition("_")
        if call is not None and _KEY_ID.fullmatch(key_id):
            # Only what can be an id is kept: whoever mixes up the parts of a key must not find the secret in a log.
            call.key_id = key_id
        found = None
        if prefix == _PREFIX:
            found = self._known.get(key_id) or await self._look_up(key_id)
        # Compared also for an unknown key, so that the time says nothing.
        expected = found[0].secret_hash if found else b"\0" * 32
        if not hmac.compare_digest(_hash(secret), expected) or found is None or not found[0].works_at(self._now()):
            raise UnauthenticatedError("the API key is not valid: unknown, expired or revoked", reason="KEY_INVALID")
        key, principal = found
        if (quota := self._quota_of(principal.tenant)) is not principal.quota:
            principal = replace(principal, quota=quota)
            if key_id in self._known:
                self._known[key_id] = (key, principal)
        if call is not None:
            call.principal = principal
        rules.check(method, principal.scopes)
        return principal

    async def _look_up(self, key_id: str) -> tuple[ApiKey, Principal] | None:
        """A key made on another gateway a moment ago. Ids that are unknown are not asked for again at once."""
        if not _KEY_ID.fullmatch(key_id) or self._is_unknown(key_id):
            return None
        if self._looking_up >= _LOOK_UPS_WAITING:
            raise UnavailableError("too many unknown API keys are being looked up; retry", reason="KEY_LOOK_UPS_BUSY")
        self._looking_up += 1
        try:
            async with self._look_ups:
                # Another call may have asked for it meanwhile.
                if self._is_unknown(key_id):
                    return None
                return self._known.get(key_id) or await self._find(key_id)
        finally:
            self._looking_up -= 1

    def _is_unknown(self, key_id: str) -> bool:
        return self._unknown.get(key_id, 0.0) > self._clock()

    async def _find(self, key_id: str) -> tuple[ApiKey, Principal] | None:
        now = self._clock()
        generation = -1
        while generation != self._generation:
            generation = self._generation
            key = await self._store.find_key(key_id)
        if key is None:
            self._unknown[key_id] = now + _UNKNOWN_SECONDS
            self._unknown.move_to_end(key_id)
            while len(self._unknown) > _UNKNOWN_KEPT:
                self._unknown.popitem(last=False)
            return None
        return self._remember(key)

    def _remember(self, key: ApiKey) -> tuple[ApiKey, Principal]:
        self._known[key.key_id] = (key, _principal(key))
        return self._known[key.key_id]


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _principal(key: ApiKey) -> Principal:
    return Principal(key.tenant, key.key_id, key.roles, scopes=rules.granted(key.roles, key.scopes))
