"""What the command line says of what a user got wrong, or asks of it beyond files and terminals."""

from __future__ import annotations

from pathlib import Path

import pytest
from orchard import Sandbox, SandboxClient

from tests.integration.client.cli import Cli


def test_a_copy_to_standard_output_is_written_there(cli: Cli, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.write_file("/tmp/u1/file", b"\xffbytes")
    # As /dev/stdout is; root would replace that one itself, were it taken for a file.
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    assert cli("cp", f"{sandbox.sandbox_id}:/tmp/u1/file", str(tmp_path / "stdout")) == (0, b"\xffbytes", b"")
    assert (tmp_path / "stdout").is_symlink()


def test_a_local_file_that_is_missing_is_named(cli: Cli, sandbox: Sandbox, tmp_path: Path) -> None:
    code, out, err = cli("cp", str(tmp_path / "none"), f"{sandbox.sandbox_id}:/tmp/u2")
    assert (code, out) == (2, b"")
    assert f"SOURCE: there is no file {str(tmp_path / 'none')!r} here" in " ".join(err.decode().split())


def test_a_copy_without_a_path_goes_to_the_home(cli: Cli, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner").write_text("in")
    (tmp_path / "one.txt").write_text("one")
    for name in ("one.txt", "folder"):
        assert cli("cp", str(tmp_path / name), f"{sandbox.sandbox_id}:") == (0, b"", b"")
    assert sandbox.exec("cat ~/one.txt ~/inner", check=True).output == "onein"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("exec", "--workdir", "/no/such", "SANDBOX", "true"), "cwd"),
        (("exec", "--workdir", "/etc/passwd", "SANDBOX", "true"), "cwd"),
        (("exec", "--workdir", "/" * 5000, "SANDBOX", "true"), "cwd"),
        (("create", "--workdir", "relative"), "working_directory"),
    ],
)
def test_a_working_directory_that_cannot_be_is_told_by_its_option(
    cli: Cli, sandbox: Sandbox, words: tuple[str, ...], field: str
) -> None:
    code, out, err = cli(*(sandbox.sandbox_id if word == "SANDBOX" else word for word in words))
    assert (code, out) == (2 if words[0] == "create" else 125, b"")
    assert err.decode().rstrip().endswith(f"; {field} is --workdir")


def test_waiting_for_one_that_has_ended_says_so(cli: Cli, client: SandboxClient) -> None:
    with client.create() as ended:
        pass
    code, out, err = cli("wait", ended.sandbox_id)
    assert (code, out) == (1, b"")
    assert f"sandbox {ended.sandbox_id} has ended: REQUESTED" in err.decode()
