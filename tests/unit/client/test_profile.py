"""Endpoints and keys are checked before anything is sent."""

import json
from pathlib import Path

import pytest
from orchard._client.errors import ConfigurationError
from orchard._client.profile import Profile, load_profile

KEY = "ork_0123_secret"


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:7411",
        "localhost:1",
        "http://127.0.0.1:65535",
        "https://gateway.example.org",
        "https://gateway.example.org:443/",
        "grpcs://[2001:db8::1]:7411",
        "[::1]:7411",
        "unix:/run/orchard/s",
    ],
)
def test_endpoints(endpoint: str) -> None:
    Profile(endpoint, KEY).check()


@pytest.mark.parametrize(
    "endpoint",
    [
        "nonsense",
        "http://",
        "https://",
        "ftp://x:1",
        "::::",
        "127.0.0.1",
        "127.0.0.1:notaport",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "127.0.0.1:7411/path",
        "a b:1",
        "unix:",
        "ü:7411",
    ],
)
@pytest.mark.parametrize("with_key", [True, False])
def test_what_is_no_endpoint_is_called_none_whatever_else_is_missing(
    tmp_path: Path, endpoint: str, with_key: bool
) -> None:
    environ = {"ORCHARD_CONFIG_DIR": str(tmp_path), "ORCHARD_ENDPOINT": endpoint}
    if with_key:
        environ["ORCHARD_API_KEY"] = KEY
    with pytest.raises(ConfigurationError) as caught:
        load_profile(environ=environ).check()
    assert caught.value.reason == "ENDPOINT_INVALID"
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize("key", ["bad key", "schlüssel", "a\nb", "a\tb", "\x00"])
def test_what_is_no_key_is_called_none_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_profile("127.0.0.1:1", key, environ={}).check()
    assert caught.value.reason == "API_KEY_INVALID"
    assert key not in str(caught.value)


def test_white_space_around_both_is_not_meant() -> None:
    profile = load_profile(" 127.0.0.1:1\n", f"{KEY}\r\n", environ={})
    assert (profile.endpoint, profile.api_key) == ("127.0.0.1:1", KEY)


@pytest.mark.parametrize(
    ("stored", "given", "same"),
    [
        ("127.0.0.1:7411", "localhost:7411", True),
        ("127.0.0.1:7411", "http://[::1]:7411", True),
        ("127.0.0.1:7411", "127.0.0.1:7412", False),
        ("127.0.0.1:7411", "https://127.0.0.1:7411", False),
        ("https://a.example.org:443", "grpcs://a.example.org:443/", True),
        ("https://a.example.org:443", "https://b.example.org:443", False),
        ("127.0.0.1:7411", "a.example.org:7411", False),
    ],
)
def test_the_stored_key_goes_to_the_stored_place_by_whatever_name_and_nowhere_else(
    tmp_path: Path, stored: str, given: str, same: bool
) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({"endpoint": stored, "api_key": KEY}))
    environ = {"ORCHARD_CONFIG_DIR": str(tmp_path), "ORCHARD_ENDPOINT": given}
    if same:
        assert load_profile(environ=environ).api_key == KEY
    else:
        with pytest.raises(ConfigurationError, match="another endpoint"):
            load_profile(environ=environ)
