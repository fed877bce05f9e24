import json
from pathlib import Path

import pytest

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.profile import Profile, find_profile, profile_path, write_profile


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert profile_path({}) == Path("/home/u/.config/orchard/profile.json")
    assert profile_path({"XDG_CONFIG_HOME": "relative"}) == Path("/home/u/.config/orchard/profile.json")
    assert profile_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/orchard/profile.json")
    assert profile_path({"XDG_CONFIG_HOME": "/x", "ORCHARD_CONFIG_DIR": "/c"}) == Path("/c/profile.json")


def test_it_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "config" / "profile.json"
    assert write_profile(path, Profile("127.0.0.1:1", "key")) == ""
    assert json.loads(path.read_text()) == {"endpoint": "127.0.0.1:1", "api_key": "key"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert names(path.parent) == {"profile.json"}


def test_another_endpoint_of_ours_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, Profile("127.0.0.1:1", "key"))
    assert write_profile(path, Profile("127.0.0.1:2", "key")) == ""
    assert json.loads(path.read_text())["endpoint"] == "127.0.0.1:2"
    assert names(tmp_path) == {"profile.json"}


@pytest.mark.parametrize("old", ['{"endpoint": "cluster:443", "api_key": "other"}', "not json", '["a"]'])
def test_what_is_not_ours_is_kept(tmp_path: Path, old: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(old)
    note = write_profile(path, Profile("127.0.0.1:1", "key"))
    assert str(tmp_path / "profile.json.bak") in note
    assert (tmp_path / "profile.json.bak").read_text() == old
    assert (tmp_path / "profile.json.bak").stat().st_mode & 0o777 == 0o600


def test_kept_ones_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for endpoint in ("a:1", "b:1", "a:1"):
        path.write_text(Profile(endpoint, "other").as_json())
        write_profile(path, Profile("127.0.0.1:1", "key"))
    assert names(tmp_path) == {"profile.json", "profile.json.bak", "profile.json.bak.2"}
    assert json.loads((tmp_path / "profile.json.bak").read_text())["endpoint"] == "a:1"
    assert json.loads((tmp_path / "profile.json.bak.2").read_text())["endpoint"] == "b:1"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="ORCHARD_CONFIG_DIR"):
        write_profile(tmp_path / "file" / "profile.json", Profile("a:1", "key"))


def test_the_environment_comes_before_the_profile(tmp_path: Path) -> None:
    environment = {"ORCHARD_CONFIG_DIR": str(tmp_path)}
    with pytest.raises(PlatformError, match="orchard up"):
        find_profile(environment)
    write_profile(tmp_path / "profile.json", Profile("a:1", "key"))
    assert find_profile(environment) == Profile("a:1", "key")
    assert find_profile({**environment, "ORCHARD_ENDPOINT": "b:2"}) == Profile("b:2", "key")
    assert find_profile({"ORCHARD_ENDPOINT": "b:2", "ORCHARD_API_KEY": "k"}) == Profile("b:2", "k")
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(PlatformError, match="damaged"):
        find_profile(environment)
