"""gRPC for this process, also after a fork.

A forked child inherits gRPC's core without its threads: any call through it hangs or aborts (measured, with and without
GRPC_ENABLE_FORK_SUPPORT, as soon as an asyncio channel was open in the parent). Closing everything before a fork
would break the parent's running commands and could not help with channels of other libraries. So a child leaves the
inherited core alone and loads a second copy of it, from a copy of its extension module, since the dynamic loader
knows a library by its file. That takes about 0.1 s and 10 MB, once, in children that use the SDK; the parent notices
nothing.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

_CORE: Final = "grpc._cython.cygrpc"
_FORK_SWITCH: Final = "GRPC_ENABLE_FORK_SUPPORT"


class ProcessGrpc:
    """Holds the grpc package whose core belongs to this process. One per process, as the core itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._module: ModuleType | None = grpc

    def get(self) -> Any:
        """The package; the first call in a forked child loads it."""
        with self._lock:
            if self._module is None:
                self._module = _fresh_copy()
            return self._module

    def after_fork(self) -> None:
        """Forget the inherited core."""
        self._lock = threading.Lock()
        self._module = None


_PROCESS: Final = ProcessGrpc()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PROCESS.after_fork)


def grpc_module() -> Any:
    """The grpc package to use in this process."""
    return _PROCESS.get()


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


def _fresh_copy() -> ModuleType:
    inherited = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_grpc(name)}
    with tempfile.TemporaryDirectory(prefix="orchard-grpc-") as folder:
        copy = Path(folder) / "cygrpc.so"
        shutil.copyfile(str(inherited[_CORE].__file__), copy)
        finder = _CoreFinder(str(copy))
        sys.meta_path.insert(0, finder)
        try:
            fresh = importlib.import_module("grpc")
            importlib.import_module("grpc.aio")
        finally:
            sys.meta_path.remove(finder)
            # Whoever else imported grpc keeps what it had; only the SDK uses the copy.
            for name in [name for name in sys.modules if _is_grpc(name)]:
                del sys.modules[name]
            sys.modules.update(inherited)
    return fresh


@contextmanager
def quiet_fork_handlers() -> Iterator[None]:
    """While the core starts, keep it from registering fork handlers of its own: they do nothing here but write a line
    at every fork.
    """
    if _FORK_SWITCH in os.environ:
        yield
        return
    os.environ[_FORK_SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(_FORK_SWITCH, None)
