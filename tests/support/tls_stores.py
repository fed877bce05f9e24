"""A real Redis and a real PostgreSQL that speak TLS: those of the machine, since the embedded ones are built without.

Both ask their clients for a certificate.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from tests.support.certificates import Authority, MountedSecret
from tests.support.platform import wait_until
from tests.support.ports import HOST, free_port


class TlsServer:
    """A server that is up. `secret` are its files; `caller` are files that it accepts."""

    def __init__(
        self, url: str, secret: MountedSecret, caller: MountedSecret, process: subprocess.Popen[bytes]
    ) -> None:
        self.url = url
        self.secret = secret
        self.caller = caller
        self._process = process

    def reload(self) -> None:
        self._process.send_signal(signal.SIGHUP)


@contextmanager
def running_tls_redis(authority: Authority) -> Iterator[TlsServer]:
    """A Redis with a certificate of this authority."""
    program = _needed(shutil.which("redis-server"), "redis-server")
    with tempfile.TemporaryDirectory(prefix="or-") as folder:
        secret, caller = _secrets(Path(folder), authority, "scheduler")
        port = free_port()
        argv = [program, "--port", "0", "--tls-port", str(port), "--bind", HOST, "--dir", folder, "--save", ""]
        argv += ["--tls-cert-file", str(secret.cert), "--tls-key-file", str(secret.key)]
        argv += ["--tls-ca-cert-file", str(secret.ca), "--tls-auth-clients", "yes", "--loglevel", "warning"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        url = f"rediss://{HOST}:{port}/0"
        try:
            wait_until(lambda: process.poll() is not None or _redis_answers(url, caller), "Redis to answer")
            assert process.poll() is None, "Redis ended at once"
            yield TlsServer(url, secret, caller, process)
        finally:
            process.terminate()
            process.wait(110)


def reload_redis(server: TlsServer) -> None:
    """Have it read its files again; `server.caller` still works."""
    with redis.Redis.from_url(server.url, **_redis_files(server.caller)) as client:
        # Any change of a TLS setting makes it read them all.
        client.config_set("tls-cert-file", str(server.secret.cert))


def drop_redis_connections(server: TlsServer) -> None:
    with redis.Redis.from_url(server.url, **_redis_files(server.caller)) as client:
        client.client_kill_filter(_type="normal", skipme=True)


def _redis_files(caller: MountedSecret) -> dict[str, str]:
    return {"ssl_ca_certs": str(caller.ca), "ssl_certfile": str(caller.cert), "ssl_keyfile": str(caller.key)}


def _redis_answers(url: str, caller: MountedSecret) -> bool:
    try:
        with redis.Redis.from_url(url, **_redis_files(caller)) as client:
            return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False


@contextmanager
def running_tls_postgres(authority: Authority) -> Iterator[TlsServer]:
    """A PostgreSQL with a certificate of this authority; its user `orchard` comes by certificate alone."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    binaries = Path(_needed(str(found[-1]) if found else None, "postgresql")).parent
    with tempfile.TemporaryDirectory(prefix="op-") as folder:
        secret, caller = _secrets(Path(folder), authority, "orchard")
        account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        identity = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        give_to_server(Path(folder))
        data = Path(folder, "data")
        initdb = [str(binaries / "initdb"), "-D", str(data), "--username=orchard", "--auth=reject", "--no-sync"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=folder, **identity)
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 cert\n")
        port = free_port()
        settings = {
            "listen_addresses": HOST,
            "port": port,
            "unix_socket_directories": "",
            "fsync": "off",
            "ssl": "on",
            "ssl_cert_file": secret.cert,
            "ssl_key_file": secret.key,
            "ssl_ca_file": secret.ca,
        }
        argv = [str(binaries / "postgres"), "-D", str(data)]
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, cwd=folder, **identity)
        url = f"postgresql://orchard@{HOST}:{port}/postgres"
        try:
            wait_until(lambda: process.poll() is not None or _postgres_answers(url, caller), "PostgreSQL to answer")
            assert process.poll() is None, "PostgreSQL ended at once"
            yield TlsServer(url, secret, caller, process)
        finally:
            process.send_signal(signal.SIGINT)  # fast shutdown
            process.wait(110)


def give_to_server(folder: Path) -> None:
    """PostgreSQL does not run as root and reads only a key of its own."""
    if os.geteuid() == 0:
        for path in (folder, *folder.glob("server/**/*"), folder / "server"):
            shutil.chown(path, "nobody", "nogroup")
        folder.chmod(0o755)


def connection_arguments(server: TlsServer) -> dict[str, str]:
    caller = server.caller
    return {
        "sslmode": "verify-full",
        "sslrootcert": str(caller.ca),
        "sslcert": str(caller.cert),
        "sslkey": str(caller.key),
    }


def _postgres_answers(url: str, caller: MountedSecret) -> bool:
    files = {"sslrootcert": str(caller.ca), "sslcert": str(caller.cert), "sslkey": str(caller.key)}
    try:
        psycopg.connect(url, sslmode="verify-full", connect_timeout=5, **files).close()
    except psycopg.OperationalError:
        return False
    return True


def _secrets(folder: Path, authority: Authority, caller: str) -> tuple[MountedSecret, MountedSecret]:
    return (
        MountedSecret(folder / "server", authority.issue(HOST), authority.pem),
        MountedSecret(folder / "caller", authority.issue(caller), authority.pem),
    )


def _needed(program: str | None, package: str) -> str:
    if program is not None:
        return program
    message = f"needs a server built with TLS (Debian: apt-get install {package})"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
