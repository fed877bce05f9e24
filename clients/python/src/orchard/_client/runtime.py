"""gRPC for this process, also after a fork.

A forked child inherits gRPC's core without most of its threads: calls through it hang or abort. gRPC's own fork
support makes it worse as soon as an asyncio channel is open: it skips its preparation, yet revives some threads in
the child, which then read from the sockets of the parent (measured with 1.85). Closing everything before a fork would
break the parent's running commands. So the core that the SDK uses is loaded without fork support, and a child leaves
the inherited one alone and loads a second copy, from a copy of its extension module, since the dynamic loader knows a
library by its file. That takes about 0.1 s and 16 MB, once, in children that use the SDK; the parent notices nothing.
Where another library has loaded gRPC with fork support before, the SDK takes a copy from the start.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_CORE: Final = "grpc._cython.cygrpc"
_FORK_SWITCH: Final = "GRPC_ENABLE_FORK_SUPPORT"
_EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
# The thread that waits for a call reads its socket itself. With gRPC's own pool of threads in between, a call takes
# 0.15 ms longer and streamed output a third more of the client's processor time (measured with 1.85).
_POLL_IN_PLACE: Final = "-event_engine_client,-event_engine_listener"
_OFF: Final = ("0", "false", "no")
_KEPT_BYTES: Final = 4 << 20


class ProcessGrpc:
    """Holds the grpc package whose core belongs to the SDK in this process. One per process, as cores are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._module: ModuleType | None = _load()

    def get(self) -> Any:
        """The package; the first call in a forked child loads it."""
        loaded = self._module
        if loaded is not None:
            # Without the lock: a signal may stop one thread within it, whose handler then waits for another.
            return loaded
        with self._lock:
            if self._module is None:
                self._module = _copy()
            return self._module

    def after_fork(self) -> None:
        """Forget the inherited core."""
        self._lock = threading.Lock()
        self._module = None


def _load() -> ModuleType:
    # A message of 256 KiB passes through several buffers. glibc hands freed memory of that size back to the kernel and
    # asks for it again with each message, until it has once seen a larger block come and go: half of the processor
    # time of a client that reads streamed output (measured with glibc 2.36).
    bytes(_KEPT_BYTES)
    if "grpc" in sys.modules and os.environ.get(_FORK_SWITCH, "").lower() not in _OFF:
        return _copy()
    with _core_settings():
        importlib.import_module("grpc.aio")
    return sys.modules["grpc"]


class _CoreFinder:
    """Finds the core in a file of our choice."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name != _CORE:
            return None
        loader = importlib.machinery.ExtensionFileLoader(name, self._path)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


def _is_grpc(name: str) -> bool:
    return name == "grpc" or name.startswith("grpc.")


def _copy() -> ModuleType:
    inherited = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_grpc(name)}
    with tempfile.TemporaryDirectory(prefix="orchard-grpc-") as folder:
        library = Path(folder) / "cygrpc.so"
        shutil.copyfile(str(inherited[_CORE].__file__), library)
        finder = _CoreFinder(str(library))
        sys.meta_path.insert(0, finder)
        try:
            with _core_settings():
                importlib.import_module("grpc.aio")
            copied = sys.modules["grpc"]
        finally:
            sys.meta_path.remove(finder)
            # Whoever else imported grpc keeps what it had; only the SDK uses the copy.
            for name in [name for name in sys.modules if _is_grpc(name)]:
                del sys.modules[name]
            sys.modules.update(inherited)
    return copied


@contextmanager
def _core_settings() -> Iterator[None]:
    """While a core is loaded: it reads its settings then. The variables are put back, since programs started later
    may want them. A choice of experiments by the user wins.
    """
    before = {name: os.environ.get(name) for name in (_FORK_SWITCH, _EXPERIMENTS)}
    os.environ[_FORK_SWITCH] = "0"
    os.environ.setdefault(_EXPERIMENTS, _POLL_IN_PLACE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leak(inherited: object) -> None:
    """In a forked child: never destroy this, since that would run code of the inherited core (or hang in it)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


_PROCESS: Final = ProcessGrpc()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS.after_fork)


def grpc_module() -> Any:
    """The grpc package to use in this process."""
    return _PROCESS.get()
