import json
from pathlib import Path

import pytest
from orchard import load_profile

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.profile import write_profile


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "config" / "profile.json"
    assert write_profile(path, endpoint="127.0.0.1:1", api_key="key") == ""
    assert json.loads(path.read_text()) == {"endpoint": "127.0.0.1:1", "api_key": "key"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert names(path.parent) == {"profile.json"}
    found = load_profile(environ={"ORCHARD_CONFIG_DIR": str(path.parent)})
    assert (found.endpoint, found.api_key) == ("127.0.0.1:1", "key")


def test_another_endpoint_of_ours_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, endpoint="127.0.0.1:1", api_key="key")
    assert write_profile(path, endpoint="127.0.0.1:2", api_key="key") == ""
    assert json.loads(path.read_text())["endpoint"] == "127.0.0.1:2"
    assert names(tmp_path) == {"profile.json"}


@pytest.mark.parametrize("old", ['{"endpoint": "cluster:443", "api_key": "other"}', "not json", '["a"]'])
def test_what_is_not_ours_is_kept(tmp_path: Path, old: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(old)
    note = write_profile(path, endpoint="127.0.0.1:1", api_key="key")
    assert str(tmp_path / "profile.json.bak") in note
    assert (tmp_path / "profile.json.bak").read_text() == old
    assert (tmp_path / "profile.json.bak").stat().st_mode & 0o777 == 0o600


def test_kept_ones_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for endpoint in ("a:1", "b:1", "a:1"):
        path.write_text(json.dumps({"endpoint": endpoint, "api_key": "other"}))
        write_profile(path, endpoint="127.0.0.1:1", api_key="key")
    assert names(tmp_path) == {"profile.json", "profile.json.bak", "profile.json.bak.2"}
    assert json.loads((tmp_path / "profile.json.bak").read_text())["endpoint"] == "a:1"
    assert json.loads((tmp_path / "profile.json.bak.2").read_text())["endpoint"] == "b:1"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="ORCHARD_CONFIG_DIR"):
        write_profile(tmp_path / "file" / "profile.json", endpoint="a:1", api_key="key")
