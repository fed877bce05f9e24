"""Settings of judges: a JSON file with a list of them. Keys are named there, never written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from services.common.settings import SettingsError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SECRET: Final = re.compile(
    r"key|token(?!s|iz)|secret|passw|credential|authori[sz]ation|bearer|cookie|signature|session", re.IGNORECASE
)
"""Names of fields whose values are not shown. `max_tokens` and `tokenizer` are none."""
_SECRET_VALUE: Final = re.compile(r"(Bearer|Basic) |sk-")
HIDDEN: Final = "(hidden)"


class ScriptRule(BaseModel):
    """What a scripted judge says of tasks whose instruction contains a text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    contains: str = Field(description="Part of the instruction; of the task alone, never of what an agent wrote.")
    score: float = Field(ge=0, le=1, description="What it gives: from 0.5 on a success, each criterion on its grid.")
    scores: dict[str, float] = Field(default_factory=dict, description="By criterion, instead of the score.")
    values: dict[int, float] = Field(default_factory=dict, description="By state of a value curve.")
    abstain: bool = False


class JudgeSettings(BaseModel):
    """One judge."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    kind: Literal["openai", "anthropic", "scripted"]
    model: str = Field(default="scripted", min_length=1, max_length=256)
    base_url: str | None = None
    api_key_env: str | None = Field(default=None, description="Variable that has the key.")
    api_key_file: Path | None = Field(default=None, description="File that has the key.")
    concurrency: int = Field(default=16, ge=1, le=1000, description="Calls at once.")
    queue: int = Field(default=16_384, ge=1, description="Calls that may wait for their turn.")
    requests_per_minute: float = Field(default=0, ge=0, description="Calls a minute; 0: no limit.")
    timeout_seconds: float = Field(default=180, gt=0, le=1800, description="Of one call.")
    attempts: int = Field(default=4, ge=1, le=10, description="Calls for one answer at most.")
    first_delay_seconds: float = Field(default=1.0, ge=0, le=60, description="Bound of the first delay; it doubles.")
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Fields that the API has beyond ours.")
    prompt_usd_per_million: float = Field(default=0, ge=0)
    completion_usd_per_million: float = Field(default=0, ge=0)
    cached_usd_per_million: float | None = Field(default=None, ge=0, description="Default: as other prompt tokens.")
    script: tuple[ScriptRule, ...] = ()

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        try:
            good = value is None or bool(
                (parts := urlsplit(value)).scheme in ("http", "https") and parts.hostname and parts.port != 0
            )
        except ValueError:  # brackets without an address, or a port that is none
            good = False
        if not good:
            # Not shown: it may have a password.
            raise ValueError("is no address, like http://localhost:8000/v1")
        return value

    @field_validator("api_key_file")
    @classmethod
    def _is_at_home(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    @field_validator("extra_body")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Python reads NaN, Infinity and halves of surrogate pairs, which no server would.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        try:
            orjson.dumps(value)  # as it is sent; a whole number has at most 64 bits
        except orjson.JSONEncodeError as error:
            raise ValueError(f"cannot be sent: {error}") from None
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kind == "scripted":
            return self
        missing = [
            name for name in ("model", "base_url") if name not in self.model_fields_set or not getattr(self, name)
        ]
        if missing:
            raise ValueError(f"{' and '.join(missing)} must be given for kind {self.kind}")
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file exclude each other")
        return self

    def key(self, environment: Mapping[str, str] = os.environ) -> str:
        """The API key; servers on one's own machines may need none.

        Raises:
            SettingsError: it is not there.
        """
        if self.api_key_file is not None:
            where = f"judge {self.name}: api_key_file {self.api_key_file}"
            try:
                key = self.api_key_file.read_text(encoding="utf-8", errors="replace").strip()
            except OSError as error:
                raise SettingsError(f"{where} cannot be read ({error.strerror})") from None
        elif self.api_key_env is not None:
            where = f"judge {self.name}: api_key_env {self.api_key_env}"
            key = environment.get(self.api_key_env, "").strip()
        else:
            return "none"
        if not key:
            raise SettingsError(f"{where} has no key")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise SettingsError(f"{where} has more than a key: a space, a second line, or what is no ASCII")
        return key

    def described(self) -> dict[str, Any]:
        """`identity` as anybody may read it: without what an address or a field of the API may have of secrets."""
        found = self.identity()
        if self.base_url is not None:
            parts = urlsplit(self.base_url)
            found["base_url"] = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        found["extra_body"] = _shown(found["extra_body"])
        return found

    def identity(self) -> dict[str, Any]:
        """What its answers depend on; part of what stored verdicts are found by, and only ever hashed. No key."""
        names = {"name", "kind", "model", "base_url", "structured", "extra_body"}
        found = self.model_dump(mode="json", include=names)
        if self.kind == "scripted":
            found["script"] = [rule.model_dump(mode="json") for rule in self.script]
        return found

    def cost_usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> float:
        """What so many tokens cost."""
        cached_price = (
            self.prompt_usd_per_million if self.cached_usd_per_million is None else self.cached_usd_per_million
        )
        fresh = max(prompt_tokens - cached_tokens, 0)
        total = fresh * self.prompt_usd_per_million + cached_tokens * cached_price
        return (total + completion_tokens * self.completion_usd_per_million) / 1e6


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: HIDDEN if _SECRET.search(name) else _shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    return HIDDEN if isinstance(value, str) and _SECRET_VALUE.match(value) else value


_JUDGES: Final = TypeAdapter(tuple[JudgeSettings, ...])


def load_judges(path: Path) -> tuple[JudgeSettings, ...]:
    """The judges of a file, the first being the default.

    Raises:
        SettingsError: the file cannot be used; says where.
    """
    try:
        judges = _JUDGES.validate_python(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number))
    except OSError as error:
        raise SettingsError(f"ORCHARD_JUDGES_FILE: {path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        problems = "; ".join(_problem(problem) for problem in error.errors(include_url=False))
        raise SettingsError(f"ORCHARD_JUDGES_FILE: {path}: {problems}") from None
    except ValueError as error:
        raise SettingsError(f"ORCHARD_JUDGES_FILE: {path} is no JSON ({error})") from None
    names = [judge.name for judge in judges]
    if not names:
        raise SettingsError(f"ORCHARD_JUDGES_FILE: {path} needs at least one judge")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"ORCHARD_JUDGES_FILE: {path} needs each name once, and has more of {', '.join(twice)}")
    return judges


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _problem(problem: ErrorDetails) -> str:
    """Place, and what to write there. No value is told: it may be a secret."""
    place = "/".join(map(str, problem["loc"]))
    field = str(problem["loc"][-1]) if problem["loc"] else ""
    if not place:
        return 'must be a list of judges, like [{"name": "main", "kind": "scripted"}]'
    if problem["type"] == "extra_forbidden":
        if _SECRET.search(field):
            return f"{place}: keys are named, never written: use api_key_env or api_key_file"
        fields = ScriptRule.model_fields if "script" in problem["loc"] else JudgeSettings.model_fields
        return f"{place}: is no field; there are {', '.join(fields)}"
    if problem["type"] == "string_pattern_mismatch":
        return f"{place}: must be 1 to 64 of a-z, 0-9, '_', '.' and '-', beginning with a letter or digit"
    return f"{place}: {problem['msg'].removeprefix('Value error, ')}"
