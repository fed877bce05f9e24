"""What keys may do: scopes, roles as bundles of them, and the one that each method needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from services.common.errors import PermissionDeniedError
from services.common.tokens import Principal

ADMIN: Final = "admin"
SCOPES: Final = (
    "sandboxes:read",
    "sandboxes:write",
    "exec",
    "files",
    "trajectories:read",
    "trajectories:write",
    "judgements:read",
    "judgements:write",
    "usage",
    "keys",
    "tenants",
    "images",
    "audit",
    "debug",
)
ROLES: Final[Mapping[str, frozenset[str]]] = {
    "user": frozenset(
        {
            "sandboxes:read",
            "sandboxes:write",
            "exec",
            "files",
            "trajectories:read",
            "trajectories:write",
            "judgements:read",
            "judgements:write",
            "usage",
        }
    ),
    ADMIN: frozenset(SCOPES),
}

ANY_KEY: Final = ""
_SANDBOXES: Final = "/orchard.sandbox.v1.SandboxService/"
_TRAJECTORIES: Final = "/orchard.trajectory.v1.TrajectoryService/"
_GROUPS: Final = "/orchard.trajectory.v1.GroupService/"
_TRAJECTORY_READS: Final = (
    "GetTrajectory",
    "ReadSteps",
    "ListTrajectories",
    "ExportTrajectories",
    "ListAnnotations",
    "GetStats",
    "GetBlob",
)
_JUDGE: Final = "/orchard.judge.v1.JudgeService/"
_JUDGE_READS: Final = ("GetVerdict", "GetBatch", "GetAnswer", "ListRubrics", "GetRubric", "Calibrate", "GetUsage")
_OF_METHODS: Final[Mapping[str, str]] = {
    _SANDBOXES + "GetSandbox": "sandboxes:read",
    _SANDBOXES + "ListSandboxes": "sandboxes:read",
    _SANDBOXES + "WaitSandbox": "sandboxes:read",
    **{_TRAJECTORIES + name: "trajectories:read" for name in _TRAJECTORY_READS},
    **{_JUDGE + name: "judgements:read" for name in _JUDGE_READS},
    **{_GROUPS + name: "trajectories:read" for name in ("GetGroup", "ListGroups")},
}
_OF_SERVICES: Final[Mapping[str, str]] = {
    _SANDBOXES: "sandboxes:write",
    "/orchard.exec.v1.ExecService/": "exec",
    "/orchard.exec.v1.FileService/": "files",
    "/orchard.exec.v1.PortService/": "exec",
    "/orchard.exec.v1.EndpointService/": "exec",
    _TRAJECTORIES: "trajectories:write",
    _GROUPS: "trajectories:write",
    _JUDGE: "judgements:write",
    "/orchard.admin.v1.UsageService/": "usage",
    "/orchard.admin.v1.KeyService/": "keys",
    "/orchard.admin.v1.TenantService/": "tenants",
    "/orchard.admin.v1.ImageService/": "images",
    "/orchard.admin.v1.AuditService/": "audit",
    "/orchard.admin.v1.VersionService/": ANY_KEY,
    "/grpc.channelz.v1.Channelz/": "debug",  # names every peer
}


def granted(roles: Iterable[str], scopes: Iterable[str]) -> frozenset[str]:
    """Every scope that a key with these roles and scopes has; names of another version count for nothing."""
    bundles = (ROLES[role] for role in roles if role in ROLES)
    return frozenset(scopes).intersection(SCOPES).union(*bundles)


@lru_cache(maxsize=1024)
def scope_of(method: str) -> str | None:
    """The scope that a method needs, ANY_KEY for none; None for a method that has no rule."""
    found = _OF_METHODS.get(method)
    return _OF_SERVICES.get(method[: method.rfind("/") + 1]) if found is None else found


def check(method: str, has: frozenset[str]) -> None:
    """Whether a key with these scopes may call a method; one without a rule is for nobody.

    Raises:
        PermissionDeniedError: it may not.
    """
    scope = scope_of(method)
    if scope is None:
        raise PermissionDeniedError(f"no key may call {method}", reason="SCOPE_MISSING", method=method)
    if scope and scope not in has:
        raise PermissionDeniedError(
            f"this needs a key with the scope {scope!r}", reason="SCOPE_MISSING", scope=scope, method=method
        )


def check_tenant(who: Principal, tenant: str, what: str) -> None:
    """Whether the caller may deal with a tenant's things.

    Raises:
        PermissionDeniedError: it is another tenant than its own, and it is no admin.
    """
    if tenant != who.tenant and ADMIN not in who.roles:
        raise PermissionDeniedError(
            f"another tenant's {what} needs a key with ROLE_ADMIN", reason="ROLE_MISSING", role="ROLE_ADMIN"
        )
