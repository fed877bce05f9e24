"""SWE-ReX's interfaces, answered by sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conformance.adapters import Harness

PROGRAM = Path(__file__).parent / "swe_rex" / "deployment.py"


def test_deployment(harness: Callable[[str], Harness]) -> None:
    rex = harness("swe-rex")
    # Its logs go there too.
    assert "\ndone\n" in rex.run(PROGRAM, rex.folder).stdout
