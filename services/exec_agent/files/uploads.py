"""Uploads that outlive their streams: what came of a file is kept for a while, and another stream goes on with it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from services.common.errors import AlreadyExistsError, InvalidArgumentError, UnavailableError
from services.exec_agent.files.writing import FileWriter

_KEPT_SECONDS: Final = 600.0
_MOST_BROKEN: Final = 16  # each has a descriptor, and space on the disk
_MOST_ENDED: Final = 1_000
_PATIENCE_SECONDS: Final = 60.0  # for the batch that the stream before is writing


class _Upload:
    """One file on its way. Streams may follow each other; only the last one writes."""

    def __init__(self, spec: Hashable, writer: FileWriter) -> None:
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

    def __init__(self, *, kept_seconds: float = _KEPT_SECONDS, most_broken: int = _MOST_BROKEN) -> None:
        self._kept_seconds = kept_seconds
        self._most_broken = most_broken
        self._changed = threading.Condition()
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()

    def received(self, upload_id: str) -> int:
        """How many bytes of an upload are there; 0 of one that is not known (any more)."""
        with self._changed:
            upload = self._uploads.get(upload_id)
            return upload.received if upload is not None else 0

    def stream(self, upload_id: str, offset: int, spec: Hashable, make: Callable[[], FileWriter]) -> UploadStream:
        """A stream that begins an upload, or takes it over from the stream before.

        Args:
            upload_id: the client's.
            offset: of the stream's first byte in the file.
            spec: where and how it is written; the same each time.
            make: makes the writer of a new one.

        Raises:
            InvalidArgumentError: bytes before the offset are missing (UPLOAD_INCOMPLETE, with metadata received).
            AlreadyExistsError: the id is that of something else (UPLOAD_ID_REUSED).
            UnavailableError: the stream before is stuck in a write.
        """
        with self._changed:
            while (upload := self._uploads.get(upload_id)) is not None and upload.busy:
                if not self._changed.wait(_PATIENCE_SECONDS):
                    raise UnavailableError("the stream before is stuck in a write", reason="UPLOAD_BUSY")
            upload = upload or _Upload(spec, make())
            if upload.spec != spec:
                raise AlreadyExistsError(
                    f"upload {upload_id!r} writes something else; take a new id", reason="UPLOAD_ID_REUSED"
                )
            if offset > upload.received:
                raise InvalidArgumentError.of(
                    "start.offset",
                    f"is {offset}, but only {upload.received} bytes are there; go on from there",
                    reason="UPLOAD_INCOMPLETE",
                    received=str(upload.received),
                )
            upload.stream = UploadStream(self, upload_id, upload, skip=upload.received - offset)
            self._uploads[upload_id] = upload
            return upload.stream

    @contextmanager
    def step(self, upload: _Upload, stream: UploadStream) -> Iterator[None]:
        """Around what a stream does to its file.

        Raises:
            UnavailableError: another stream has taken the upload over.
        """
        with self._changed:
            if upload.stream is not stream:
                raise UnavailableError("another stream goes on with this upload", reason="UPLOAD_TAKEN_OVER")
            upload.busy = True
        try:
            yield
        finally:
            with self._changed:
                upload.busy = False
                self._changed.notify_all()

    def complete(self, upload_id: str, upload: _Upload, size: int) -> None:
        """An upload is whole; its size is kept for repeats."""
        with self._changed:
            upload.result = size
            self._uploads.move_to_end(upload_id)
            ended = [name for name, one in self._uploads.items() if one.result is not None]
            for name in ended[:-_MOST_ENDED]:
                del self._uploads[name]

    def leave(self, upload_id: str, upload: _Upload, stream: UploadStream, *, failed: bool) -> None:
        """A stream ended early. What came of it waits for the next one, unless it was the file that failed."""
        with self._changed:
            if upload.stream is not stream or upload.result is not None:
                return
            upload.stream = None
            upload.kept_until = time.monotonic() + self._kept_seconds
            self._uploads.move_to_end(upload_id)
            if failed:
                del self._uploads[upload_id]
        if failed:
            upload.writer.abort()
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
    return upload.result is None and upload.stream is None


class UploadStream:
    """One stream of an upload; see `workers.Sink`."""

    def __init__(self, uploads: Uploads, upload_id: str, upload: _Upload, *, skip: int) -> None:
        self._uploads = uploads
        self._id = upload_id
        self._upload = upload
        self._skip = skip
        self._failed = False

    def open(self) -> None:
        """Find the place, the first time."""
        with self._step():
            if not self._upload.opened:
                self._upload.writer.open()
                self._upload.opened = True

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
                self._uploads.complete(self._id, self._upload, self._upload.writer.finish())
            return self._upload.received

    def abort(self) -> None:
        """See Uploads.leave."""
        self._uploads.leave(self._id, self._upload, self, failed=self._failed)

    @contextmanager
    def _step(self) -> Iterator[None]:
        with self._uploads.step(self._upload, self):
            try:
                yield
            except BaseException:
                self._failed = True
                raise
