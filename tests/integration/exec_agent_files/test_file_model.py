"""FileService through a real agent process against the same calls of Python's os on another directory.

A state machine makes calls in random order; after each both directories must be the same, and a call that fails must
fail for the reason that the system gave the model. 600 calls by default, always the same; `make chaos` makes it 12,000.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH112, PTH114, PTH115, PTH116, PTH118, PTH119, PTH120, PTH123
# ruff: noqa: PTH208, PTH211 (names are bytes)
from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from orchard.exec.v1 import file_pb2
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.errors import STATUS_DETAILS_KEY
from services.common.tokens import AGENT_TOKEN_KEY, Signer
from tests.integration.exec_agent_files.conftest import AgentProcess
from tests.integration.exec_agent_files.serving import SANDBOX_ID as S
from tests.integration.exec_agent_files.serving import UID
from tests.support.patch_cases import read_tree

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
SETTINGS = settings(
    max_examples=20 * ROUNDS,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# What the agent says where the system gives the model this error.
REASONS = {
    errno.ENOENT: "FILE_NOT_FOUND",
    errno.EISDIR: "IS_A_DIRECTORY",
    errno.ENOTDIR: "NOT_A_DIRECTORY",
    errno.ENOTEMPTY: "DIRECTORY_NOT_EMPTY",
    errno.EEXIST: "FILE_EXISTS",
    errno.ELOOP: "LINK_LOOP",
    errno.ENAMETOOLONG: "PATH_INVALID",
    errno.EINVAL: "INVALID_ARGUMENT",
}
_NAMES = st.sampled_from(["a", "b", "d", "new\nline", "名", " sp ace ", "-rf", "link", "loop", "*", "é" * 127])
_PATHS = st.one_of(
    _NAMES,
    st.lists(_NAMES, min_size=2, max_size=3).map("/".join),
    st.sampled_from(["d/./a", "d//b", "d/../a", "x" * 256, "d/" + "x" * 256]),
)
_DATA = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"\r\n\0\xff", b"x" * 300_000]))
_MODES = st.sampled_from([0, 0o600, 0o755, 0o4711])


class Model:
    """What the calls should do, by os, below a directory of its own."""

    def __init__(self, top: Path) -> None:
        self.top = os.fsencode(top)

    def path(self, path: str) -> bytes:
        return os.path.join(self.top, path.encode())

    def write(self, path: str, data: bytes, mode: int, *, parents: bool, exclusive: bool) -> int:
        place = self.path(path)
        made = self._make_parents(os.path.dirname(place)) if parents else []
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC), 0o644)
        except OSError:
            for directory in reversed(made):
                os.rmdir(directory)
            raise
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if mode:
                os.fchmod(descriptor, mode)
        return len(data)

    def _make_parents(self, place: bytes) -> list[bytes]:
        """The directories that had to be made, topmost first."""
        if os.path.isdir(place):
            return []
        if os.path.basename(place) in {b"", b"."}:
            return self._make_parents(os.path.dirname(place))
        made = self._make_parents(os.path.dirname(place))
        if os.path.isdir(place):
            return made  # it is "..", of what was just made
        try:
            os.mkdir(place, 0o755)
        except FileExistsError:
            self._remove_made(made)
            # What is in the way is no directory; the system says why when it is entered.
            os.close(os.open(place + b"/.", os.O_RDONLY))
            raise
        except OSError:
            self._remove_made(made)
            raise
        return [*made, place]

    def _remove_made(self, made: list[bytes]) -> None:
        for directory in reversed(made):
            os.rmdir(directory)

    def read(self, path: str, offset: int, length: int) -> bytes:
        with open(self.path(path), "rb") as file:
            file.seek(offset)
            return file.read(length or -1)

    def stat(self, path: str, *, follow: bool) -> tuple[Any, ...]:
        return _described(self.path(path), path.encode(), follow=follow)

    def list(self, path: str, *, recursive: bool) -> list[tuple[Any, ...]]:
        return list(self._below(self.path(path), b"", recursive=recursive))

    def _below(self, place: bytes, prefix: bytes, *, recursive: bool) -> Iterator[tuple[Any, ...]]:
        for name in sorted(os.listdir(place)):
            entry = os.path.join(place, name)
            yield _described(entry, prefix + name, follow=False)
            if recursive and os.path.isdir(entry) and not os.path.islink(entry):
                yield from self._below(entry, prefix + name + b"/", recursive=True)

    def make_directory(self, path: str, mode: int, *, parents: bool) -> None:
        place = self.path(path)
        if parents:
            if os.path.isdir(place):
                return
            self._make_parents(os.path.dirname(place))
            if os.path.isdir(place):
                return  # it was there, but the way to it through "..", of what was just made, was not
        os.mkdir(place)
        os.chmod(place, mode or 0o755)

    def move(self, source: str, target: str, *, overwrite: bool) -> None:
        os.lstat(self.path(source))
        if not overwrite:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(self.path(target))
                raise FileExistsError(errno.EEXIST, "exists")
        os.rename(self.path(source), self.path(target))

    def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        place = self.path(path)
        try:
            if os.path.islink(place) or not os.path.isdir(place):
                os.unlink(place)
            elif recursive:
                shutil.rmtree(place)
            else:
                os.rmdir(place)
        except FileNotFoundError:
            if not missing_ok:
                raise


def _described(place: bytes, path: bytes, *, follow: bool) -> tuple[Any, ...]:
    status = os.stat(place) if follow else os.lstat(place)
    is_link, is_directory = (status.st_mode & 0o170000) == 0o120000, (status.st_mode & 0o170000) == 0o040000
    kind = file_pb2.FILE_TYPE_REGULAR
    if is_link or is_directory:
        kind = file_pb2.FILE_TYPE_SYMLINK if is_link else file_pb2.FILE_TYPE_DIRECTORY
    target = os.readlink(place).decode("utf-8", "replace") if is_link else ""
    return path, kind, 0 if is_directory else status.st_size, status.st_mode & 0o7777, target


def _shown(file: file_pb2.FileInfo) -> tuple[Any, ...]:
    size = 0 if file.type == file_pb2.FILE_TYPE_DIRECTORY else file.size
    return file.raw_path or file.path.encode(), file.type, size, file.mode, file.link_target


class Files(RuleBasedStateMachine):
    """The calls. `stub` and `place` are given by the test."""

    stub: FileServiceStub
    place: Path
    metadata: tuple[tuple[str, str], ...]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=self.place)
        self.top = Path(self.folder.name) / "agent"
        self.top.mkdir()
        os.mkdir(self.top.parent / "model")
        self.model = Model(self.top.parent / "model")
        self.count = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    def there(self, path: str) -> str:
        return f"{self.top}/{path}"

    def same(self, call: Callable[[], Any], model: Callable[[], Any]) -> None:
        """The two give the same or fail alike, and leave the same behind."""
        wanted: Any
        try:
            wanted = model()
        except OSError as error:
            wanted = REASONS[error.errno or 0]
        try:
            found = call()
        except grpc.RpcError as error:
            found = _reason(error)
        assert found == wanted
        assert read_tree(self.top) == read_tree(Path(os.fsdecode(self.model.top)))

    def call(self, name: str, request: Any) -> Any:
        return getattr(self.stub, name)(request, metadata=self.metadata, timeout=60)

    @rule(path=_PATHS, data=_DATA, mode=_MODES, parents=st.booleans(), exclusive=st.booleans())
    def write(self, path: str, data: bytes, mode: int, parents: bool, exclusive: bool) -> None:
        start = pb.WriteFileStart(path=self.there(path), mode=mode, make_parents=parents, exclusive=exclusive)
        messages = [pb.WriteFileRequest(sandbox_id=S, start=start), pb.WriteFileRequest(data=data)]
        messages.append(pb.WriteFileRequest(end=True))
        self.same(
            lambda: self.call("WriteFile", iter(messages)).size,
            lambda: self.model.write(path, data, mode, parents=parents, exclusive=exclusive),
        )

    @rule(path=_PATHS, offset=st.sampled_from([0, 1, 3, 1 << 18, 1 << 40]), length=st.sampled_from([0, 1, 1 << 18]))
    def read(self, path: str, offset: int, length: int) -> None:
        request = pb.ReadFileRequest(sandbox_id=S, path=self.there(path), offset=offset, length=length)
        self.same(
            lambda: b"".join(message.data for message in self.call("ReadFile", request)),
            lambda: self.model.read(path, offset, length),
        )

    @rule(path=_PATHS, follow=st.booleans())
    def stat(self, path: str, follow: bool) -> None:
        request = pb.StatRequest(sandbox_id=S, path=self.there(path), follow=follow)

        def found() -> tuple[Any, ...]:
            answer = _shown(self.call("Stat", request).file)
            assert answer[0] == self.there(path).encode()
            return (path.encode(), *answer[1:])

        self.same(found, lambda: self.model.stat(path, follow=follow))

    @rule(path=st.one_of(st.just("."), _PATHS), recursive=st.booleans(), size=st.integers(1, 4))
    def list_directory(self, path: str, recursive: bool, size: int) -> None:
        def found() -> list[tuple[Any, ...]]:
            files: list[tuple[Any, ...]] = []
            token = ""
            while True:
                request = pb.ListDirectoryRequest(
                    sandbox_id=S, path=self.there(path), recursive=recursive, page_size=size, page_token=token
                )
                page = self.call("ListDirectory", request)
                assert len(page.files) <= size
                files += map(_shown, page.files)
                token = page.next_page_token
                if not token:
                    return files

        self.same(found, lambda: self.model.list(path, recursive=recursive))

    @rule(path=_PATHS, mode=_MODES, parents=st.booleans())
    def make_directory(self, path: str, mode: int, parents: bool) -> None:
        request = pb.MakeDirectoryRequest(sandbox_id=S, path=self.there(path), mode=mode, parents=parents)
        self.same(
            lambda: self.call("MakeDirectory", request) and None,
            lambda: self.model.make_directory(path, mode, parents=parents),
        )

    @rule(source=_PATHS, to=_PATHS, overwrite=st.booleans())
    def move(self, source: str, to: str, overwrite: bool) -> None:
        request = pb.MoveRequest(
            sandbox_id=S, source_path=self.there(source), target_path=self.there(to), overwrite=overwrite
        )
        self.same(
            lambda: self.call("Move", request) and None,
            lambda: self.model.move(source, to, overwrite=overwrite),
        )

    @rule(path=_PATHS, recursive=st.booleans(), missing_ok=st.booleans())
    def remove(self, path: str, recursive: bool, missing_ok: bool) -> None:
        request = pb.RemoveRequest(sandbox_id=S, path=self.there(path), recursive=recursive, missing_ok=missing_ok)
        self.same(
            lambda: self.call("Remove", request) and None,
            lambda: self.model.remove(path, recursive=recursive, missing_ok=missing_ok),
        )

    @rule(
        name=st.sampled_from([b"link", b"loop", b"d/link", b"\xff\xfe", b"d\xe9/f"]),
        goal=st.sampled_from([b"a", b"d", b"../d", b"loop", b"no\xffwhere", b"."]),
    )
    def upload(self, name: bytes, goal: bytes) -> None:
        """A link and a file beside it, of names that no request could say, into a directory that is new."""
        self.count += 1
        packed = io.BytesIO()
        beside = os.fsdecode(name) + ".file"
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            link = tarfile.TarInfo(os.fsdecode(name))
            link.type, link.linkname = tarfile.SYMTYPE, os.fsdecode(goal)
            archive.addfile(link)
            file = tarfile.TarInfo(beside)
            file.size, file.mode = 3, 0o750
            archive.addfile(file, io.BytesIO(b"abc"))
        path = f"up{self.count}"
        start = pb.UploadArchiveStart(path=self.there(path))
        messages = [pb.UploadArchiveRequest(sandbox_id=S, start=start)]
        messages += [pb.UploadArchiveRequest(data=packed.getvalue()), pb.UploadArchiveRequest(end=True)]

        def wanted() -> tuple[int, int]:
            place = os.path.join(self.model.path(path), name)
            os.makedirs(os.path.dirname(place))
            os.symlink(goal, place)
            with open(place + b".file", "wb") as made:
                made.write(b"abc")
            os.chmod(place + b".file", 0o750)
            return 2, 3

        def found() -> tuple[int, int]:
            answer = self.call("UploadArchive", iter(messages))
            return answer.entries, answer.size

        self.same(found, wanted)
        if name in {b"link", b"loop"} and not os.path.lexists(self.model.path(name.decode())):
            # Where the other calls look.
            self.move(f"{path}/{name.decode()}", name.decode(), overwrite=False)

    @rule()
    def download(self) -> None:
        """All that is there, unpacked by Python's own tarfile."""
        request = pb.DownloadArchiveRequest(sandbox_id=S, path=str(self.top))
        data = b"".join(message.data for message in self.call("DownloadArchive", request))
        with tempfile.TemporaryDirectory(dir=self.place) as folder, tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extraction_filter = lambda member, _path: member  # newer Pythons would refuse links that lead out
            archive.extractall(folder)
            assert read_tree(Path(folder)) == read_tree(Path(os.fsdecode(self.model.top)))


def _reason(error: Any) -> str:
    info = error_details_pb2.ErrorInfo()
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[STATUS_DETAILS_KEY])
    assert any(detail.Unpack(info) for detail in status.details), error
    return info.reason


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_the_agent_does_what_os_does(agent: AgentProcess, key: Ed25519PrivateKey, work: Path) -> None:
    before = agent.descriptors()
    with grpc.insecure_channel(agent.address) as channel:

        class Here(Files):
            stub = FileServiceStub(channel)
            place = work
            metadata = ((AGENT_TOKEN_KEY, Signer(key).agent_token(UID)),)

        seed(SEED)(Here)
        run_state_machine_as_test(Here, settings=SETTINGS)  # type: ignore[no-untyped-call]
        assert list(work.iterdir()) == []
        # Its own end of this channel, and no more.
        assert agent.descriptors() <= before + 1
