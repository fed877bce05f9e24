"""What `orchard up` prints can be typed as it stands."""

import shutil
from pathlib import Path

import pytest

from services.local.supervisor.report import _command


def test_programs_off_the_path_are_named_by_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which(_command("python")) or Path(_command("python")).is_file()
    other = tmp_path / "elsewhere" / "grpcurl"
    other.parent.mkdir()
    other.touch()
    assert _command("grpcurl", other) == str(other)
    assert _command("no-such-program") == "no-such-program"


def test_programs_on_the_path_are_named_by_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "orchard"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _command("orchard") == "orchard"
