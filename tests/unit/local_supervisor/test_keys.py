from pathlib import Path

import pytest

from services.common import tokens
from services.local.supervisor.errors import PlatformError
from services.local.supervisor.keys import KeyFiles


def test_the_signing_key_is_made_once(tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path / "keys")
    keys.prepare()
    first = keys.signing.read_bytes()
    assert keys.signing.stat().st_mode & 0o777 == 0o600
    assert keys.directory.stat().st_mode & 0o777 == 0o700
    # A lost public half is made from the private one.
    keys.public.unlink()
    keys.prepare()
    assert keys.signing.read_bytes() == first
    token = tokens.Signer(tokens.load_private_key(keys.signing)).agent_token("uid")
    assert tokens.Verifier(tokens.parse_public_keys(keys.public.read_bytes()), "uid").verify(token)["aud"] == "uid"


def test_a_damaged_signing_key_is_named(tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path)
    keys.signing.write_text("x")
    with pytest.raises(PlatformError, match=r"signing\.pem"):
        keys.prepare()


def test_each_database_has_its_own_api_key(tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path)
    assert keys.read_api_key() is None
    assert keys.write_api_key(b'{"key_id": "k", "secret": "s"}') == "s"
    assert keys.read_api_key() == "s"
    assert keys.api_key.stat().st_mode & 0o777 == 0o600
    assert KeyFiles(tmp_path, "postgresql://elsewhere/db").read_api_key() is None


def test_a_damaged_api_key_is_named(tmp_path: Path) -> None:
    keys = KeyFiles(tmp_path)
    keys.api_key.write_text("{}")
    with pytest.raises(PlatformError, match="remove it"):
        keys.read_api_key()
    with pytest.raises(PlatformError, match="printed no key"):
        keys.write_api_key(b"oops")
