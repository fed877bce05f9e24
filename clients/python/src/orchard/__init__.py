"""Client of Orchard, the environment service for agentic modelling.

    from orchard import SandboxClient

    with SandboxClient() as client, client.create() as sandbox:
        print(sandbox.exec("echo hello").stdout)

Names are loaded when they are first used, so importing a generated stub (`orchard.exec.v1`) loads none of this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchard._client.audit import (
        AuditEntry,
    )
    from orchard._client.client import (
        AsyncSandboxClient,
    )
    from orchard._client.errors import (
        AlreadyExists,
        ClientClosed,
        CommandFailed,
        CommandInterrupted,
        CommandNotStarted,
        CommandTimeout,
        ConfigurationError,
        DeadlineExceeded,
        DirectoryNotEmpty,
        ExecExpired,
        ExecNotFound,
        FailedPrecondition,
        FileExists,
        FileNotFound,
        FilePermissionDenied,
        ImageNotFound,
        InvalidArgument,
        IsADirectory,
        NoSpace,
        NotADirectory,
        NotFound,
        OrchardError,
        OutOfRange,
        OutputLimitExceeded,
        PatchFailed,
        PermissionDenied,
        PlatformError,
        QuotaExceeded,
        SandboxLost,
        SandboxNotFound,
        SandboxStartFailed,
        SandboxUnavailable,
        Unauthenticated,
        Unavailable,
        Unimplemented,
        UnsafeArchive,
        Violation,
    )
    from orchard._client.options import (
        Command,
        CreateOptions,
        ExecOptions,
    )
    from orchard._client.process import (
        AsyncExecStream,
        AsyncProcess,
    )
    from orchard._client.profile import (
        Profile,
        load_profile,
    )
    from orchard._client.sandbox import (
        AsyncSandbox,
    )
    from orchard._client.sync import (
        SandboxClient,
    )
    from orchard._client.sync_sandbox import (
        ExecStream,
        Process,
        Sandbox,
    )
    from orchard._client.tenants import (
        Quota,
        Tenant,
    )
    from orchard._client.transfers import (
        Progress,
    )
    from orchard._client.types import (
        ApiKey,
        ExecEnd,
        ExecInfo,
        ExecResult,
        ExecState,
        FileInfo,
        FileType,
        Image,
        ImportProgress,
        Network,
        NewApiKey,
        OutputChunk,
        PatchFile,
        PatchHunk,
        PatchResult,
        SandboxInfo,
        SandboxState,
        Usage,
        Version,
    )

__all__ = [
    "AlreadyExists",
    "ApiKey",
    "AsyncExecStream",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AuditEntry",
    "ClientClosed",
    "Command",
    "CommandFailed",
    "CommandInterrupted",
    "CommandNotStarted",
    "CommandTimeout",
    "ConfigurationError",
    "CreateOptions",
    "DeadlineExceeded",
    "DirectoryNotEmpty",
    "ExecEnd",
    "ExecExpired",
    "ExecInfo",
    "ExecNotFound",
    "ExecOptions",
    "ExecResult",
    "ExecState",
    "ExecStream",
    "FailedPrecondition",
    "FileExists",
    "FileInfo",
    "FileNotFound",
    "FilePermissionDenied",
    "FileType",
    "Image",
    "ImageNotFound",
    "ImportProgress",
    "InvalidArgument",
    "IsADirectory",
    "Network",
    "NewApiKey",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "OrchardError",
    "OutOfRange",
    "OutputChunk",
    "OutputLimitExceeded",
    "PatchFailed",
    "PatchFile",
    "PatchHunk",
    "PatchResult",
    "PermissionDenied",
    "PlatformError",
    "Process",
    "Profile",
    "Progress",
    "Quota",
    "QuotaExceeded",
    "Sandbox",
    "SandboxClient",
    "SandboxInfo",
    "SandboxLost",
    "SandboxNotFound",
    "SandboxStartFailed",
    "SandboxState",
    "SandboxUnavailable",
    "Tenant",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UnsafeArchive",
    "Usage",
    "Version",
    "Violation",
    "load_profile",
]

_MODULES = {
    "audit": ("AuditEntry",),
    "client": ("AsyncSandboxClient",),
    "errors": (
        "AlreadyExists",
        "ClientClosed",
        "CommandFailed",
        "CommandInterrupted",
        "CommandNotStarted",
        "CommandTimeout",
        "ConfigurationError",
        "DeadlineExceeded",
        "DirectoryNotEmpty",
        "ExecExpired",
        "ExecNotFound",
        "FailedPrecondition",
        "FileExists",
        "FileNotFound",
        "FilePermissionDenied",
        "ImageNotFound",
        "InvalidArgument",
        "IsADirectory",
        "NoSpace",
        "NotADirectory",
        "NotFound",
        "OrchardError",
        "OutOfRange",
        "OutputLimitExceeded",
        "PatchFailed",
        "PermissionDenied",
        "PlatformError",
        "QuotaExceeded",
        "SandboxLost",
        "SandboxNotFound",
        "SandboxStartFailed",
        "SandboxUnavailable",
        "Unauthenticated",
        "Unavailable",
        "Unimplemented",
        "UnsafeArchive",
        "Violation",
    ),
    "tenants": ("Quota", "Tenant"),
    "transfers": ("Progress",),
    "options": (
        "Command",
        "CreateOptions",
        "ExecOptions",
    ),
    "process": (
        "AsyncExecStream",
        "AsyncProcess",
    ),
    "profile": (
        "Profile",
        "load_profile",
    ),
    "sandbox": ("AsyncSandbox",),
    "sync": ("SandboxClient",),
    "sync_sandbox": ("ExecStream", "Process", "Sandbox"),
    "types": (
        "ApiKey",
        "ExecEnd",
        "ExecInfo",
        "ExecResult",
        "ExecState",
        "FileInfo",
        "FileType",
        "Image",
        "ImportProgress",
        "Network",
        "NewApiKey",
        "OutputChunk",
        "PatchFile",
        "PatchHunk",
        "PatchResult",
        "SandboxInfo",
        "SandboxState",
        "Usage",
        "Version",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"orchard._client.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
