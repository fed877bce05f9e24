from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import UnauthenticatedError
from services.common.quota import Quota
from services.common.tokens import (
    INTERNAL_AUDIENCE,
    Principal,
    PublicKeysFile,
    Signer,
    Verifier,
    generate_key,
    parse_public_keys,
    principal_of,
    public_pem,
)

KEY = generate_key()
WHO = Principal("tenant-a", "key1", frozenset({"user", "admin"}))


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def make(audience: str, clock: Clock, key=KEY) -> Verifier:
    return Verifier(parse_public_keys(public_pem(key)), audience, clock=clock)


def test_a_principal_survives_the_trip() -> None:
    clock = Clock()
    token = Signer(KEY, clock=clock).principal_token(WHO)
    assert principal_of(make(INTERNAL_AUDIENCE, clock).verify(token)) == WHO


def test_a_principal_carries_its_tenants_newest_quota() -> None:
    clock = Clock()
    signer, verifier = Signer(KEY, clock=clock), make(INTERNAL_AUDIENCE, clock)
    first = replace(WHO, quota=Quota(7, sandboxes=10, cpu=2.5, maximum_lifetime_ms=1000))
    raised = replace(WHO, quota=Quota(8, sandboxes=0))
    for who in (first, WHO, raised):
        assert principal_of(verifier.verify(signer.principal_token(who))) == who


def test_what_a_newer_gateway_says_of_a_quota_is_ignored() -> None:
    claims = {"tenant": "t", "sub": "k", "roles": [], "quota": {"revision": 1, "sandboxes": 2, "wishes": 3}}
    assert principal_of(claims).quota == Quota(1, sandboxes=2)


@pytest.mark.parametrize("token", [None, "", "x", "a.b.c", "é", "e30.e30."])
def test_what_is_no_token_is_refused(token: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        make("uid-1", Clock()).verify(token)


def test_a_token_of_another_sandbox_is_refused() -> None:
    clock = Clock()
    token = Signer(KEY, clock=clock).agent_token("uid-1")
    assert make("uid-1", clock).verify(token)
    with pytest.raises(UnauthenticatedError):
        make("uid-2", clock).verify(token)
    with pytest.raises(UnauthenticatedError):
        make(INTERNAL_AUDIENCE, clock).verify(token)


def test_a_token_of_another_key_is_refused_and_rotation_works() -> None:
    clock = Clock()
    other = generate_key()
    token = Signer(other, clock=clock).agent_token("uid-1")
    with pytest.raises(UnauthenticatedError):
        make("uid-1", clock).verify(token)
    both = Verifier(parse_public_keys(public_pem(KEY) + public_pem(other)), "uid-1", clock=clock)
    assert both.verify(token)


class TestPublicKeysFile:
    def test_keys_are_rotated_without_a_restart(self, tmp_path: Path) -> None:
        clock, path, new = Clock(), tmp_path / "keys.pem", generate_key()
        path.write_bytes(public_pem(KEY))
        verifier = Verifier(PublicKeysFile(path, clock=clock), "uid-1", clock=clock)
        old_token, new_token = (Signer(key, clock=clock).agent_token("uid-1") for key in (KEY, new))
        assert verifier.verify(old_token)
        replace_file(path, public_pem(KEY) + public_pem(new))
        clock.now += 2
        assert verifier.verify(old_token)
        assert verifier.verify(new_token)
        replace_file(path, public_pem(new))
        clock.now += 2
        assert verifier.verify(new_token)
        with pytest.raises(UnauthenticatedError):
            verifier.verify(old_token)  # also one that was good before

    @pytest.mark.parametrize("broken", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----\n????\n-----END PUBLIC KEY-----"])
    def test_what_is_broken_leaves_the_keys_before_it(self, tmp_path: Path, broken: bytes) -> None:
        clock, path = Clock(), tmp_path / "keys.pem"
        path.write_bytes(public_pem(KEY))
        file = PublicKeysFile(path, clock=clock)
        keys = file.look()
        replace_file(path, broken)
        clock.now += 2
        assert file.look() is keys
        path.unlink()
        clock.now += 2
        assert file.look() is keys
        assert file.pem == public_pem(KEY).decode()
        replace_file(path, public_pem(generate_key()))
        clock.now += 2
        assert file.look() is not keys

    def test_it_must_be_there_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"keys\.pem"):
            PublicKeysFile(tmp_path / "keys.pem")


def replace_file(path: Path, content: bytes) -> None:
    """At once, as Kubernetes replaces a mounted secret."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)


def test_a_token_ends_also_for_a_verifier_that_remembers_it() -> None:
    clock = Clock()
    signer, verifier = Signer(KEY, clock=clock), make("uid-1", clock)
    token = signer.agent_token("uid-1")
    assert verifier.verify(token)
    clock.now += 601
    with pytest.raises(UnauthenticatedError, match="expired"):
        verifier.verify(token)


def test_a_signer_renews_before_its_token_ends() -> None:
    clock = Clock()
    signer = Signer(KEY, clock=clock)
    first = signer.agent_token("uid-1")
    clock.now += 299
    assert signer.agent_token("uid-1") == first
    clock.now += 2
    second = signer.agent_token("uid-1")
    assert second != first
    assert make("uid-1", clock).verify(second)


def test_an_unsigned_token_is_refused() -> None:
    import jwt

    forged = jwt.encode({"aud": "uid-1", "iss": "orchard-gateway", "exp": 2_000_000_000}, "", algorithm="none")
    with pytest.raises(UnauthenticatedError):
        make("uid-1", Clock()).verify(forged)


def test_an_independent_implementation_reads_and_writes_the_same_tokens() -> None:
    import time

    import jwt

    token = Signer(KEY).principal_token(WHO)
    claims = jwt.decode(
        token, KEY.public_key(), algorithms=["EdDSA"], audience=INTERNAL_AUDIENCE, issuer="orchard-gateway"
    )
    assert (claims["tenant"], claims["roles"]) == ("tenant-a", ["admin", "user"])
    theirs = jwt.encode(
        {"aud": "uid-1", "iss": "orchard-gateway", "exp": int(time.time()) + 60}, KEY, algorithm="EdDSA"
    )
    assert Verifier(parse_public_keys(public_pem(KEY)), "uid-1").verify(theirs)["aud"] == "uid-1"


@pytest.mark.parametrize("change", [{"alg": "HS256"}, {"alg": "none"}, {}])
def test_a_token_cannot_choose_how_it_is_checked(change: dict[str, str]) -> None:
    import base64
    import json

    good = Signer(KEY).agent_token("uid-1")
    _head, body, signature = good.split(".")
    head = base64.urlsafe_b64encode(json.dumps({"typ": "JWT", **change}).encode()).decode().rstrip("=")
    with pytest.raises(UnauthenticatedError):
        Verifier(parse_public_keys(public_pem(KEY)), "uid-1").verify(f"{head}.{body}.{signature}")


@pytest.mark.parametrize("position", range(0, 200, 7))
def test_a_changed_token_is_refused(position: int) -> None:
    good = Signer(KEY).agent_token("uid-1")
    other = "A" if good[position] != "A" else "B"
    with pytest.raises(UnauthenticatedError):
        Verifier(parse_public_keys(public_pem(KEY)), "uid-1").verify(good[:position] + other + good[position + 1 :])


def test_public_keys_are_read_as_the_general_reader_reads_them() -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = public_pem(KEY) + public_pem(generate_key())
    first, second = parse_public_keys(pem)
    assert first == serialization.load_pem_public_key(public_pem(KEY))
    assert first != second
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    for bad in (b"", b"nonsense", other.public_bytes(serialization.Encoding.PEM, kind)):
        with pytest.raises(TypeError, match="Ed25519"):
            parse_public_keys(bad)
