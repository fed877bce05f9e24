"""Where the platform is and which key opens it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchard._client.errors import ConfigurationError


@dataclass(frozen=True)
class Profile:
    """A connection: endpoint and API key."""

    endpoint: str
    """"host:port" or "http://host:port" in the clear, "https://host:port" with TLS, "unix:/path" for a socket."""
    api_key: str = field(repr=False)
    """The key; sent in call metadata only."""
    ca_file: str = ""
    """PEM file of the authorities to trust with https; empty: the system's."""

    @property
    def target(self) -> str:
        """The endpoint as gRPC wants it."""
        return self.endpoint.removeprefix("https://").removeprefix("http://").rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, which no proxy can reach."""
        host = self.target.rpartition(":")[0]
        return self.target.startswith("unix:") or host in ("localhost", "127.0.0.1", "[::1]")


def profile_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the profile file is: $ORCHARD_CONFIG_DIR, else $XDG_CONFIG_HOME/orchard, else ~/.config/orchard."""
    if directory := environ.get("ORCHARD_CONFIG_DIR"):
        return Path(directory) / "profile.json"
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "orchard" / "profile.json"


def load_profile(
    endpoint: str | None = None, api_key: str | None = None, *, environ: Mapping[str, str] = os.environ
) -> Profile:
    """Put a profile together: arguments first, then ORCHARD_ENDPOINT and ORCHARD_API_KEY, then the profile file.

    Raises:
        ConfigurationError: endpoint or key is to be found nowhere, or the file cannot be read.
    """
    endpoint = endpoint or environ.get("ORCHARD_ENDPOINT")
    api_key = api_key or environ.get("ORCHARD_API_KEY")
    ca_file = environ.get("ORCHARD_CA_FILE", "")
    path = profile_path(environ)
    if not (endpoint and api_key):
        stored = _read(path)
        # The stored key is for the stored endpoint: it must not be sent to another one.
        if not api_key and endpoint and endpoint != stored.get("endpoint", endpoint):
            raise ConfigurationError(
                f"no API key for {endpoint}: the profile {path} is for another endpoint; set ORCHARD_API_KEY"
            )
        endpoint = endpoint or stored.get("endpoint")
        api_key = api_key or stored.get("api_key")
        ca_file = ca_file or stored.get("ca_file", "")
    if not endpoint:
        raise ConfigurationError(
            f"no platform to talk to: start one with `orchard up`, or set ORCHARD_ENDPOINT and ORCHARD_API_KEY "
            f"(no profile at {path})"
        )
    if not api_key:
        raise ConfigurationError(f"no API key for {endpoint}: set ORCHARD_API_KEY, or add api_key to {path}")
    return Profile(endpoint, api_key, ca_file)


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
