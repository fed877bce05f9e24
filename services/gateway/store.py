"""The gateway's tables in PostgreSQL, schema `gateway`: API keys, tenants, usage. No command's path reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, insert

from services.common.db import Database
from services.common.quota import Quota
from services.gateway.tenants import Tenant

SCHEMA: Final = "gateway"
_metadata: Final = sa.MetaData(schema=SCHEMA)
_TIME: Final = sa.DateTime(timezone=True)

API_KEYS: Final = sa.Table(
    "api_keys",
    _metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("secret_hash", sa.LargeBinary, nullable=False),
    sa.Column("roles", ARRAY(sa.Text), nullable=False),
    sa.Column("create_time", _TIME, nullable=False),
    sa.Column("expire_time", _TIME),
    sa.Column("revoke_time", _TIME),
    sa.Column("scopes", ARRAY(sa.Text), nullable=False),
)

SANDBOX_USAGE: Final = sa.Table(
    "sandbox_usage",
    _metadata,
    sa.Column("uid", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.Text, nullable=False),
    sa.Column("labels", JSONB, nullable=False),
    sa.Column("cpu", sa.Double, nullable=False),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("ready_time", _TIME, nullable=False),
    sa.Column("end_time", _TIME),
)

TENANTS: Final = sa.Table(
    "tenants",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("sandboxes", sa.BigInteger),
    sa.Column("cpu", sa.Double),
    sa.Column("memory_bytes", sa.BigInteger),
    sa.Column("creates_per_second", sa.Double),
    sa.Column("maximum_lifetime_ms", sa.BigInteger),
    sa.Column("update_time", _TIME, nullable=False),
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key."""

    key_id: str
    tenant: str
    name: str
    secret_hash: bytes
    roles: frozenset[str]
    create_time: datetime
    expire_time: datetime | None
    revoke_time: datetime | None
    scopes: frozenset[str] = frozenset()

    def works_at(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoke_time is None and (self.expire_time is None or now < self.expire_time)


@dataclass(frozen=True, slots=True)
class SandboxUse:
    """When one sandbox was READY and what it asked for."""

    uid: str
    tenant: str
    sandbox_id: str
    labels: Mapping[str, str]
    cpu: float
    memory_bytes: int
    ready_time: datetime
    end_time: datetime | None


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Use added up; see orchard.admin.v1.Usage."""

    label_value: str
    sandboxes: int
    sandbox_seconds: float
    cpu_hours: float
    memory_gib_hours: float


class GatewayStore(Database):
    """Reads and writes the tables."""

    async def add_key(self, key: ApiKey) -> None:
        """Store a new key."""
        values = {column.name: getattr(key, column.name) for column in API_KEYS.columns}
        async with self.transaction() as connection:
            names = {"roles": sorted(key.roles), "scopes": sorted(key.scopes)}
            await connection.execute(sa.insert(API_KEYS).values({**values, **names}))

    async def find_key(self, key_id: str) -> ApiKey | None:
        """One key."""
        async with self.transaction() as connection:
            row = (await connection.execute(sa.select(API_KEYS).where(API_KEYS.c.key_id == key_id))).mappings().first()
        return _api_key(row) if row else None

    async def working_keys(self, now: datetime) -> list[ApiKey]:
        """Every key that works."""
        query = sa.select(API_KEYS).where(
            API_KEYS.c.revoke_time.is_(None), sa.or_(API_KEYS.c.expire_time.is_(None), API_KEYS.c.expire_time > now)
        )
        async with self.transaction() as connection:
            return [_api_key(row) for row in (await connection.execute(query)).mappings()]

    async def list_keys(self, tenant: str, before: tuple[datetime, str] | None, count: int) -> list[ApiKey]:
        """Keys after the position `before`, newest first."""
        query = sa.select(API_KEYS).order_by(API_KEYS.c.create_time.desc(), API_KEYS.c.key_id.desc()).limit(count)
        if tenant:
            query = query.where(API_KEYS.c.tenant == tenant)
        if before:
            query = query.where(sa.tuple_(API_KEYS.c.create_time, API_KEYS.c.key_id) < before)
        async with self.transaction() as connection:
            return [_api_key(row) for row in (await connection.execute(query)).mappings()]

    async def revoke_key(self, key_id: str, now: datetime, tenant: str = "") -> ApiKey | None:
        """Revoke a key, of one tenant if it is given; one that was revoked keeps its time. None if there is none."""
        change = (
            sa.update(API_KEYS)
            .where(API_KEYS.c.key_id == key_id)
            .values(revoke_time=sa.func.coalesce(API_KEYS.c.revoke_time, now))
            .returning(API_KEYS)
        )
        if tenant:
            change = change.where(API_KEYS.c.tenant == tenant)
        async with self.transaction() as connection:
            row = (await connection.execute(change)).mappings().first()
        return _api_key(row) if row else None

    async def set_quota(self, tenant: str, quota: Quota) -> Tenant:
        """See tenants.TenantStore."""
        now = utc_now()
        # Of the time, so that it also grows where the table was lost and what had read it was not.
        revision = int(now.timestamp() * 1000)
        bounds = {name: value for name, value in asdict(quota).items() if name != "revision"}
        statement = insert(TENANTS).values(tenant=tenant, revision=revision, update_time=now, **bounds)
        changed = statement.on_conflict_do_update(
            index_elements=["tenant"],
            set_={
                "revision": sa.func.greatest(TENANTS.c.revision + 1, statement.excluded.revision),
                "update_time": now,
                **bounds,
            },
        )
        async with self.transaction() as connection:
            return _tenant((await connection.execute(changed.returning(TENANTS))).mappings().one())

    async def quotas(self) -> Mapping[str, Quota]:
        """See tenants.TenantStore."""
        async with self.transaction() as connection:
            rows = (await connection.execute(sa.select(TENANTS))).mappings()
            return {row["tenant"]: _tenant(row).quota for row in rows}

    async def list_tenants(self, tenant: str, after: str, count: int) -> list[Tenant]:
        """See tenants.TenantStore."""
        names = sa.union(sa.select(TENANTS.c.tenant), sa.select(API_KEYS.c.tenant)).subquery("names")
        bounds = [column for column in TENANTS.columns if column.name != "tenant"]
        query = (
            sa.select(names.c.tenant, *bounds)
            .select_from(names.outerjoin(TENANTS, TENANTS.c.tenant == names.c.tenant))
            # By bytes: tokens and names mean the same whatever the database's own order of letters is.
            .where(names.c.tenant.collate("C") > after)
            .order_by(names.c.tenant.collate("C"))
            .limit(count)
        )
        if tenant:
            query = query.where(names.c.tenant == tenant)
        async with self.transaction() as connection:
            return [_tenant(row) for row in (await connection.execute(query)).mappings()]

    async def record_uses(self, uses: Sequence[SandboxUse]) -> None:
        """Write uses; one that is there already only gets its end, if it has none."""
        rows = [{column.name: getattr(use, column.name) for column in SANDBOX_USAGE.columns} for use in uses]
        statement = insert(SANDBOX_USAGE)
        statement = statement.on_conflict_do_update(
            index_elements=["uid"],
            set_={"end_time": sa.func.coalesce(SANDBOX_USAGE.c.end_time, statement.excluded.end_time)},
        )
        async with self.transaction() as connection:
            await connection.execute(statement, rows)

    async def end_uses(self, ends: Mapping[str, datetime]) -> None:
        """End the uses of these sandboxes, by uid; those that have an end keep it."""
        change = (
            sa.update(SANDBOX_USAGE)
            .where(SANDBOX_USAGE.c.uid == sa.bindparam("ended_uid"), SANDBOX_USAGE.c.end_time.is_(None))
            .values(end_time=sa.bindparam("ended_at"))
        )
        rows = [{"ended_uid": uid, "ended_at": time} for uid, time in ends.items()]
        async with self.transaction() as connection:
            await connection.execute(change, rows)

    async def end_uses_except(self, living_uids: Sequence[str], seen_at: datetime) -> int:
        """End every use whose sandbox was no more at a time; returns how many.

        What became READY later, another gateway may have written: `living_uids` says nothing of it.
        """
        # One parameter, however many they are: a statement takes at most 65,535.
        living = sa.func.unnest(sa.cast(list(living_uids), ARRAY(sa.Text))).column_valued("living")
        change = (
            sa.update(SANDBOX_USAGE)
            .where(
                SANDBOX_USAGE.c.end_time.is_(None),
                SANDBOX_USAGE.c.ready_time < seen_at,
                SANDBOX_USAGE.c.uid.not_in(sa.select(living)),
            )
            .values(end_time=seen_at)
        )
        async with self.transaction() as connection:
            return int((await connection.execute(change)).rowcount)

    async def sum_usage(self, tenant: str, start: datetime | None, end: datetime, label: str) -> list[UsageSum]:
        """Add up what overlaps the period up to now, by the values of a label if one is given."""
        end = min(end, utc_now())
        table = SANDBOX_USAGE.c
        begin = sa.func.greatest(table.ready_time, start) if start else table.ready_time
        finish = sa.func.least(sa.func.coalesce(table.end_time, end), end)
        seconds = sa.func.extract("epoch", finish - begin)
        value = sa.func.coalesce(table.labels[label].astext, "") if label else sa.literal("")
        query = (
            sa.select(
                value.label("label_value"),
                sa.func.count().label("sandboxes"),
                sa.func.sum(seconds).label("sandbox_seconds"),
                sa.func.sum(seconds * table.cpu / 3600).label("cpu_hours"),
                sa.func.sum(seconds * table.memory_bytes / 2**30 / 3600).label("memory_gib_hours"),
            )
            .where(table.tenant == tenant, finish > begin)
            .group_by(sa.text("1"))
            .order_by(sa.text("3 DESC"))
            .limit(1000)
        )
        async with self.transaction() as connection:
            rows = (await connection.execute(query)).all()
        return [UsageSum(row[0], int(row[1]), float(row[2]), float(row[3]), float(row[4])) for row in rows]


def _tenant(row: Mapping[Any, Any]) -> Tenant:
    names = ("sandboxes", "cpu", "memory_bytes", "creates_per_second", "maximum_lifetime_ms")
    quota = Quota(row["revision"] or 0, **{name: row[name] for name in names})
    return Tenant(row["tenant"], quota, row["update_time"])


def _api_key(row: Mapping[Any, Any]) -> ApiKey:
    return ApiKey(
        key_id=row["key_id"],
        tenant=row["tenant"],
        name=row["name"],
        secret_hash=bytes(row["secret_hash"]),
        roles=frozenset(row["roles"]),
        create_time=row["create_time"],
        expire_time=row["expire_time"],
        revoke_time=row["revoke_time"],
        scopes=frozenset(row["scopes"]),
    )


def utc_now() -> datetime:
    """Now, with its zone."""
    return datetime.now(UTC)
