"""Signed tokens: what the gateway says to agents and to internal services, and how they check it.

Tokens are JWTs signed with Ed25519 (RFC 8037). Verifiers hold public keys only, two at most during a rotation.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from services.common.errors import UnauthenticatedError

INTERNAL_AUDIENCE: Final = "orchard-internal"
AGENT_TOKEN_KEY: Final = "orchard-agent-token"  # noqa: S105 (a metadata key)
PRINCIPAL_KEY: Final = "orchard-principal"
_ISSUER: Final = "orchard-gateway"
_LIFETIME_SECONDS: Final = 600.0
_CACHE_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a tenant, through a key, with roles ("user", "admin")."""

    tenant: str
    key_id: str
    roles: frozenset[str]


class Signer:
    """Makes tokens and reuses each until half of its lifetime is over."""

    def __init__(self, private_key: Ed25519PrivateKey, *, clock: Callable[[], float] = time.time) -> None:
        self._key = private_key
        self._clock = clock
        self._cache: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()

    def agent_token(self, uid: str) -> str:
        """A token that only the agent of this sandbox uid accepts."""
        return self._token((uid, ""), {"aud": uid})

    def principal_token(self, principal: Principal) -> str:
        """A token that tells internal services who calls."""
        claims = {
            "aud": INTERNAL_AUDIENCE,
            "tenant": principal.tenant,
            "sub": principal.key_id,
            "roles": sorted(principal.roles),
        }
        return self._token((INTERNAL_AUDIENCE, f"{principal.tenant}/{principal.key_id}/{claims['roles']}"), claims)

    def _token(self, cache_key: tuple[str, str], claims: Mapping[str, Any]) -> str:
        now = self._clock()
        found = self._cache.get(cache_key)
        if found and found[0] > now:
            return found[1]
        token = jwt.encode(
            {**claims, "iss": _ISSUER, "exp": int(now + _LIFETIME_SECONDS)}, self._key, algorithm="EdDSA"
        )
        self._cache[cache_key] = (now + _LIFETIME_SECONDS / 2, token)
        self._cache.move_to_end(cache_key)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return token


class Verifier:
    """Checks tokens for one audience; a token that passed is remembered until it expires."""

    def __init__(
        self, public_keys: Sequence[Ed25519PublicKey], audience: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        if not public_keys:
            raise ValueError("a verifier needs at least one public key")
        self._keys = tuple(public_keys)
        self._audience = audience
        self._clock = clock
        self._cache: OrderedDict[str, tuple[float, Mapping[str, Any]]] = OrderedDict()

    def verify(self, token: str | None) -> Mapping[str, Any]:
        """The token's claims.

        Raises:
            UnauthenticatedError: it is missing, expired, forged or meant for somebody else.
        """
        if not token:
            raise UnauthenticatedError("the call carries no token", reason="TOKEN_MISSING")
        now = self._clock()
        found = self._cache.get(token)
        if found is not None:
            if found[0] > now:
                return found[1]
            del self._cache[token]
        claims = self._decode(token)
        self._cache[token] = (float(claims["exp"]), claims)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return claims

    def _decode(self, token: str) -> Mapping[str, Any]:
        for key in self._keys:
            try:
                claims: Mapping[str, Any] = jwt.decode(
                    token,
                    key,
                    algorithms=["EdDSA"],
                    audience=self._audience,
                    issuer=_ISSUER,
                    options={"require": ["exp", "aud", "iss"], "verify_exp": False},
                )
            except jwt.InvalidSignatureError:
                continue
            except jwt.InvalidTokenError:
                raise UnauthenticatedError("the token is not valid here", reason="TOKEN_INVALID") from None
            if float(claims["exp"]) <= self._clock():
                raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
            return claims
        raise UnauthenticatedError("the token is not valid here", reason="TOKEN_INVALID")


def principal_of(claims: Mapping[str, Any]) -> Principal:
    """The principal in verified claims."""
    return Principal(str(claims["tenant"]), str(claims["sub"]), frozenset(claims["roles"]))


def generate_key() -> Ed25519PrivateKey:
    """A new signing key."""
    return Ed25519PrivateKey.generate()


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """The key as unencrypted PKCS #8 PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """Its public half as PEM."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key file."""
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError(f"{path} does not hold an Ed25519 private key")
    return key


def parse_public_keys(pem: bytes) -> tuple[Ed25519PublicKey, ...]:
    """Every public key of a file that holds one or more in PEM."""
    marker = b"-----BEGIN"
    keys = [serialization.load_pem_public_key(marker + part) for part in pem.split(marker)[1:]]
    if not keys or not all(isinstance(key, Ed25519PublicKey) for key in keys):
        raise TypeError("expected one or more Ed25519 public keys in PEM")
    return tuple(key for key in keys if isinstance(key, Ed25519PublicKey))
