"""Local paths that are written into, never replaced: devices, pipes, terminals, a process's own descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from orchard._client import errors

_PROCESSES: Final = "/proc/"


def is_special(path: Path) -> bool:
    """Whether a file in a path's place would destroy what is there: /dev/null, a named pipe, /dev/stdout, also where
    that is a file by redirection. A folder is none, nor is what is missing.
    """
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    if stat.S_ISDIR(kind):
        return False
    place = os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118 (resolve() would follow the last part)
    linked = os.readlink(path) if path.is_symlink() else ""  # noqa: PTH115 (the text as it is)
    return not stat.S_ISREG(kind) or place.startswith(_PROCESSES) or linked.startswith(_PROCESSES)


def check_repeatable(path: Path, info: os.stat_result) -> None:
    """Refuse to upload what cannot be read a second time, as an upload does where a connection breaks: a pipe, which
    may also wait for ever for its writer, a socket, a terminal. /dev/null is an empty file.

    Raises:
        OSError: it is such a thing (ESPIPE).
    """
    kind = info.st_mode
    endless = stat.S_ISCHR(kind) and info.st_rdev != Path(os.devnull).stat().st_rdev
    if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind) or endless:
        why = "is no file: send a pipe or a device as the input of a command, such as `cat > PATH`"
        raise OSError(errno.ESPIPE, why, os.fspath(path))


@contextmanager
def naming(path: Path, *, whole: bool = False) -> Iterator[None]:
    """Errors of this machine name this path where they name none, as those of a write do: it may be out of space.
    With `whole` also where they name another, such as a temporary file in its place.
    """
    try:
        yield
    except OSError as error:
        ours = not isinstance(error, errors.OrchardError) and error.errno is not None
        if ours and (whole or error.filename is None):
            error.filename, error.filename2 = os.fspath(path), None
        raise


async def write_into(path: Path, pieces: AsyncGenerator[bytes, None]) -> None:
    """Write pieces into what is at a path, as fast as it takes them. Cancelling ends it at once, also where nobody
    reads.

    Raises:
        OSError: it cannot be opened (a pipe that nobody reads: ENXIO), or takes no more.
    """
    async with _opened(path) as descriptor:
        async for piece in pieces:
            rest = memoryview(piece)
            while rest:
                try:
                    with naming(path):
                        rest = rest[os.write(descriptor, rest) :]
                except BlockingIOError:
                    await _until_writable(descriptor)


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[int]:
    # Without O_NONBLOCK it would wait in a thread for a reader that may never come.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _until_writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(descriptor, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(descriptor)
