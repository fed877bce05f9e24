"""Archives written by the standard library and by GNU tar, cut into pieces at random, must be read right."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.exec_agent.files.archive.headers import Entry, Kind
from services.exec_agent.files.archive.numbers import ArchiveError
from services.exec_agent.files.archive.parser import Data, End, TarParser

_SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
_NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=80)
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


def read(stream: bytes, cuts: list[int] | None = None) -> list[tuple[Entry, bytes]]:
    """Parse a stream fed in pieces; returns entries with their content."""
    parser = TarParser()
    found: list[tuple[Entry, bytearray]] = []
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts or [])})
    is_open = False
    for start, end in itertools.pairwise(edges):
        for event in parser.feed(stream[start:end]):
            if isinstance(event, Data):
                content = found[-1][1]
                content.extend(b"\0" * (event.offset + len(event.view) - len(content)))
                content[event.offset : event.offset + len(event.view)] = event.view
            elif isinstance(event, End):
                entry, content = found[-1]
                content.extend(b"\0" * (entry.size - len(content)))
                assert is_open
                is_open = False
            else:
                assert not is_open
                is_open = True
                found.append((event, bytearray()))
    parser.finish()
    return [(entry, bytes(content)) for entry, content in found]


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(draw(_PATHS))
    content = b""
    info.type = draw(st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]))
    if info.type == tarfile.REGTYPE:
        content = draw(st.binary(max_size=1500))
        info.size = len(content)
    elif info.type != tarfile.DIRTYPE:
        info.linkname = draw(_PATHS)
    info.mode = draw(st.integers(0, 0o7777))
    info.uid, info.gid = draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 2**31 - 1))
    info.mtime = draw(st.integers(0, 2**40))
    info.uname = draw(st.sampled_from(["", "root", "jörg"]))
    return info, content


@_SETTINGS
@given(
    st.lists(members(), max_size=5),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.lists(st.integers(0, 1 << 20), max_size=8),
)
def test_what_tarfile_writes(entries: list[tuple[tarfile.TarInfo, bytes]], form: int, cuts: list[int]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    found = read(buffer.getvalue(), cuts)
    assert len(found) == len(entries)
    for (entry, content), (info, expected) in zip(found, entries, strict=True):
        assert entry.name.rstrip(b"/") == info.name.encode().rstrip(b"/")
        assert content == expected
        assert entry.link == info.linkname.encode()
        assert (entry.mode, entry.uid, entry.gid) == (info.mode, info.uid, info.gid)
        assert entry.mtime_ns == int(info.mtime) * 10**9
        assert entry.user == info.uname.encode()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / ("long " * 40)).write_text("long name")
    deep = folder / "/".join(["deep" * 10] * 8)
    deep.mkdir(parents=True)
    (deep / "file").write_text("deep")
    (folder / "link").symlink_to("/".join(["target" * 10] * 5))
    with (folder / "sparse").open("wb") as file:
        for number in range(30):
            file.seek(number * 200_000)
            file.write(b"data %d" % number)
        file.truncate(7_000_000)
    with (folder / "only a hole").open("wb") as file:
        file.truncate(3_000_000)
    (folder / "plain").write_bytes(bytes(range(256)) * 100)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=pax"],
        ["--format=gnu", "--sparse"],
        ["--format=pax", "--sparse", "--sparse-version=0.0"],
        ["--format=pax", "--sparse", "--sparse-version=0.1"],
        ["--format=pax", "--sparse", "--sparse-version=1.0"],
        ["--format=gnu", "--label=volume"],
    ],
    ids=" ".join,
)
def test_what_gnu_tar_writes(tree: Path, options: list[str]) -> None:
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    done = subprocess.run(["tar", "-C", tree, *options, "-cf", "-", "."], capture_output=True, check=True, timeout=60)
    found = {entry.name: (entry, content) for entry, content in read(done.stdout, [700, 5000, 100_000])}
    if "--sparse" in options:
        assert len(done.stdout) < 1_000_000
    for path in tree.rglob("*"):
        name = f"./{path.relative_to(tree)}".encode()
        if path.is_dir():
            assert found[name + b"/"][0].kind is Kind.DIRECTORY
            continue
        entry, content = found[name]
        if path.is_symlink():
            assert (entry.kind, entry.link) == (Kind.SYMLINK, str(path.readlink()).encode())
        else:
            assert entry.size == path.stat().st_size
            assert content == path.read_bytes()
            if "--format=pax" in options:
                assert entry.mtime_ns == path.stat().st_mtime_ns


def _archive(*names: str, form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 700
            archive.addfile(info, io.BytesIO(b"x" * 700))
    return buffer.getvalue()


def test_every_cut_is_noticed() -> None:
    whole = _archive("a", "b" * 200)
    end = len(read(whole)) and whole.rindex(b"x") + 1
    padded = end + -end % 512
    for cut in [*range(0, padded + 1, 97), padded, padded + 511]:
        with pytest.raises(ArchiveError) as caught:
            read(whole[:cut])
        assert caught.value.reason == "ARCHIVE_TRUNCATED"
    # One block of zeros is enough, and what follows the end does not matter.
    assert len(read(whole[: padded + 512])) == 2
    assert len(read(whole + b"rubbish")) == 2


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"\x1f\x8b" + b"x" * 600, "compressed"),
        (b"x" * 512, "no tar header at byte 0"),
        (_archive("a")[:1536] + b"y" * 512, "no tar header at byte 1536"),
        (_archive("a").replace(b"a\0\0", b"b\0\0", 1), "checksum"),
    ],
)
def test_broken_streams(stream: bytes, message: str) -> None:
    with pytest.raises(ArchiveError, match=message) as caught:
        read(stream)
    assert caught.value.reason == "ARCHIVE_MALFORMED"


def test_checksums_of_signed_bytes_are_taken() -> None:
    name = "\N{LATIN SMALL LETTER E WITH ACUTE}"
    info = tarfile.TarInfo(name)
    block = info.tobuf(tarfile.GNU_FORMAT, "latin-1")
    blanked = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blanked)
    assert signed != sum(blanked)
    old = block[:148] + b"%06o\0 " % signed + block[156:]
    ((entry, content),) = read(old + bytes(1024))
    assert (entry.name, content) == (name.encode("latin-1"), b"")


def _with_pax(records: dict[str, str], size: int = 0) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("f")
        info.pax_headers = records
        info.size = size
        archive.addfile(info, io.BytesIO(b"z" * size))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"size": "-5"}, "no number"),
        ({"size": "9" * 19}, "no number"),
        ({"mtime": "yesterday"}, "no time"),
        ({"GNU.sparse.size": "100", "GNU.sparse.map": "0,10,5,10"}, "out of order"),
        ({"GNU.sparse.size": "100", "GNU.sparse.map": "0,10,95,10"}, "does not match"),
        ({"GNU.sparse.size": "100", "GNU.sparse.map": "0,7"}, "does not match"),
        ({"GNU.sparse.size": "100", "GNU.sparse.map": "0,x"}, "map is broken"),
        ({"GNU.sparse.major": "1"}, "without GNU.sparse.realsize"),
        ({"GNU.sparse.major": "1", "GNU.sparse.realsize": "5"}, "map has something other than numbers|cut short"),
    ],
)
def test_lies_in_pax_headers(records: dict[str, str], message: str) -> None:
    with pytest.raises(ArchiveError, match=message):
        read(_with_pax(records, size=512))


def test_a_header_that_would_fill_memory_is_refused() -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type = tarfile.GNUTYPE_LONGNAME
    info.size = 1 << 40
    with pytest.raises(ArchiveError, match="at most 1 MiB"):
        TarParser().feed(info.tobuf(tarfile.GNU_FORMAT))


def test_oldest_archives_write_directories_as_names_with_a_slash() -> None:
    info = tarfile.TarInfo("d/")
    info.type = tarfile.AREGTYPE
    (found,) = read(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 1024)
    assert found[0].kind is Kind.DIRECTORY


def test_ustar_prefix_and_times_before_1970() -> None:
    info = tarfile.TarInfo("/".join(["d" * 60] * 3) + "/f")
    (found,) = read(info.tobuf(tarfile.USTAR_FORMAT) + b"\0" * 1024)
    assert found[0].name == info.name.encode()
    info.mtime = -5
    (found,) = read(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024)
    assert found[0].mtime_ns == -5 * 10**9
