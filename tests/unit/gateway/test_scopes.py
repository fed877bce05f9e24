"""Which scope each method needs, and what roles and scopes give."""

import pytest
from google.protobuf import descriptor_pool

from services.common.errors import PermissionDeniedError
from services.common.tokens import Principal
from services.gateway import app, scopes

GET = "/orchard.sandbox.v1.SandboxService/GetSandbox"
DELETE = "/orchard.sandbox.v1.SandboxService/DeleteSandbox"
START = "/orchard.exec.v1.ExecService/StartExec"


def methods() -> list[str]:
    found = []
    for name in (*app.SERVICE_NAMES, *app.TRAJECTORY_NAMES, *app.JUDGE_NAMES):
        service = descriptor_pool.Default().FindServiceByName(name)
        found += [f"/{name}/{method.name}" for method in service.methods]
    return found


def test_every_method_that_the_gateway_serves_has_a_rule_with_a_scope_that_exists() -> None:
    assert {method for method in methods() if scopes.scope_of(method) is None} == set()
    assert {scopes.scope_of(method) for method in methods()} - {""} <= set(scopes.SCOPES)


def test_a_method_without_a_rule_is_for_nobody() -> None:
    with pytest.raises(PermissionDeniedError, match="no key may call"):
        scopes.check("/orchard.new.v1.NewService/Do", frozenset(scopes.SCOPES))


@pytest.mark.parametrize("method", methods())
def test_the_role_admin_may_everything_and_no_scope_next_to_nothing(method: str) -> None:
    scopes.check(method, scopes.granted({"admin"}, ()))
    if method != "/orchard.admin.v1.VersionService/GetVersion":
        with pytest.raises(PermissionDeniedError) as caught:
            scopes.check(method, frozenset())
        assert caught.value.reason == "SCOPE_MISSING"
        assert caught.value.metadata["method"] == method


def test_the_role_user_may_what_is_its_tenants() -> None:
    may = scopes.granted({"user"}, ())
    allowed = {
        method.split("/")[1].rpartition(".")[2] for method in methods() if (scopes.scope_of(method) or "") in may
    }
    own = {"SandboxService", "ExecService", "FileService", "PortService", "EndpointService", "UsageService"}
    assert allowed == own | {"TrajectoryService", "GroupService", "JudgeService"}


@pytest.mark.parametrize(
    ("scope", "may", "may_not"),
    [("sandboxes:read", GET, DELETE), ("sandboxes:write", DELETE, GET), ("exec", START, GET)],
)
def test_a_single_scope_is_that_and_no_more(scope: str, may: str, may_not: str) -> None:
    scopes.check(may, scopes.granted((), {scope}))
    with pytest.raises(PermissionDeniedError):
        scopes.check(may_not, scopes.granted((), {scope}))


def test_roles_and_scopes_add_up_and_unknown_names_count_for_nothing() -> None:
    assert scopes.granted({"user", "owner"}, {"audit", "everything"}) == scopes.ROLES["user"] | {"audit"}


def test_another_tenant_needs_the_role_admin_whatever_the_scopes_are() -> None:
    rich = Principal("acme", "k", frozenset({"user"}), scopes=frozenset(scopes.SCOPES))
    scopes.check_tenant(rich, "acme", "keys")
    with pytest.raises(PermissionDeniedError, match="another tenant's keys"):
        scopes.check_tenant(rich, "other", "keys")
    scopes.check_tenant(Principal("acme", "k", frozenset({"admin"})), "other", "keys")
