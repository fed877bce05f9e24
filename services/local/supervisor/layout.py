"""Where everything of one platform is, and the command lines of its services."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.common.grpc_core import CORE_ENVIRONMENT
from services.common.settings import REFUSED
from services.local.migrate import SERVICES, migrations_of
from services.local.stores.command import Command
from services.local.stores.postgres import Postgres, account_of_servers
from services.local.stores.valkey import Valkey
from services.local.supervisor.children import Child, StopStep
from services.local.supervisor.files import write_private
from services.local.supervisor.health_client import watch_health
from services.local.supervisor.keys import KeyFiles
from services.local.supervisor.listen import Listen
from services.local.supervisor.unit import Report, UnitSpec

STOP_ORDER: Final = ("gateway", "judge", "trajectories", "scheduler", "watcher", "node", "valkey", "postgres")
# A service ends streams and drains calls for 5 s each; the node ends every sandbox.
_SERVICE_STOP: Final[tuple[StopStep, ...]] = ((signal.SIGTERM, 15.0),)
_NODE_STOP: Final[tuple[StopStep, ...]] = ((signal.SIGTERM, 30.0),)
_VALKEY_STOP: Final[tuple[StopStep, ...]] = ((signal.SIGTERM, 10.0),)
# Fast, then immediate shutdown.
_POSTGRES_STOP: Final[tuple[StopStep, ...]] = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0))

# A judge that needs no model and no key; it says of itself that its verdicts mean nothing.
_JUDGES: Final = '[{"name": "scripted", "kind": "scripted"}]\n'

# What speaks to the client of this shell's user, and what this layout decides itself.
_NOT_INHERITED: Final = frozenset(
    {
        "ORCHARD_ENDPOINT",
        "ORCHARD_API_KEY",
        "ORCHARD_CA_FILE",
        "ORCHARD_CERT_FILE",
        "ORCHARD_KEY_FILE",
        "ORCHARD_INSECURE",
        "ORCHARD_LISTEN",
        "DATABASE_URL",
        "REDIS_URL",
    }
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths, addresses and environments.

    Attributes:
        data: the data directory.
        run: folder of the Unix sockets.
        listen: the gateway's address.
        lifeline_fd: read end of the pipe whose other end the supervisor alone holds.
        environment: the user's.
        log_format: "text" or "json".
        log_level: of the services.
    """

    data: Path
    run: Path
    listen: Listen
    lifeline_fd: int
    environment: Mapping[str, str]
    log_format: str
    log_level: str

    @property
    def runtime(self) -> str:
        """What sandboxes are: "process" or "docker". Services read it from the same variable."""
        return self.environment.get("ORCHARD_RUNTIME") or "process"

    @property
    def gateway_tls(self) -> bool:
        """Whether the gateway serves TLS: the user's environment names its certificate."""
        return bool(self.environment.get("ORCHARD_TLS_CERT_FILE"))

    @property
    def endpoint(self) -> str:
        """The gateway's, for clients on this machine."""
        return f"https://{self.listen.endpoint}" if self.gateway_tls else self.listen.endpoint

    @property
    def client_files(self) -> dict[str, str]:
        """What clients on this machine need for TLS, as far as the user's environment names it."""
        names = ("ca_file", "cert_file", "key_file") if self.gateway_tls else ()
        found = {name: self.environment.get(f"ORCHARD_{name.upper()}", "") for name in names}
        return {name: str(Path(path).absolute()) for name, path in found.items() if path}

    @property
    def keys(self) -> KeyFiles:
        """Key files."""
        return KeyFiles(self.data / "keys", self.environment.get("DATABASE_URL", ""))

    def postgres(self) -> Postgres | None:
        """The embedded PostgreSQL, unless DATABASE_URL names another."""
        if self.environment.get("DATABASE_URL"):
            return None
        return Postgres(self.data / "postgres", self.run / "pg", account_of_servers())

    def valkey(self) -> Valkey | None:
        """The embedded Valkey, unless REDIS_URL names another."""
        if self.environment.get("REDIS_URL"):
            return None
        return Valkey(self.data / "valkey", self.run / "valkey.sock")

    def health_address(self, service: str) -> str:
        """Where a service tells its health in the clear: the supervisor need not be a client that it would let in."""
        if service != "gateway":
            return self.address(service)
        return f"unix:{self.run / 'gateway-health'}.sock" if self.gateway_tls else self.listen.endpoint

    def address(self, service: str) -> str:
        """Where a service listens."""
        return self.listen.address if service == "gateway" else f"unix:{self.run / service}.sock"

    def store_environment(self) -> dict[str, str]:
        """For PostgreSQL and Valkey: nothing of the user's."""
        return {"PATH": self.environment.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}

    def service_environment(self, service: str) -> dict[str, str]:
        """The user's environment with a service's settings. The user's other ORCHARD_ variables reach it too."""
        environment = {**CORE_ENVIRONMENT, **{k: v for k, v in self.environment.items() if k not in _NOT_INHERITED}}
        root = str(Path(__file__).parents[3])
        inherited = environment.get("PYTHONPATH", "")
        environment |= {
            # The same code as here, wherever it was started from.
            "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root,
            "PYTHONUNBUFFERED": "1",
            "ORCHARD_LISTEN": self.address(service),
            "ORCHARD_LIFELINE_FD": str(self.lifeline_fd),
            "ORCHARD_LOG_FORMAT": self.log_format,
            "ORCHARD_LOG_LEVEL": self.log_level,
        }
        return environment | self._settings(service)

    def _settings(self, service: str) -> dict[str, str]:
        public, node, watcher = (
            {"ORCHARD_PUBLIC_KEYS_FILE": str(self.keys.public)},
            {"ORCHARD_NODE_ADDRESS": self.address("node")},
            {"ORCHARD_WATCHER_ADDRESS": self.address("watcher")},
        )
        if service == "node":
            return public | {
                "ORCHARD_DATA_DIRECTORY": str(self.data),
                "ORCHARD_RUN_DIRECTORY": str(self.run / "node"),
            }
        if service == "watcher":
            return public | node
        if service == "scheduler":
            valkey = self.valkey()
            redis = valkey.url if valkey else self.environment["REDIS_URL"]
            return public | node | watcher | {"ORCHARD_REDIS_URL": redis}
        if service == "trajectories":
            return public | self.database_settings | {"ORCHARD_OBJECT_STORE_URL": self.object_store_url}
        if service == "judge":
            return (
                public
                | self.database_settings
                | {
                    "ORCHARD_OBJECT_STORE_URL": self.judge_store_url,
                    "ORCHARD_JUDGES_FILE": str(self.judges_file),
                }
            )
        return (
            node
            | watcher
            | self.database_settings
            | {
                "ORCHARD_SIGNING_KEY_FILE": str(self.keys.signing),
                "ORCHARD_SCHEDULER_ADDRESS": self.address("scheduler"),
                "ORCHARD_TRAJECTORIES_ADDRESS": self.address("trajectories"),
                "ORCHARD_JUDGE_ADDRESS": self.address("judge"),
                "ORCHARD_HEALTH_LISTEN": self.health_address("gateway") if self.gateway_tls else "",
                "ORCHARD_RUNTIME": self.runtime,
            }
        )

    @property
    def database_settings(self) -> dict[str, str]:
        """Where PostgreSQL is, for services that use it."""
        postgres = self.postgres()
        return {"ORCHARD_DATABASE_URL": postgres.url if postgres else self.environment["DATABASE_URL"]}

    @property
    def object_store_url(self) -> str:
        """Where bodies and sealed trajectories go: a folder of the data directory, or a store of the user's own."""
        return self.environment.get("ORCHARD_OBJECT_STORE_URL") or (self.data / "trajectories").as_uri()

    @property
    def judge_store_url(self) -> str:
        """Where raw answers of judges and the images that they saw go, apart from what the trajectory service keeps."""
        own = self.environment.get("ORCHARD_OBJECT_STORE_URL")
        return f"{own.rstrip('/')}/judge" if own else (self.data / "judge").as_uri()

    @property
    def judges_file(self) -> Path:
        """The user's list of judges, or one of the data directory that is made at the first start, to be edited."""
        own = self.environment.get("ORCHARD_JUDGES_FILE")
        return Path(own).absolute() if own else self.data / "judges.json"

    def service_command(self, service: str, *arguments: str) -> Command:
        """`python -m services.<service>`."""
        module = "services.local.node" if service == "node" else f"services.{service}"
        return self._python(module, *arguments, environment=self.service_environment(service))

    def migrate_command(self) -> Command:
        """Brings the schema of every service up to date."""
        environment = self.service_environment("gateway")
        return self._python("services.local.migrate", environment=environment)

    @staticmethod
    def _python(module: str, *arguments: str, environment: Mapping[str, str]) -> Command:
        # -P: a folder named `services` where the user happens to be is not ours.
        return Command((sys.executable, "-P", "-m", module, *arguments), environment)

    @property
    def node_data(self) -> Path:
        """Where the node daemon keeps its own."""
        return self.data / "node"

    @property
    def docker_data(self) -> Path:
        """Likewise, with the docker runtime."""
        return self.data / "docker"

    def make_folders(self) -> None:
        """Make the folders that services expect."""
        (self.run / "node").mkdir(mode=0o700, exist_ok=True)
        if not self.environment.get("ORCHARD_JUDGES_FILE") and not self.judges_file.exists():
            write_private(self.judges_file, _JUDGES.encode())

    def service_unit(self, service: str) -> UnitSpec:
        """A service of ours."""
        address = self.health_address(service)

        async def watch(_child: Child, report: Report) -> None:
            await watch_health(address, report)

        stop = _NODE_STOP if service == "node" else _SERVICE_STOP
        return UnitSpec(service, lambda: self.service_command(service), watch, stop, refused=REFUSED)

    def valkey_unit(self, valkey: Valkey) -> UnitSpec:
        """The embedded Valkey."""

        def command() -> Command:
            valkey.prepare()
            return valkey.command(self.store_environment())

        async def watch(_child: Child, report: Report) -> None:
            await valkey.wait_ready()
            report(True)

        return UnitSpec("valkey", command, watch, _VALKEY_STOP)

    def postgres_unit(self, postgres: Postgres) -> UnitSpec:
        """The embedded PostgreSQL, whose data folder is there."""

        async def watch(child: Child, report: Report) -> None:
            await postgres.wait_ready(child.pid)
            report(True)

        return UnitSpec(
            "postgres",
            lambda: postgres.command(self.store_environment()),
            watch,
            _POSTGRES_STOP,
            clear=postgres.end_leftovers,
        )


def migrations_digest() -> str:
    """A hash over every service's migrations: while it is the same, the embedded database needs none."""
    digest = hashlib.sha256()
    for path in (path for service in SERVICES for path in sorted(migrations_of(service).rglob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
