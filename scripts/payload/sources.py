"""Where CPython, the shared libraries and the packages come from: this machine, or Debian and PyPI for another one."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from payload.elf import dynamic_section, machine_of

ROOT = Path(__file__).resolve().parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
TRIPLET = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
MACHINE = {"x86_64": 62, "aarch64": 183}  # e_machine in an ELF header
# What pyproject.toml says that the agent needs; what these need themselves is found.
DISTRIBUTIONS = (
    *("grpcio", "grpcio-health-checking", "grpcio-status"),
    *("googleapis-common-protos", "cryptography", "uvloop"),
)
NOT_OF_DYNLOAD = (
    *("_test*", "_ctypes_test*", "_xx*", "xx*", "_tkinter*", "_curses*", "_sqlite3*", "_dbm*", "_gdbm*", "readline*"),
    *("nis*", "ossaudiodev*", "audioop*", "_crypt.*", "_codecs_[cjkth]*", "_lsprof*"),
)


@dataclass(frozen=True)
class Sources:
    """Where everything comes from."""

    program: Path
    stdlib: Path
    dynload: Path
    packages: Path
    library: Callable[[str], Path]
    """Finds a shared library by the name that others need it by."""
    documents: Path
    """Debian's /usr/share/doc; need not exist."""


def sources_of_this_machine(arch: str) -> Sources:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    known: dict[str, Path] = {}
    folders = [Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")]
    for name, path in re.findall(r"^\t(\S+) .* => (\S+)$", listed, re.MULTILINE):
        if machine_of(Path(path)) == MACHINE[arch]:
            known.setdefault(name, Path(path))

    def library(name: str) -> Path:
        found = [known[name]] if name in known else [f / name for f in folders if (f / name).is_file()]
        return found[0] if found else missing(f"the shared library {name} is not on this machine")

    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    stdlib = Path(os.__file__).resolve().parent
    packages = Path(sysconfig.get_path("platlib"))
    return Sources(base, stdlib, stdlib / "lib-dynload", packages, library, Path("/usr/share/doc"))


def sources_of_debian(arch: str, work: Path) -> Sources:
    """The packages of Debian that this machine's own came from, of its release's archive, and those of the lock."""
    ours = sources_of_this_machine(platform.machine())
    needed = [ours.program, ours.stdlib / "os.py", *needed_libraries([ours.program, *dynload_of(ours)], ours).values()]
    needed += [ours.library(name) for name in ("libstdc++.so.6", "libgcc_s.so.1")] + dynload_of(ours)
    names = sorted({debian_owner(path) for path in needed})
    unpacked = work / "debian"
    for archive in download_from_debian(names, DEBIAN[arch], work):
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
    packages = work / "packages"
    install_from_lock(packages, f"{arch}-manylinux_2_28")
    folders = [unpacked / top / TRIPLET[arch] for top in ("lib", "usr/lib")] + [unpacked / "lib"]

    def library(name: str) -> Path:
        found = [folder / name for folder in folders if (folder / name).exists()]
        return found[0] if found else missing(f"the shared library {name} is in none of the packages {names}")

    stdlib = unpacked / f"usr/lib/python{VERSION}"
    program = unpacked / f"usr/bin/python{VERSION}"
    return Sources(program, stdlib, stdlib / "lib-dynload", packages, library, unpacked / "usr/share/doc")


def debian_owner(path: Path) -> str:
    """The installed package that a file belongs to."""
    for known in (path, Path(os.path.realpath(path)), Path(str(path).removeprefix("/usr")), Path(f"/usr{path}")):
        found = subprocess.run(["dpkg", "-S", known], capture_output=True, text=True, check=False).stdout
        if found:
            return found.split(":")[0]
    return missing(f"{path} belongs to no Debian package: another architecture can be built only from Debian's Python")


def download_from_debian(names: list[str], architecture: str, work: Path) -> list[Path]:
    """Through apt, with lists of its own, so that this machine's are not touched."""
    state, archives = work / "apt", work / "archives"
    for folder in (state / "lists/partial", state / "cache/archives/partial", archives):
        folder.mkdir(parents=True)
    (state / "status").touch()
    options = [
        *("-o", f"APT::Architecture={architecture}", "-o", f"APT::Architectures={architecture}"),
        *("-o", f"Dir::State={state}", "-o", f"Dir::State::status={state / 'status'}"),
        *("-o", f"Dir::Cache={state / 'cache'}", "-o", "APT::Sandbox::User=root", "-qq"),
    ]
    subprocess.run(["apt-get", *options, "update"], check=True)
    subprocess.run(["apt-get", *options, "download", *names], check=True, cwd=archives)
    return sorted(archives.glob("*.deb"))


def install_from_lock(target: Path, platform_name: str) -> None:
    """Exactly what requirements.lock names, hashes checked, for another platform."""
    lock = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    names = {normal(name) for name in closure_of_distributions(Path(sysconfig.get_path("platlib")))}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
        chosen.write("".join(b for b in blocks if normal(re.split(r"[=\[ ]", b)[0]) in names))
        chosen.flush()
        subprocess.run(
            [
                *(Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes"),
                *("--only-binary", ":all:", "--python-platform", platform_name, "--python-version", VERSION),
                *("--target", target, "-r", chosen.name),
            ],
            check=True,
        )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(why: str) -> Any:
    sys.exit(f"build-payload: {why}")


def needed_libraries(files: list[Path], sources: Sources) -> dict[str, Path]:
    """Every shared library that these need, directly or not, by the name that it is needed by."""
    found: dict[str, Path] = {}
    todo = list(files)
    while todo:
        for name in dynamic_section(todo.pop())[1]:
            if name not in found:
                found[name] = sources.library(name)
                todo.append(found[name])
    return found


def dynload_of(sources: Sources) -> list[Path]:
    return [path for path in sorted(sources.dynload.glob("*.so")) if not matches(path.name, NOT_OF_DYNLOAD)]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def closure_of_distributions(
    packages: Path, names: Iterable[str] = DISTRIBUTIONS
) -> dict[str, importlib.metadata.Distribution]:
    """Distributions, the agent's unless others are named, and what they need, without extras."""
    installed = {normal(d.name): d for d in importlib.metadata.distributions(path=[str(packages)])}
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = normal(todo.pop())
        if name in found:
            continue
        found[name] = installed.get(name) or missing(f"{name} is not installed in {packages}: run make setup")
        for text in found[name].requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return found
