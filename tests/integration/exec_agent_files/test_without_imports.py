"""An agent has joined its sandbox before it serves: nothing can be imported any more. Every call must work so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import asyncio, os, sys
from services.exec_agent.files.servicer import FileServicer
from services.exec_agent.files.service import FileService
from services.exec_agent.files.patch import Options

class NoImports:
    def find_spec(self, name, path=None, target=None):
        os.write(2, f"import of {name}\\n".encode())
        os._exit(3)

async def one(*pieces):
    for piece in pieces:
        yield piece

PATCH = b'''--- "a/caf\\\\303\\\\251"\\t2024-01-01 00:00:00.0 +0000
+++ "b/caf\\\\303\\\\251"\\t1970-01-01 00:00:00.0 +0000
@@ -1 +0,0 @@
-x
'''

async def main():
    os.mkdir(sys.argv[1] + ".state")
    service = FileService(
        working_directory=sys.argv[1],
        default_owner=lambda: (os.geteuid(), os.getegid()),
        state_fd=os.open(sys.argv[1] + ".state", os.O_RDONLY),
    )
    sys.meta_path[:] = [NoImports()]
    await service.write_file("d/caf\\u00e9", one(b"x\\n"), mode=0, owner="1:1", make_parents=True, exclusive=False)
    await service.write_file("d/e", one(b"x"), mode=0, owner="", make_parents=False, exclusive=True)
    assert [data async for _head, data in service.read_file("d/e", 0, 0)] == [b"x"]
    await service.stat("d", follow=True)
    page = await service.list_directory(".", recursive=True, size=1, token="")
    await service.list_directory(".", recursive=True, size=1, token=page.next_page_token)
    await service.make_directory("d/m/n", mode=0, parents=True)
    await service.move("d/e", "d/f", overwrite=False)
    archive = [data async for data in service.download_archive("d")]
    await service.upload_archive("copy", one(*archive), keep_owners=True)
    plan = await service.apply_patch("d", one(PATCH), strip=None, dry_run=False, options=Options())
    assert plan.fits, plan
    await service.remove("copy", recursive=True, missing_ok=False)
    for call in (service.remove("missing", recursive=False, missing_ok=False),
                 service.apply_patch("d", one(b"junk"), strip=1, dry_run=False, options=Options()),
                 service.upload_archive("d", one(b"junk" * 200), keep_owners=False)):
        try:
            await call
        except Exception as error:
            error.to_status()
    os.write(1, b"done")

asyncio.run(main())
"""


def test_every_call_works_without_imports(work: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(work)], capture_output=True, timeout=110)
    assert done.stdout == b"done", done.stderr.decode()
