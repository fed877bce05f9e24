"""What scripts/build-payload makes."""

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.payload import ROOT

ARCH = os.uname().machine
LIMIT_BYTES = 40 << 20


@pytest.fixture(scope="module")
def archive(payload: Path) -> Path:
    subprocess.run([sys.executable, ROOT / "scripts/build-payload"], check=True)
    return ROOT / f"build/payload-{ARCH}.tar.gz"


def test_the_same_inputs_give_the_same_bytes(payload: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts/build-payload", "--build", tmp_path, "--no-archive"], check=True)
    one, other = digests(payload), digests(tmp_path / "payload" / ARCH)
    assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == set()


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_archive_is_small_and_is_the_folder(archive: Path, payload: Path) -> None:
    assert archive.stat().st_size <= LIMIT_BYTES
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.isfile()]
        assert {(m.uid, m.gid, m.mtime, m.uname, m.gname) for m in tar.getmembers()} == {(0, 0, 0, "", "")}
    names = {str(path.relative_to(payload)) for path in payload.rglob("*") if path.is_file()}
    assert {member.name.removeprefix("./") for member in members} == names


def test_it_holds_no_link_and_no_path_of_the_machine_that_built_it(payload: Path) -> None:
    offenders = []
    for path in payload.rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            content = path.read_bytes()
            offenders += [path for own in (ROOT, Path.home() / ".cache") if os.fsencode(own) + b"/" in content]
    assert offenders == []


def test_every_bytecode_file_is_taken_without_looking_at_its_source(payload: Path) -> None:
    sources = set(payload.rglob("*.py"))
    compiled = set(payload.rglob("*.pyc"))
    assert len(sources) == len(compiled)
    # PEP 552: flags with the lowest bit for a hash, and without the next for not checking it.
    assert {path.read_bytes()[4:8] for path in compiled} == {b"\x01\0\0\0"}


def test_it_holds_nothing_that_the_agent_never_imports(payload: Path) -> None:
    top = {path.name for path in (payload / "runtime/app").iterdir()}
    assert {"services", "orchard", "grpc", "google", "cryptography", "uvloop"} <= top
    assert not top & {"pip", "setuptools", "redis", "sqlalchemy", "psycopg", "kubernetes_asyncio", "pydantic", "click"}
    services = {path.name for path in (payload / "runtime/app/services").iterdir()}
    assert services == {"__init__.py", "__pycache__", "common", "exec_agent"}
    assert not (payload / "runtime/app/orchard/_client").exists()
