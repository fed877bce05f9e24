"""A rehearsal leaves memory alone in its process."""

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.exec_agent.conftest import BACKSTOP, ROOT

_SCRIPT = """
import json, os, sys, time
from pathlib import Path
from services.exec_agent import app

def found():
    return {
        "descriptors": {int(n): os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) > 2
                        and os.path.lexists(f"/proc/self/fd/{n}")},
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }

app.preload()
states = []
for name in ("first", "second"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    app.rehearse(folder)
    while len(os.listdir("/proc/self/task")) > 1:
        time.sleep(0.01)
    states.append(found())
print(json.dumps([*states, os.listdir(folder)]))
"""


def test_neither_threads_nor_descriptors_nor_children_are_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=BACKSTOP
    )
    assert done.returncode == 0, done.stderr
    # libuv opens a pipe at its first use, for the life of the process.
    first, second, files = json.loads(done.stdout)
    assert second == first and len(first["descriptors"]) <= 2
    assert not first["children"]
    assert "journal" in files  # commands ran
