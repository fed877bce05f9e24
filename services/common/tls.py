"""TLS from files that may be replaced at any time, also through symbolic links, as Kubernetes replaces mounted secrets.

A server looks at its files at every new connection, outgoing channels when they are used (channel.py). What is new and
right takes effect then, without a restart; what is new and broken is logged once, and what was read before goes on.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from services.common.logs import get_logger

if TYPE_CHECKING:
    from cryptography import x509

_log = get_logger(__name__)

_LOOK_SECONDS: Final = 1.0


class TlsError(Exception):
    """A file of TLS cannot be used; the message names it and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. A certificate and its key go together.

    Attributes:
        cert: our certificate, followed by those between it and the authority.
        key: its private key, not encrypted.
        ca: the authorities that we trust: of clients, for a server; of servers, for outgoing channels.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Pems:
    """What the files hold."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def read(files: TlsFiles) -> Pems:
    """Read the files and check that they can be used.

    Raises:
        TlsError: one cannot be read or parsed, a certificate and its key do not belong together, or it has expired.
    """
    pems = _read(files)
    while True:
        try:
            _check(files, pems)
        except TlsError:
            # They may have been replaced between one read and the next.
            again = _read(files)
            if again == pems:
                raise
            pems = again
        else:
            return pems


class WatchedFiles:
    """The newest usable content of some files. Safe to use from several threads.

    Raises, when it is made:
        TlsError: see `read`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self.pems = read(files)
        self._rejected: Pems | None = None
        self._complaint = ""

    def look(self) -> bool:
        """Look at the files; whether there is something new to use."""
        with self._lock:
            try:
                found = _read(self._files)
                if found in (self.pems, self._rejected):
                    return False
                # What fails the check is not checked again until it changes.
                self._rejected = found
                self.pems = read(self._files)
            except TlsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.error("new TLS files cannot be used, those before go on", why=self._complaint)
                return False
            self._rejected, self._complaint = None, ""
            _log.info("new TLS files are used", cert=str(self._files.cert or ""), ca=str(self._files.ca or ""))
            return True


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server, which follow the files. With a CA, clients must show a certificate of it.

    Raises:
        TlsError: see `read`; or there is no certificate.
    """
    watched = WatchedFiles(files)

    def fetch() -> Any:
        # None stands for "as before", which the type stubs do not know.
        return _configuration(watched.pems) if watched.look() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(watched.pems), fetch, require_client_authentication=files.ca is not None
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    if pems.cert is None or pems.key is None:
        raise TlsError("a server needs a certificate and its key")
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca)


class ClientTls:
    """Credentials of outgoing channels.

    Args:
        files: the authorities to trust, and optionally the certificate to show.
        server_name: the name that servers' certificates must have. Empty: the host of each address.

    Raises:
        TlsError: see `read`.
    """

    def __init__(self, files: TlsFiles, *, server_name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._watched = WatchedFiles(files)
        self._clock = clock
        self._looked = clock()
        self.server_name = server_name
        self.generation = 0
        """Grows with each content of the files."""

    def look(self) -> int:
        """Look at the files, at most once a second; returns the generation."""
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if self._watched.look():
                self.generation += 1
        return self.generation

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials with what the files hold."""
        pems = self._watched.pems
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def postgres_arguments(files: TlsFiles | None) -> dict[str, Any]:
    """What makes libpq use TLS and check authority and name. It reads the files at every connection.

    Raises:
        TlsError: see `read`.
    """
    if files is None:
        return {}
    read(files)
    names = {"sslrootcert": files.ca, "sslcert": files.cert, "sslkey": files.key}
    return {"sslmode": "verify-full"} | {name: str(path) for name, path in names.items() if path is not None}


class ClientContext:
    """Contexts for outgoing connections by Python's own ssl, which follow the files.

    Raises, when it is made:
        TlsError: see `read`.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(files)
        self._context = self._make()

    def get(self) -> ssl.SSLContext:
        """The context for a new connection. It trusts the given authorities alone and checks the name."""
        if self._watched.look():
            self._context = self._make()
        return self._context

    def _make(self) -> ssl.SSLContext:
        pems = self._watched.pems
        context = ssl.create_default_context(cadata=pems.ca.decode("ascii", "replace") if pems.ca else None)
        if pems.cert is not None and pems.key is not None:
            # The ssl module reads a certificate and its key from a path alone.
            descriptor = os.memfd_create("tls")
            try:
                os.write(descriptor, pems.cert + b"\n" + pems.key)
                context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            finally:
                os.close(descriptor)
        return context


def _read(files: TlsFiles) -> Pems:
    return Pems(*(None if path is None else _content(path) for path in (files.cert, files.key, files.ca)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from None


def _check(files: TlsFiles, pems: Pems) -> None:
    if pems.ca is not None:
        _certificates(files.ca, pems.ca)
    if pems.cert is None or pems.key is None:
        return
    # Imported here: whoever has no TLS does not pay for it.
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate = _certificates(files.cert, pems.cert)[0]
    try:
        key = load_pem_private_key(pems.key, password=None)
    except (ValueError, TypeError):
        raise TlsError(f"{files.key} does not hold an unencrypted private key in PEM") from None
    if key.public_key() != certificate.public_key():
        raise TlsError(f"the key {files.key} is not that of the certificate {files.cert}")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        raise TlsError(
            f"the certificate {files.cert} has expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )


def _certificates(path: Path | None, pem: bytes) -> list[x509.Certificate]:
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(pem)
    except ValueError:
        raise TlsError(f"{path} does not hold certificates in PEM") from None
