"""Names of images as registries know them, and who we are there."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_DOMAIN_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_DOMAIN: Final = rf"(?:{_DOMAIN_LABEL}(?:\.{_DOMAIN_LABEL})*(?::[0-9]+)?/)?"
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_NAME: Final = re.compile(
    rf"(?P<name>{_DOMAIN}{_COMPONENT}(?:/{_COMPONENT})*)(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(?P<digest>@sha256:[0-9a-f]{64})?\Z"
)
_ID: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_HUB: Final = "docker.io"
_HUB_KEY: Final = "https://index.docker.io/v1/"


def is_reference(text: str) -> bool:
    """Whether an engine may be asked for it: a name like python:3.12, or the id of an image, sha256:..."""
    return _NAME.match(text) is not None or is_id(text)


def is_id(text: str) -> bool:
    """Whether it names an image by its id, which no registry knows."""
    return _ID.match(text) is not None


def with_tag(reference: str) -> str:
    """The reference with the tag that it stands for: an engine that is asked to pull a bare name pulls every tag."""
    found = _NAME.match(reference)
    if found is None or found["tag"] or found["digest"]:
        return reference
    return f"{reference}:latest"


def registry_of(reference: str) -> str:
    """The registry that a reference is of: the first part, if it looks like a host."""
    first, slash, _ = reference.partition("/")
    return first if slash and (any(c in first for c in ".:") or first == "localhost") else _HUB


def credentials_for(reference: str, environment: Mapping[str, str]) -> str:
    """The header X-Registry-Auth from what `docker login` keeps in its file; empty: there is nothing there.

    Keeping by a program of the system (credsStore) is not asked: pull such images by hand.
    """
    folder = environment.get("DOCKER_CONFIG") or f"{environment.get('HOME') or '/root'}/.docker"
    try:
        known = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["auths"]
        registry = registry_of(reference)
        entry = known.get(registry) or known.get(f"https://{registry}") or (known[_HUB_KEY] if registry == _HUB else {})
        user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, binascii.Error):
        return ""
    sent = {"username": user, "password": password, "serveraddress": registry}
    return base64.urlsafe_b64encode(json.dumps(sent).encode()).decode()
