"""The command line as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.platform import PlatformProcess


class Cli:
    """Runs the command line as a user would."""

    program = (sys.executable, "-m", "orchard._cli.main")

    def __init__(self, platform: PlatformProcess) -> None:
        self.environment = platform.client_environment()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.program, *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        process = self.start(*arguments)
        out, err = process.communicate(stdin, timeout=200)
        return process.returncode, out, err

    def json(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, b"")
        return json.loads(out)

    def completed(self, *words: str) -> list[str]:
        """What a shell offers for the last of these words, which follow `orchard`."""
        shell = {
            "_ORCHARD_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("orchard", *words)),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.argv = ['orchard']; from orchard._cli.main import main; main()"],
            env={**self.environment, **shell},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.split()
