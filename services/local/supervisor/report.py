"""What `orchard up` says when all is up."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from services.local.supervisor.platform import Platform

_GRPCURL: Final = Path(__file__).parents[3] / "build" / "grpcurl"  # where scripts/grpcurl puts it
_PROGRAM: Final = """\
from orchard import SandboxClient

with SandboxClient() as client, client.create() as sandbox:
    print(sandbox.exec("echo hello").stdout)"""


def ready_text(platform: Platform) -> str:
    """Where everything is, what this machine gives, and what to try."""
    layout = platform.layout
    rows = [("endpoint", platform.endpoint), ("data", _short(layout.data)), ("sockets", str(layout.run))]
    if platform.options.profile is not None:
        rows.append(("profile", f"{_short(platform.options.profile)} (the SDK and `orchard` find it by themselves)"))
    if platform.facts is not None:
        rows.append(("sandboxes", f"user ids: {platform.facts.user_ids}, limits: {platform.facts.limits}"))
        rows += [("gap", gap) for gap in platform.facts.gaps]
    lines = ["", *(f"  {name:<10} {value}" for name, value in rows), "", "Try, in another terminal:", ""]
    lines += [f"  {line}" for line in _tries(platform)]
    return "\n".join([*lines, "", "Ctrl-C stops everything.", ""])


def _tries(platform: Platform) -> list[str]:
    key = platform.layout.keys.api_key
    call = f"{platform.layout.listen.endpoint} orchard.sandbox.v1.SandboxService/ListSandboxes"
    ca = platform.layout.client_files.get("ca_file")
    security = "-plaintext" if not platform.layout.gateway_tls else f"-cacert {shlex.quote(ca)}" if ca else ""
    return [
        f"{_command('orchard')} create",
        "",
        f"{_command('python')} - <<'END'",
        *_PROGRAM.splitlines(),
        "END",
        "",
        f'KEY=$(sed \'s/.*"secret": "\\([^"]*\\).*/\\1/\' {shlex.quote(str(key))})',
        f'{_command("grpcurl", _GRPCURL)} {security} -H "authorization: Bearer $KEY" {call}',
    ]


def _command(name: str, *places: Path) -> str:
    """How a shell finds a program: where it is beside this Python, by its name alone if that leads there."""
    for path in (*places, Path(sys.executable).with_name(name)):
        if path.is_file():
            # Another Python has not what this one has.
            if shutil.which(name) == str(path):
                return name
            with suppress(ValueError):
                return shlex.quote(str(path.relative_to(Path.cwd())))
            return shlex.quote(str(path))
    return name


def _short(path: Path) -> str:
    """Below the home folder with a tilde."""
    with suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)
