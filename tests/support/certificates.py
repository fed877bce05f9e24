"""Real authorities and certificates, and files of them that are replaced as Kubernetes replaces mounted secrets."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from services.common.tls import TlsFiles

DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key in PEM."""

    cert: bytes
    key: bytes

    @property
    def serial(self) -> int:
        return x509.load_pem_x509_certificate(self.cert).serial_number


class Authority:
    """Issues certificates."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = dt.datetime.now(dt.UTC)
        usage = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
                "digital_signature",
            ),
            False,
        )
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), now + 10 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(Encoding.PEM)

    def issue(self, *names: str, expired: bool = False, password: bytes = b"") -> Pair:
        """A certificate for these host names and addresses; the first is its common name too."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        certificate = (
            _builder(_name(names[0]), self._name, key.public_key(), now - DAY if expired else now + DAY)
            .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        encryption = BestAvailableEncryption(password) if password else NoEncryption()
        return Pair(
            certificate.public_bytes(Encoding.PEM), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, until: dt.datetime):
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.now(dt.UTC) - 3 * DAY)
        .not_valid_after(until)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


class MountedSecret:
    """A folder in which `tls.crt`, `tls.key` and `ca.crt` are links through `..data`, which is replaced in one step."""

    def __init__(self, folder: Path, pair: Pair | None = None, ca: bytes = b"") -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.replace(pair, ca)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            if (folder / "..data" / name).exists():
                (folder / name).symlink_to(Path("..data", name))

    @property
    def cert(self) -> Path:
        return self._folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self._folder / "tls.key"

    @property
    def ca(self) -> Path:
        return self._folder / "ca.crt"

    @property
    def files(self) -> TlsFiles:
        """As a caller's settings have them: its own certificate, and the authority of whom it calls."""
        return TlsFiles(self.cert, self.key, self.ca)

    def replace(self, pair: Pair | None = None, ca: bytes = b"") -> None:
        self._version += 1
        new = self._folder / f"..{self._version}"
        new.mkdir()
        contents = {"ca.crt": ca} if ca else {}
        if pair is not None:
            contents |= {"tls.crt": pair.cert, "tls.key": pair.key}
        for name, content in contents.items():
            (new / name).write_bytes(content)
            (new / name).chmod(0o600)
        (self._folder / "..new").symlink_to(new.name)
        (self._folder / "..new").replace(self._folder / "..data")
