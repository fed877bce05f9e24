"""TLS of the client: credentials that follow their files, and what to say when the two sides do not understand each
other.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orchard._client.errors import ConfigurationError, Unavailable
from orchard._client.profile import Profile
from orchard._client.runtime import grpc_module

_LOOK_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 3.0
_SYSTEM_BUNDLES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
# X509_V_ERR_* of OpenSSL.
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_UNKNOWN_AUTHORITY: Final = (2, 18, 19, 20, 21)
_OTHER_NAME: Final = (62, 64)

Pems = tuple[bytes | None, bytes | None, bytes | None]


class Credentials:
    """What connections with TLS are made with; new content of the files makes new connections necessary.

    Raises, when it is made and when a connection is:
        ConfigurationError: a file cannot be used.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._pems = self._read()
        self._looked = time.monotonic()

    def changed(self) -> bool:
        """Whether the files hold something new; looks at most once a second. Files that cannot be read do not count."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        try:
            pems = self._read()
        except ConfigurationError:
            return False
        if pems == self._pems:
            return False
        self._pems = pems
        return True

    def make(self) -> Any:
        """For a new channel."""
        ca, key, cert = self._pems
        try:
            return grpc_module().ssl_channel_credentials(ca or _system_authorities(), key, cert)
        except ValueError as error:
            raise ConfigurationError(f"the TLS files cannot be used: {error}", reason="TLS_FILES") from None

    def _read(self) -> Pems:
        profile = self._profile
        if bool(profile.cert_file) != bool(profile.key_file):
            raise ConfigurationError(
                "a client certificate and its key go together: set both ORCHARD_CERT_FILE and ORCHARD_KEY_FILE",
                reason="TLS_FILES",
            )
        return (
            _content("ORCHARD_CA_FILE", profile.ca_file),
            _content("ORCHARD_KEY_FILE", profile.key_file),
            _content("ORCHARD_CERT_FILE", profile.cert_file),
        )


def _content(variable: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path} ({variable}): {error.strerror}", reason="TLS_FILES") from None
    if b"-----BEGIN " not in content:
        raise ConfigurationError(f"{path} ({variable}) is not a PEM file", reason="TLS_FILES")
    return content


def _system_authorities() -> bytes | None:
    """The machine's; gRPC would use a list of its own, which knows no authority that somebody added here."""
    places = (ssl.get_default_verify_paths().cafile, *_SYSTEM_BUNDLES)
    return next((Path(place).read_bytes() for place in places if place and Path(place).is_file()), None)


async def diagnose(profile: Profile) -> Unavailable | None:
    """Why no connection can be made, as far as TLS is the cause; asks the endpoint with a short connection of its
    own. None where it is not, or where nothing can be said.
    """
    host, port = _address(profile)
    if not host or (_proxy(os.environ) and not profile.is_local):
        return None
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            if profile.uses_tls:
                return await _diagnose_tls(profile, host, port)
            return await _diagnose_clear(profile, host, port)
    except (OSError, TimeoutError, ConfigurationError):
        return None


async def _diagnose_clear(profile: Profile, host: str, port: int) -> Unavailable | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is sent: it is only asked whether TLS is spoken there.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        _reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError:
        return None
    writer.transport.abort()
    return _failed(
        profile,
        "TLS_REQUIRED",
        f"it speaks TLS, and the endpoint is in the clear; use https://{profile.target} (and ORCHARD_CA_FILE with an "
        "authority of your own)",
    )


async def _diagnose_tls(profile: Profile, host: str, port: int) -> Unavailable | None:
    context = ssl.create_default_context(cafile=_expanded(profile.ca_file))
    if profile.cert_file:
        context.load_cert_chain(_expanded(profile.cert_file) or "", _expanded(profile.key_file))
    context.set_alpn_protocols(["h2"])
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
        try:
            # A server says only now what it thinks of our certificate: by an alert, or by ending the connection.
            writer.write(_HTTP2_PREFACE)
            return None if await reader.read(1) else _unwelcome(profile)
        finally:
            writer.transport.abort()
    except ssl.SSLCertVerificationError as error:
        return _distrusted(profile, host, error)
    except ssl.SSLError as error:
        reason = str(error.reason or "")
        if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason or "PACKET_LENGTH" in reason:
            return _failed(
                profile, "TLS_NOT_SPOKEN", f"it does not speak TLS; use http://{profile.target}, or set up TLS there"
            )
        return _unwelcome(profile) if "ALERT" in reason else None


def _distrusted(profile: Profile, host: str, error: ssl.SSLCertVerificationError) -> Unavailable:
    if error.verify_code == _EXPIRED:
        return _failed(
            profile,
            "CERTIFICATE_EXPIRED",
            "its certificate has expired; renew it there, or set this machine's clock right",
        )
    if error.verify_code == _NOT_YET_VALID:
        return _failed(
            profile, "CERTIFICATE_NOT_YET_VALID", "its certificate is not valid yet; set this machine's clock right"
        )
    if error.verify_code in _OTHER_NAME:
        return _failed(
            profile,
            "CERTIFICATE_NAME",
            f"its certificate is not for {host!r}; use a name that it has, or have it issued for this one",
        )
    if error.verify_code in _UNKNOWN_AUTHORITY:
        trusted = f"the authorities in {profile.ca_file}" if profile.ca_file else "the authorities of this machine"
        return _failed(
            profile,
            "CERTIFICATE_AUTHORITY",
            f"its certificate is of none of {trusted}; set ORCHARD_CA_FILE to the platform's CA file",
        )
    return _failed(profile, "CERTIFICATE_INVALID", f"its certificate is not valid ({error.verify_message})")


def _unwelcome(profile: Profile) -> Unavailable:
    if profile.cert_file:
        return _failed(
            profile,
            "CLIENT_CERTIFICATE_REFUSED",
            f"it refuses the client certificate {profile.cert_file}; use one of its authority that has not expired",
        )
    return _failed(
        profile,
        "CLIENT_CERTIFICATE_REQUIRED",
        "it asks for a client certificate; set ORCHARD_CERT_FILE and ORCHARD_KEY_FILE",
    )


def _failed(profile: Profile, reason: str, why: str) -> Unavailable:
    return Unavailable(f"cannot reach Orchard at {profile.endpoint}: {why}", reason=reason)


def _address(profile: Profile) -> tuple[str, int]:
    if profile.target.startswith("unix:"):
        return "", 0
    host, separator, port = profile.target.rpartition(":")
    if not separator:
        return profile.target, 443
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdigit() else 0


def _proxy(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in ("grpc_proxy", "https_proxy", "http_proxy") if environ.get(name)), "")


def _expanded(path: str) -> str | None:
    return str(Path(path).expanduser()) if path else None
