"""Uploads that outlive their streams: what came of a file is kept for a while, and another stream goes on with it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from services.common.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from services.exec_agent.files.writing import FileWriter

_KEPT_SECONDS: Final = 600.0
_MOST_BROKEN: Final = 16  # each has a descriptor, and space on the disk
_MOST_ENDED: Final = 1_000
_PATIENCE_SECONDS: Final = 60.0  # for the batch that the stream before is writing


class _Upload:
    """One file on its way. Streams may follow each other; only the last one writes."""

    def __init__(self, upload_id: str, spec: Hashable, writer: FileWriter) -> None:
        self.id = upload_id
        self.spec = spec
        self.writer = writer
        self.stream: UploadStream | None = None
        self.busy = False
        self.opened = False
        self.result: int | None = None
        self.kept_until = 0.0

    @property
    def received(self) -> int:
        """Bytes that need not come again."""
        return self.writer.size if self.result is None else self.result


class Uploads:
    """The uploads of a sandbox by the ids that their clients chose. Calls come from worker threads."""

    def __init__(
        self,
        *,
        kept_seconds: float = _KEPT_SECONDS,
        most_broken: int = _MOST_BROKEN,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._kept_seconds = kept_seconds
        self._most_broken = most_broken
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()

    def received(self, upload_id: str) -> int:
        """How many bytes of an upload are there; 0 of one that is not known (any more)."""
        with self._changed:
            upload = self._uploads.get(upload_id)
            return upload.received if upload is not None else 0

    def take(self, stream: UploadStream) -> _Upload:
        """Begin a stream's upload, or take it over from the stream before.

        Raises:
            InvalidArgumentError: bytes before the offset are missing (UPLOAD_INCOMPLETE, with metadata received).
            AlreadyExistsError: the id is that of something else (UPLOAD_ID_REUSED).
            UnavailableError: the stream before is stuck in a write (UPLOAD_BUSY).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_busy(stream.id), self._patience_seconds):
                raise UnavailableError("the stream before is stuck in a write", reason="UPLOAD_BUSY")
            upload = self._uploads.get(stream.id) or _Upload(stream.id, stream.spec, stream.make())
            if upload.spec != stream.spec:
                raise AlreadyExistsError(
                    f"upload {stream.id!r} writes something else; take a new id", reason="UPLOAD_ID_REUSED"
                )
            if stream.offset > upload.received:
                raise InvalidArgumentError.of(
                    "start.offset",
                    f"is {stream.offset}, but only {upload.received} bytes are there; go on from there",
                    reason="UPLOAD_INCOMPLETE",
                    received=str(upload.received),
                )
            upload.stream = stream
            self._uploads[stream.id] = upload
            return upload

    def _is_busy(self, upload_id: str) -> bool:
        upload = self._uploads.get(upload_id)
        return upload is not None and upload.busy

    @contextmanager
    def step(self, upload: _Upload, stream: UploadStream) -> Iterator[None]:
        """Around what a stream does to its file. Where that fails the upload is over: half a batch may be in the file.

        Raises:
            UnavailableError: another stream has taken the upload over (UPLOAD_TAKEN_OVER).
        """
        with self._changed:
            if upload.stream is not stream:
                raise UnavailableError("another stream goes on with this upload", reason="UPLOAD_TAKEN_OVER")
            upload.busy = True
        try:
            yield
        except BaseException:
            upload.writer.abort()
            with self._changed:
                self._uploads.pop(upload.id, None)
                upload.stream = None
            raise
        finally:
            with self._changed:
                upload.busy = False
                self._changed.notify_all()

    def complete(self, upload: _Upload, size: int) -> None:
        """An upload is whole; its size is kept for repeats."""
        with self._changed:
            upload.result = size
            self._uploads.move_to_end(upload.id)
            ended = [name for name, one in self._uploads.items() if one.result is not None]
            for name in ended[:-_MOST_ENDED]:
                del self._uploads[name]

    def leave(self, upload: _Upload, stream: UploadStream) -> None:
        """A stream ended early: what came of it waits for the next one."""
        with self._changed:
            if upload.stream is not stream or upload.result is not None:
                return
            upload.stream = None
            upload.kept_until = time.monotonic() + self._kept_seconds
            self._uploads.move_to_end(upload.id)
        self.expire()

    @property
    def waiting(self) -> bool:
        """Whether one waits for its next stream."""
        with self._changed:
            return any(_waits(upload) for upload in self._uploads.values())

    def expire(self) -> None:
        """Drop those that waited too long, and the oldest of too many."""
        with self._changed:
            waiting = [name for name, upload in self._uploads.items() if _waits(upload)]
            many, now = len(waiting) - self._most_broken, time.monotonic()
            over = [name for place, name in enumerate(waiting) if place < many or self._uploads[name].kept_until <= now]
            dropped = [self._uploads.pop(name) for name in over]
        for upload in dropped:
            upload.writer.abort()


def _waits(upload: _Upload) -> bool:
    return upload.result is None and upload.stream is None and not upload.busy


class UploadStream:
    """One stream of an upload; see `workers.Sink`.

    Args:
        uploads: those of the sandbox.
        upload_id: the client's.
        offset: of the stream's first byte in the file.
        spec: where and how it is written; the same each time.
        make: makes the writer of a new upload.
    """

    def __init__(
        self, uploads: Uploads, upload_id: str, offset: int, spec: Hashable, make: Callable[[], FileWriter]
    ) -> None:
        self.id = upload_id
        self.offset = offset
        self.spec = spec
        self.make = make
        self._uploads = uploads
        self._taken: _Upload | None = None
        self._skip = 0

    @property
    def _upload(self) -> _Upload:
        assert self._taken is not None  # noqa: S101 (open comes first)
        return self._taken

    def open(self) -> None:
        """Take the upload, and the first time find its place."""
        self._taken = upload = self._uploads.take(self)
        self._skip = upload.received - self.offset
        with self._step():
            if not upload.opened:
                upload.writer.open()
                upload.opened = True

    def write(self, pieces: Sequence[bytes]) -> None:
        """Append what is not there yet."""
        new = [piece for piece in map(self._unskipped, pieces) if piece]
        if not new:
            return
        if self._upload.result is not None:
            raise InvalidArgumentError.of("data", "goes on behind the end of an upload that is complete")
        with self._step():
            self._upload.writer.write(new)

    def _unskipped(self, piece: bytes) -> bytes:
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        return piece[skipped:] if skipped else piece

    def finish(self) -> int:
        """Let the file appear, the first time; returns its size."""
        with self._step():
            if self._upload.result is None:
                self._uploads.complete(self._upload, self._upload.writer.finish())
            return self._upload.received

    def abort(self) -> None:
        """See Uploads.leave."""
        if self._taken is not None:
            self._uploads.leave(self._taken, self)

    def _step(self) -> AbstractContextManager[None]:
        return self._uploads.step(self._upload, self)
