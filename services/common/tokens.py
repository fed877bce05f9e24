"""Signed tokens: what the gateway says to agents and to internal services, and how they check it.

Tokens are JWTs (RFC 7519) signed with Ed25519 (RFC 8037), in the compact form. Verifiers hold public keys only, two at
most during a rotation, and know one algorithm: a token cannot choose how it is checked. The few lines that this takes
stand here, since a JWT package would bring HTTP and TLS clients into every sandbox's agent.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from services.common.errors import UnauthenticatedError
from services.common.logs import get_logger
from services.common.quota import UNLIMITED, Quota

_log = get_logger(__name__)

INTERNAL_AUDIENCE: Final = "orchard-internal"
AGENT_TOKEN_KEY: Final = "orchard-agent-token"  # noqa: S105 (a metadata key)
PRINCIPAL_KEY: Final = "orchard-principal"
_ISSUER: Final = "orchard-gateway"
_ALGORITHM: Final = "EdDSA"
_LIFETIME_SECONDS: Final = 600.0
_CACHE_SIZE: Final = 4096
_LOOK_SECONDS: Final = 1.0
_PEM_BLOCK: Final = re.compile(rb"-----BEGIN PUBLIC KEY-----(.*?)-----END PUBLIC KEY-----", re.DOTALL)
_ED25519_PREFIX: Final = bytes.fromhex("302a300506032b6570032100")  # SubjectPublicKeyInfo of id-Ed25519


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a tenant with its quota, through a key, with roles ("user", "admin").

    `scopes` are every scope that the key has; the gateway checks them, and they do not leave it.
    """

    tenant: str
    key_id: str
    roles: frozenset[str]
    quota: Quota = UNLIMITED
    scopes: frozenset[str] = frozenset()


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
        claims: dict[str, Any] = {
            "aud": INTERNAL_AUDIENCE,
            "tenant": principal.tenant,
            "sub": principal.key_id,
            "roles": sorted(principal.roles),
        }
        quota = principal.quota
        if quota.revision:
            claims["quota"] = quota.to_claims()
        who = f"{principal.tenant}/{principal.key_id}/{claims['roles']}/{quota.revision}"
        return self._token((INTERNAL_AUDIENCE, who), claims)

    def _token(self, cache_key: tuple[str, str], claims: Mapping[str, Any]) -> str:
        now = self._clock()
        found = self._cache.get(cache_key)
        if found and found[0] > now:
            return found[1]
        token = _encode({**claims, "iss": _ISSUER, "exp": int(now + _LIFETIME_SECONDS)}, self._key)
        self._cache[cache_key] = (now + _LIFETIME_SECONDS / 2, token)
        self._cache.move_to_end(cache_key)
        while len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return token


class PublicKeysFile:
    """The public keys in a PEM file that may be replaced at any time, also through symbolic links.

    It is looked at once a second at most. What is new and broken is logged once, and the keys before it go on.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read it.

        Raises:
            OSError: it cannot be read.
            TypeError: it holds something else.
        """
        self._path = path
        self._clock = clock
        self._seen = path.read_bytes()
        self._pem, self._keys = self._seen, parse_public_keys(self._seen)
        self._look_at = clock() + _LOOK_SECONDS

    def look(self) -> tuple[Ed25519PublicKey, ...]:
        """The newest usable keys: the same tuple as long as they are the same."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._read_again()
        return self._keys

    @property
    def pem(self) -> str:
        """What they were read from, as of the last look."""
        return self._pem.decode("ascii", errors="replace")

    def _read_again(self) -> None:
        try:
            content = self._path.read_bytes()
            if content == self._seen:
                return
            self._seen = content
            self._keys, self._pem = parse_public_keys(content), content
        except (OSError, TypeError, ValueError) as error:
            _log.error("the new public keys cannot be used; those before go on", file=str(self._path), why=str(error))
        else:
            _log.info("public keys were replaced", file=str(self._path), keys=len(self._keys))


class Verifier:
    """Checks tokens for one audience; a token that passed is remembered until it expires or the keys change."""

    def __init__(
        self,
        public_keys: Sequence[Ed25519PublicKey] | PublicKeysFile,
        audience: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = public_keys if isinstance(public_keys, PublicKeysFile) else None
        self._keys = public_keys.look() if isinstance(public_keys, PublicKeysFile) else tuple(public_keys)
        if not self._keys:
            raise ValueError("a verifier needs at least one public key")
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
        if self._file is not None and (keys := self._file.look()) is not self._keys:
            self._keys = keys
            self._cache.clear()
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
        signed, _, signature = token.rpartition(".")
        head, _, body = signed.partition(".")
        try:
            header, claims = json.loads(_from_base64(head)), json.loads(_from_base64(body))
            if header["alg"] != _ALGORITHM or not self._signed(signed.encode(), _from_base64(signature)):
                raise _invalid()
            meant_for_us = claims["aud"] == self._audience and claims["iss"] == _ISSUER
            expires = float(claims["exp"])
        except (ValueError, KeyError, TypeError):
            raise _invalid() from None
        if not meant_for_us:
            raise _invalid()
        if expires <= self._clock():
            raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
        return dict(claims)

    def _signed(self, message: bytes, signature: bytes) -> bool:
        for key in self._keys:
            try:
                key.verify(signature, message)
            except InvalidSignature:
                continue
            return True
        return False


def _encode(claims: Mapping[str, Any], key: Ed25519PrivateKey) -> str:
    parts = ({"alg": _ALGORITHM, "typ": "JWT"}, claims)
    signed = ".".join(_to_base64(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
    return f"{signed}.{_to_base64(key.sign(signed.encode()))}"


def _to_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _invalid() -> UnauthenticatedError:
    return UnauthenticatedError("the token is not valid here", reason="TOKEN_INVALID")


def principal_of(claims: Mapping[str, Any]) -> Principal:
    """The principal in verified claims."""
    quota = Quota.of_claims(claims["quota"]) if "quota" in claims else UNLIMITED
    return Principal(str(claims["tenant"]), str(claims["sub"]), frozenset(claims["roles"]), quota)


def generate_key() -> Ed25519PrivateKey:
    """A new signing key."""
    return Ed25519PrivateKey.generate()


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """The key as unencrypted PKCS #8 PEM."""
    from cryptography.hazmat.primitives import serialization  # not for agents: 28 modules of SSH, RSA and the like

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(key: Ed25519PrivateKey) -> bytes:
    """Its public half as PEM."""
    from cryptography.hazmat.primitives import serialization

    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key file."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError(f"{path} does not hold an Ed25519 private key")
    return key


def parse_public_keys(pem: bytes) -> tuple[Ed25519PublicKey, ...]:
    """Every public key of a file that holds one or more in PEM (RFC 8410).

    Raises:
        TypeError: something in it is not an Ed25519 public key.
    """
    keys = []
    for block in _PEM_BLOCK.findall(pem):
        # Read by hand: the general reader takes 2 ms, in every sandbox's start.
        der = binascii.a2b_base64(block)
        if len(der) != len(_ED25519_PREFIX) + 32 or not der.startswith(_ED25519_PREFIX):
            raise TypeError("expected Ed25519 public keys in PEM, found another kind")
        keys.append(Ed25519PublicKey.from_public_bytes(der[len(_ED25519_PREFIX) :]))
    if not keys:
        raise TypeError("expected one or more Ed25519 public keys in PEM, found none")
    return tuple(keys)
