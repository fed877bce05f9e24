"""Where the platform is and which key opens it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from orchard._client.errors import ConfigurationError

_WITH_TLS: Final = ("https://", "grpcs://")
_IN_THE_CLEAR: Final = ("http://", "grpc://")
_HOST_PORT: Final = re.compile(
    r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?)(?::(?P<port>\d{1,6}))?"
)


@dataclass(frozen=True)
class Profile:
    """A connection: endpoint and API key."""

    endpoint: str
    """"https://host:port" (or grpcs://) with TLS, "host:port" (or http://, grpc://) in the clear, "unix:/path" for a
    socket.
    """
    api_key: str = field(repr=False)
    """The key; sent in call metadata only."""
    ca_file: str = ""
    """PEM file of the authorities to trust with https; empty: the system's. Read again when it changes."""
    cert_file: str = ""
    """PEM file of a client certificate, for a platform that asks for one. Read again when it changes."""
    key_file: str = ""
    """PEM file of its private key."""
    insecure: bool = False
    """Send the API key in the clear to another machine too."""

    @property
    def uses_tls(self) -> bool:
        """Whether calls are encrypted."""
        return self.endpoint.startswith(_WITH_TLS)

    @property
    def target(self) -> str:
        """The endpoint as gRPC wants it."""
        endpoint = self.endpoint
        for scheme in (*_WITH_TLS, *_IN_THE_CLEAR):
            endpoint = endpoint.removeprefix(scheme)
        return endpoint.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, which no proxy can reach."""
        host = self.target.rpartition(":")[0] or self.target
        return self.target.startswith("unix:") or host in ("localhost", "[::1]") or _is_loopback(host)

    def check(self) -> None:
        """Make sure that the key may be sent there.

        Raises:
            ConfigurationError: the endpoint is none, or the key would go over a network in the clear.
        """
        self.check_endpoint()
        if not (self.api_key.isascii() and self.api_key.isprintable() and " " not in self.api_key):
            raise ConfigurationError(
                "the API key has characters that no key has: copy it anew to ORCHARD_API_KEY", reason="API_KEY_INVALID"
            )
        if not (self.uses_tls or self.is_local or self.insecure):
            raise ConfigurationError(
                f"the API key would go in the clear over the network to {self.target}: use https://{self.target}, or "
                "set ORCHARD_INSECURE=1 (`orchard --insecure`) where nobody else can listen",
                reason="ENDPOINT_INSECURE",
            )

    def check_endpoint(self) -> None:
        """Make sure that the endpoint can be one.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.target.startswith("unix:") and len(self.target) > len("unix:"):
            return
        found = _HOST_PORT.fullmatch(self.target)
        if found is None or not (found["port"] or self.uses_tls) or int(found["port"] or 443) not in range(1, 65536):
            raise ConfigurationError(
                f"the endpoint {self.endpoint!r} is none of https://host:port, host:port and unix:/path, with a port "
                "from 1 to 65535: set ORCHARD_ENDPOINT to one",
                reason="ENDPOINT_INVALID",
            )

    def is_same_place(self, endpoint: str) -> bool:
        """Whether another endpoint leads to the same server: all names of this machine are one."""
        other = Profile(endpoint, "")
        if self.is_local and other.is_local and not self.target.startswith("unix:"):
            ports = [one.target.rpartition(":")[2] for one in (self, other)]
            return ports[0] == ports[1] and self.uses_tls == other.uses_tls
        return (self.target, self.uses_tls) == (other.target, other.uses_tls)


def profile_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the profile file is: $ORCHARD_CONFIG_DIR, else $XDG_CONFIG_HOME/orchard, else ~/.config/orchard."""
    if directory := environ.get("ORCHARD_CONFIG_DIR"):
        return Path(directory) / "profile.json"
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "orchard" / "profile.json"


def load_profile(
    endpoint: str | None = None, api_key: str | None = None, *, environ: Mapping[str, str] = os.environ
) -> Profile:
    """Put a profile together: arguments first, then ORCHARD_ENDPOINT and ORCHARD_API_KEY, then the profile file. With
    TLS also ORCHARD_CA_FILE, ORCHARD_CERT_FILE and ORCHARD_KEY_FILE; ORCHARD_INSECURE=1 is Profile.insecure.

    Raises:
        ConfigurationError: endpoint or key is to be found nowhere, or the file cannot be read.
    """
    # A secret that was copied or read from a file often has a line end.
    endpoint = (endpoint or environ.get("ORCHARD_ENDPOINT") or "").strip()
    api_key = (api_key or environ.get("ORCHARD_API_KEY") or "").strip()
    if endpoint:
        Profile(endpoint, "").check_endpoint()
    files = {name: environ.get(f"ORCHARD_{name.upper()}", "") for name in ("ca_file", "cert_file", "key_file")}
    insecure = _flag(environ.get("ORCHARD_INSECURE", ""))
    path = profile_path(environ)
    if not (endpoint and api_key):
        stored = _read(path)
        # The stored key is for the stored endpoint: it must not be sent to another one.
        is_stored = Profile(stored.get("endpoint", endpoint), "").is_same_place(endpoint or stored.get("endpoint", ""))
        if not api_key and endpoint and not is_stored:
            raise ConfigurationError(
                f"no API key for {endpoint}: the profile {path} is for another endpoint; set ORCHARD_API_KEY"
            )
        endpoint = endpoint or stored.get("endpoint", "")
        api_key = api_key or stored.get("api_key", "")
        if is_stored:
            files = {name: given or stored.get(name, "") for name, given in files.items()}
            insecure = insecure or _flag(stored.get("insecure", ""))
    if not endpoint:
        raise ConfigurationError(
            f"no platform to talk to: start one with `orchard up`, or set ORCHARD_ENDPOINT and ORCHARD_API_KEY "
            f"(no profile at {path})"
        )
    if not api_key:
        raise ConfigurationError(f"no API key for {endpoint}: set ORCHARD_API_KEY, or add api_key to {path}")
    return Profile(endpoint, api_key, insecure=insecure, **files)


def _flag(text: str) -> bool:
    if text.lower() not in ("", "0", "1", "true", "false"):
        raise ConfigurationError(f"ORCHARD_INSECURE must be 1 or 0, not {text!r}")
    return text.lower() in ("1", "true")


def _is_loopback(host: str) -> bool:
    numbers = host.split(".")
    return len(numbers) == 4 and numbers[0] == "127" and all(number.isdigit() for number in numbers)


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the profile {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"the profile {path} must be a JSON object with endpoint and api_key")
    return {key: str(value) for key, value in content.items()}
