"""Whose call it is, where a test makes it without a server."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from services.common.interceptor import Call, current_call
from services.common.tokens import Principal
from services.gateway.scopes import granted


def bearer(secret: str) -> dict[str, str]:
    """The metadata of a call with this API key."""
    return {"authorization": f"Bearer {secret}"}


@contextmanager
def calling(tenant: str, *roles: str, scopes: Iterable[str] = ()) -> Iterator[Call]:
    """Calls of servicers are made by a key of these roles and scopes."""
    held = frozenset(roles)
    call = Call("/x/y", "r", Principal(tenant, "k", held, scopes=granted(held, frozenset(scopes))))
    token = current_call.set(call)
    yield call
    current_call.reset(token)
