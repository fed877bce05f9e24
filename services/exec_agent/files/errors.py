"""From errno to the errors that the contract names, in one table."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OrchardError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)


class _Row(NamedTuple):
    kind: type[OrchardError]
    reason: str
    text: str


_NO_SPACE: Final = _Row(
    ResourceExhaustedError, "NO_SPACE", "no space is left for it; delete files or ask for more disk"
)
_DENIED: Final = _Row(PermissionDeniedError, "FILE_PERMISSION_DENIED", "permission denied")
_NOT_REGULAR: Final = _Row(FailedPreconditionError, "NOT_A_REGULAR_FILE", "it is a device, socket or pipe, not a file")
_BUSY: Final = _Row(FailedPreconditionError, "FILE_BUSY", "it is in use, such as a mount point or a running program")
_CHANGED: Final = _Row(UnavailableError, "CHANGED_MEANWHILE", "it changed during the call; retry")
_OUT_OF_RESOURCES: Final = _Row(UnavailableError, "AGENT_BUSY", "the agent is out of descriptors or memory; retry")

_TABLE: Final[Mapping[int, _Row]] = MappingProxyType(
    {
        errno.ENOENT: _Row(NotFoundError, "FILE_NOT_FOUND", "no such file or directory"),
        errno.EISDIR: _Row(FailedPreconditionError, "IS_A_DIRECTORY", "it is a directory"),
        errno.ENOTDIR: _Row(FailedPreconditionError, "NOT_A_DIRECTORY", "it, or a parent of it, is not a directory"),
        errno.ENOTEMPTY: _Row(FailedPreconditionError, "DIRECTORY_NOT_EMPTY", "the directory is not empty"),
        errno.EEXIST: _Row(AlreadyExistsError, "FILE_EXISTS", "it exists already"),
        errno.EACCES: _DENIED,
        errno.EPERM: _DENIED,
        errno.ENOSPC: _NO_SPACE,
        errno.EDQUOT: _NO_SPACE,
        errno.EFBIG: _Row(ResourceExhaustedError, "FILE_TOO_LARGE", "it would be larger than a file may be here"),
        errno.EMLINK: _Row(
            ResourceExhaustedError, "TOO_MANY_LINKS", "the directory or file has as many links as it may"
        ),
        errno.EROFS: _Row(FailedPreconditionError, "READ_ONLY_FILE_SYSTEM", "its file system is read-only"),
        errno.ELOOP: _Row(FailedPreconditionError, "LINK_LOOP", "it leads through too many symbolic links"),
        errno.ENXIO: _NOT_REGULAR,
        errno.ENODEV: _NOT_REGULAR,
        errno.ESPIPE: _NOT_REGULAR,
        errno.EBUSY: _BUSY,
        errno.ETXTBSY: _BUSY,
        errno.ESTALE: _CHANGED,
        errno.EAGAIN: _CHANGED,
        errno.EMFILE: _OUT_OF_RESOURCES,
        errno.ENFILE: _OUT_OF_RESOURCES,
        errno.ENOMEM: _OUT_OF_RESOURCES,
        errno.EIO: _Row(FailedPreconditionError, "FILE_IO_ERROR", "the file system reports an I/O error"),
        errno.EOPNOTSUPP: _Row(FailedPreconditionError, "NOT_SUPPORTED_HERE", "its file system cannot do that"),
    }
)
_BAD_PATHS: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENAMETOOLONG: "is too long for the file system: at most 255 bytes a component, 4,095 in all",
        errno.EINVAL: "is not valid for this: the file system refuses it",
        errno.EILSEQ: "has bytes that the file system does not allow",
    }
)


class BelowError(OSError):
    """An OSError about something below the path that the call named.

    Attributes:
        path: where, relative to the call's path.
    """

    def __init__(self, error: OSError, path: bytes) -> None:
        super().__init__(error.errno, error.strerror)
        self.path = path


def shown(path: bytes) -> str:
    """A path for people and metadata; bytes that are not UTF-8 as U+FFFD."""
    return path.decode("utf-8", "replace")


def file_error(error: OSError, path: bytes, field: str = "path") -> OrchardError:
    """The domain error of an OSError about `path`, which the request's `field` named."""
    number = error.errno or 0
    if isinstance(error, BelowError):
        path = os.path.join(path.removesuffix(b"/."), error.path)
    bad = _BAD_PATHS.get(number)
    if bad is not None:
        return InvalidArgumentError.of(field, f"{shown(path)!r} {bad}", reason="PATH_INVALID", path=shown(path))
    row = _TABLE.get(number)
    if row is None:
        name = errno.errorcode.get(number, str(number))
        return InternalError(f"{shown(path)!r}: unexpected error {name}", path=shown(path), errno=name)
    return row.kind(f"{shown(path)!r}: {row.text}", reason=row.reason, path=shown(path))


@contextmanager
def file_errors(path: bytes, field: str = "path") -> Iterator[None]:
    """Turn OSErrors of the block into domain errors about `path`."""
    try:
        yield
    except OSError as error:
        raise file_error(error, path, field) from error
