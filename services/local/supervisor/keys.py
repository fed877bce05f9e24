"""The platform's own keys: the gateway's signing key, and the first API key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.files import write_private


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """Files in a folder of mode 0700.

    Attributes:
        directory: the folder.
        database_url: of a database of the user's own, if there is one: each database has its own API keys.
    """

    directory: Path
    database_url: str = ""

    @property
    def signing(self) -> Path:
        """The gateway's private key."""
        return self.directory / "signing.pem"

    @property
    def public(self) -> Path:
        """Its public half, for everybody who checks tokens."""
        return self.directory / "public.pem"

    @property
    def api_key(self) -> Path:
        """The first API key, which the profile also holds."""
        suffix = "-" + hashlib.sha256(self.database_url.encode()).hexdigest()[:8] if self.database_url else ""
        return self.directory / f"api-key{suffix}.json"

    def prepare(self) -> None:
        """Make the signing key unless it is there.

        Raises:
            PlatformError: a key file cannot be read.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if self.signing.exists() and self.public.exists():
            return
        from services.common import tokens

        try:
            if self.signing.exists():
                key = tokens.load_private_key(self.signing)
            else:
                key = tokens.generate_key()
                write_private(self.signing, tokens.private_pem(key))
            write_private(self.public, tokens.public_pem(key))
        except (OSError, TypeError, ValueError) as error:
            raise PlatformError(f"cannot read the signing key {self.signing}: {error}") from None

    def read_api_key(self) -> str | None:
        """The first API key, if it was made."""
        try:
            return str(json.loads(self.api_key.read_text(encoding="utf-8"))["secret"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise PlatformError(f"{self.api_key} is damaged: remove it, and the next start makes a new key") from None

    def write_api_key(self, answer: bytes) -> str:
        """Keep what `create-key` has printed; returns the key."""
        try:
            made = json.loads(answer)
            secret = str(made["secret"])
        except (ValueError, KeyError, TypeError):
            raise PlatformError("the gateway's create-key printed no key") from None
        write_private(self.api_key, json.dumps(made).encode())
        return secret
