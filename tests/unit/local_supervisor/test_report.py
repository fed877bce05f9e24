"""What `orchard up` prints can be typed as it stands."""

import sys
from pathlib import Path

import pytest

from services.local.supervisor.report import _command


def test_programs_off_the_path_are_named_by_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    other = tmp_path / "elsewhere" / "grpcurl"
    other.parent.mkdir()
    other.touch()
    assert _command("grpcurl", other) == str(other)
    assert _command("no-such-program") == "no-such-program"


def test_another_python_on_the_path_is_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    ours = Path(sys.executable).with_name("python")
    assert (Path.cwd() / _command("python")) == ours


def test_our_own_on_the_path_are_named_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert _command("python") == "python"
