"""Structured logs that carry the call's request id and trace id, through the standard library's logging.

`ORCHARD_LOG_FORMAT=json` writes one JSON object a line, otherwise a line for people. Anything whose name speaks of a
secret is hidden. No logging package: the agent lives in other people's images and counts its megabytes.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

call_fields: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("call_fields", default=None)
"""Fields of the call that is being served; the interceptor sets them."""

LEVELS: Final = ("debug", "info", "warning", "error")
_SECRET_WORDS: Final = ("secret", "password", "authorization", "api_key", "private", "token")
_FIELDS: Final = "orchard_fields"


class Logger:
    """Writes events with fields: `log.info("sandbox ready", sandbox_id=...)`; `exc_info=error` adds its traceback."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        """For the developer."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something happened as it should."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something is odd; the service copes."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something failed."""
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            error = fields.pop("exc_info", None)
            self._logger.log(level, "%s", event, exc_info=error, extra={_FIELDS: fields})


class _Formatter(logging.Formatter):
    def __init__(self, service: str, *, json_format: bool) -> None:
        super().__init__()
        self._service = service
        self._json = json_format

    def format(self, record: logging.LogRecord) -> str:
        fields = _shown({**(call_fields.get() or {}), **getattr(record, _FIELDS, {})})
        error = record.exc_info[1] if record.exc_info else None
        trace = "".join(traceback.format_exception(error)).rstrip() if error is not None else ""
        if self._json:
            known = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
                "level": record.levelname.lower(),
                "service": self._service,
                "module": record.name,
                "event": record.getMessage(),
                **({"exception": trace} if trace else {}),
            }
            return json.dumps({**fields, **known}, default=str)
        parts = [
            f"{record.levelname.lower():<8}{record.getMessage()}",
            *(f"{key}={_on_one_line(value)}" for key, value in fields.items()),
        ]
        return " ".join(parts) + (f"\n{trace}" if trace else "")


def _on_one_line(value: object) -> str:
    """A value as text; quoted where it could be taken for another line or another field."""
    text = str(value)
    return text if text.isprintable() else json.dumps(text)


def _shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: "[hidden]" if any(word in key.lower() for word in _SECRET_WORDS) else value
        for key, value in fields.items()
    }


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to whatever standard error is at that moment; it may have been replaced since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(service: str, *, level: str = "info", json_format: bool = False) -> None:
    """Set up this process's logs; called once, in `__main__`.

    Raises:
        ValueError: the level is not one of LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(service, json_format=json_format))
    # Libraries speak only of what needs attention.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for ours in ("services", "orchard"):
        logging.getLogger(ours).setLevel(level.upper())


def get_logger(name: str) -> Logger:
    """The logger of a module."""
    return Logger(name)
