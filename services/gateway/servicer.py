"""What the gateway serves itself: creates, deletes, keys, usage and the version. Proto to domain and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import (
    admin_pb2,
    key_service_pb2,
    key_service_pb2_grpc,
    usage_service_pb2,
    usage_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
)
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from services import __version__
from services.common.auth import EXPECTS_SECRET_ENV_KEY, principal
from services.common.errors import PermissionDeniedError
from services.common.interceptor import note_target
from services.common.pages import bad_token, decode_token, encode_token
from services.common.validation import Fields, seconds_of
from services.common.versions import MINIMUM_AGENT
from services.gateway.agents_client import Agents
from services.gateway.couriers import SecretCourier
from services.gateway.keys import Keys
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.scopes import ADMIN, SCOPES, check_tenant, granted
from services.gateway.store import ApiKey, GatewayStore, UsageSum, utc_now

if TYPE_CHECKING:
    from services.gateway.proxy import Handler

_ROLES: Final = {admin_pb2.ROLE_USER: "user", admin_pb2.ROLE_ADMIN: "admin"}
_ROLE_NUMBERS: Final = {name: number for number, name in _ROLES.items()}
_YEARS_SECONDS: Final = 3650 * 86_400.0


class SandboxServicer:
    """The calls of SandboxService that take more than to be passed on.

    CreateSandbox: the secret environment is kept back and delivered to the agent. DeleteSandbox: once it is accepted
    nothing goes to the sandbox from here.

    Args:
        metadata: what the proxy of the other calls sends along.
    """

    def __init__(
        self,
        scheduler: SchedulerClient,
        courier: SecretCourier,
        agents: Agents,
        metadata: Callable[[], tuple[tuple[str, str], ...]],
    ) -> None:
        self._scheduler = scheduler
        self._courier = courier
        self._agents = agents
        self._metadata = metadata

    def handlers(self) -> Mapping[str, Handler]:
        """They, by their paths."""
        service = sandbox_service_pb2.DESCRIPTOR.services_by_name["SandboxService"].full_name
        return {
            f"/{service}/CreateSandbox": grpc.unary_unary_rpc_method_handler(
                self.create,
                request_deserializer=sandbox_service_pb2.CreateSandboxRequest.FromString,
                response_serializer=sandbox_service_pb2.CreateSandboxResponse.SerializeToString,
            ),
            f"/{service}/DeleteSandbox": grpc.unary_unary_rpc_method_handler(
                self.delete,
                request_deserializer=sandbox_service_pb2.DeleteSandboxRequest.FromString,
                response_serializer=sandbox_service_pb2.DeleteSandboxResponse.SerializeToString,
            ),
        }

    async def create(
        self, request: sandbox_service_pb2.CreateSandboxRequest, context: Any
    ) -> sandbox_service_pb2.CreateSandboxResponse:
        """See sandbox_service.proto."""
        fields = Fields()
        fields.env("secret_env", request.secret_env)
        fields.done()
        secret = dict(request.secret_env)
        metadata = self._metadata()
        note_target(request.sandbox_id)
        if not secret:
            return await self._create(request, metadata, context)
        request.ClearField("secret_env")
        with self._courier.room(secret):
            response = await self._create(request, (*metadata, (EXPECTS_SECRET_ENV_KEY, "1")), context)
            made = response.sandbox
            self._courier.deliver_later(principal(), made.sandbox_id, made.request_id, secret)
        return response

    async def _create(
        self, request: sandbox_service_pb2.CreateSandboxRequest, metadata: tuple[tuple[str, str], ...], context: Any
    ) -> sandbox_service_pb2.CreateSandboxResponse:
        response = await self._scheduler.create(request, metadata, context.time_remaining())
        note_target(response.sandbox.sandbox_id)
        return response

    async def delete(
        self, request: sandbox_service_pb2.DeleteSandboxRequest, context: Any
    ) -> sandbox_service_pb2.DeleteSandboxResponse:
        """See sandbox_service.proto."""
        note_target(request.sandbox_id)
        response = await self._scheduler.delete(request, self._metadata(), context.time_remaining())
        self._agents.leave(response.sandbox.uid)
        return response


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """Serves orchard.admin.v1.KeyService; the authenticator has checked the scope."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def CreateKey(  # noqa: N802 (gRPC's names, here and below)
        self,
        request: key_service_pb2.CreateKeyRequest,
        context: Any,  # noqa: ARG002
    ) -> key_service_pb2.CreateKeyResponse:
        """See key_service.proto."""
        fields = Fields()
        fields.tenant("tenant", request.tenant)
        fields.text("name", request.name, maximum=400)
        fields.check(len(request.name) <= 100, "name", "must be at most 100 characters")
        fields.check(bool(request.roles or request.scopes), "roles", "or scopes must name at least one")
        for index, role in enumerate(request.roles):
            fields.check(role in _ROLES, f"roles[{index}]", "must be ROLE_USER or ROLE_ADMIN")
        for index, scope in enumerate(request.scopes):
            fields.check(scope in SCOPES, f"scopes[{index}]", f"must be one of {', '.join(SCOPES)}")
        if request.HasField("ttl"):
            fields.duration("ttl", request.ttl, minimum=1, maximum=_YEARS_SECONDS)
        fields.done()
        ttl = timedelta(seconds=seconds_of(request.ttl)) if request.HasField("ttl") else None
        roles = frozenset(_ROLES[role] for role in request.roles)
        scopes = frozenset(request.scopes)
        _check_grant(request.tenant, roles, scopes)
        key, secret = await self._keys.create(request.tenant, request.name, roles, ttl, scopes=scopes)
        note_target(key.key_id)
        return key_service_pb2.CreateKeyResponse(key=_key_proto(key), secret=secret)

    async def ListKeys(  # noqa: N802
        self,
        request: key_service_pb2.ListKeysRequest,
        context: Any,  # noqa: ARG002
    ) -> key_service_pb2.ListKeysResponse:
        """See key_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.text("tenant", request.tenant, maximum=63)
        fields.done()
        before = None
        if request.page_token:
            microseconds, key_id = decode_token("page_token", request.page_token, (int, str))
            try:
                before = (datetime.fromtimestamp(0, UTC) + timedelta(microseconds=microseconds), key_id)
            except OverflowError:
                raise bad_token("page_token") from None
        who = principal()
        tenant = request.tenant or ("" if ADMIN in who.roles else who.tenant)
        if tenant:
            check_tenant(who, tenant, "keys")
        keys = await self._keys.list_page(tenant, before, size)
        token = ""
        if len(keys) == size:
            since = keys[-1].create_time - datetime.fromtimestamp(0, UTC)
            token = encode_token((since // timedelta(microseconds=1), keys[-1].key_id))
        return key_service_pb2.ListKeysResponse(keys=[_key_proto(key) for key in keys], next_page_token=token)

    async def RevokeKey(  # noqa: N802
        self,
        request: key_service_pb2.RevokeKeyRequest,
        context: Any,  # noqa: ARG002
    ) -> key_service_pb2.RevokeKeyResponse:
        """See key_service.proto."""
        fields = Fields()
        fields.text("key_id", request.key_id, maximum=64, required=True)
        fields.done()
        note_target(request.key_id)
        who = principal()
        # A key of another tenant is none for those who may not see it.
        key = await self._keys.revoke(request.key_id, "" if ADMIN in who.roles else who.tenant)
        return key_service_pb2.RevokeKeyResponse(key=_key_proto(key))


class UsageServicer(usage_service_pb2_grpc.UsageServiceServicer):
    """Serves orchard.admin.v1.UsageService."""

    def __init__(self, store: GatewayStore) -> None:
        self._store = store

    async def GetUsage(  # noqa: N802
        self,
        request: usage_service_pb2.GetUsageRequest,
        context: Any,  # noqa: ARG002
    ) -> usage_service_pb2.GetUsageResponse:
        """See usage_service.proto."""
        who = principal()
        tenant = request.tenant or who.tenant
        check_tenant(who, tenant, "usage")
        fields = Fields()
        fields.tenant("tenant", tenant)
        start = _time(fields, "start_time", request.start_time) if request.HasField("start_time") else None
        end = (_time(fields, "end_time", request.end_time) if request.HasField("end_time") else None) or utc_now()
        fields.check(start is None or start < end, "start_time", "must be before end_time")
        fields.text("group_by_label", request.group_by_label, maximum=63)
        fields.done()
        sums = await self._store.sum_usage(tenant, start, end, request.group_by_label)
        if not sums and not request.group_by_label:
            sums = [UsageSum("", 0, 0.0, 0.0, 0.0)]
        return usage_service_pb2.GetUsageResponse(
            usages=[
                admin_pb2.Usage(
                    tenant=tenant,
                    label_value=one.label_value,
                    sandboxes=one.sandboxes,
                    sandbox_seconds=one.sandbox_seconds,
                    cpu_hours=one.cpu_hours,
                    memory_gib_hours=one.memory_gib_hours,
                )
                for one in sums
            ]
        )


class VersionServicer(version_service_pb2_grpc.VersionServiceServicer):
    """Serves orchard.admin.v1.VersionService."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime

    async def GetVersion(  # noqa: N802
        self,
        request: version_service_pb2.GetVersionRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> version_service_pb2.GetVersionResponse:
        """See version_service.proto."""
        return version_service_pb2.GetVersionResponse(
            version=__version__,
            minimum_agent_version=MINIMUM_AGENT,
            runtime=self._runtime,
            tenant=principal().tenant,
        )


def usage_terms(spec: bytes) -> tuple[Mapping[str, str], float, int]:
    """Labels, CPUs and memory bytes of a serialised SandboxSpec."""
    parsed = sandbox_pb2.SandboxSpec.FromString(spec)
    return dict(parsed.labels), parsed.resources.cpu, parsed.resources.memory_bytes


def _time(fields: Fields, field: str, value: Timestamp) -> datetime | None:
    return value.ToDatetime(UTC) if fields.timestamp(field, value) else None


def _check_grant(tenant: str, roles: frozenset[str], scopes: frozenset[str]) -> None:
    """A key can give no more than it has."""
    who = principal()
    check_tenant(who, tenant, "keys")
    beyond = sorted(granted(roles, scopes) - who.scopes)
    if (ADMIN in roles and ADMIN not in who.roles) or beyond:
        raise PermissionDeniedError(
            f"this key cannot give what it lacks itself: {', '.join(beyond) or 'ROLE_ADMIN'}", reason="SCOPE_MISSING"
        )


def _key_proto(key: ApiKey) -> admin_pb2.ApiKey:
    def stamp(time: datetime | None) -> Timestamp | None:
        if time is None:
            return None
        result = Timestamp()
        result.FromDatetime(time)
        return result

    return admin_pb2.ApiKey(
        key_id=key.key_id,
        tenant=key.tenant,
        name=key.name,
        roles=[_ROLE_NUMBERS[role] for role in sorted(key.roles)],
        create_time=stamp(key.create_time),
        expire_time=stamp(key.expire_time),
        revoke_time=stamp(key.revoke_time),
        scopes=sorted(key.scopes),
    )
