"""Structured logs that carry the call's request id and trace id.

`ORCHARD_LOG_FORMAT=json` writes one JSON object a line, otherwise a line for people. Anything whose name speaks of a
secret is hidden.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from contextlib import suppress
from typing import Final, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

call_fields: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("call_fields", default=None)
"""Fields of the call that is being served; the interceptor sets them."""

LEVELS: Final = ("debug", "info", "warning", "error")
_SECRET_WORDS: Final = ("secret", "password", "authorization", "api_key", "private", "token")


class _Stderr:
    """Whatever standard error is when a line is written; it may have been replaced since."""

    def write(self, text: str) -> int:
        # A service whose supervisor was killed has nobody who reads, and must still stop in order.
        with suppress(OSError, ValueError):
            return sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def _add_call_fields(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key, value in (call_fields.get() or {}).items():
        event.setdefault(key, value)
    return event


def _hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key in event:
        if any(word in key.lower() for word in _SECRET_WORDS):
            event[key] = "[hidden]"
    return event


def configure(service: str, *, level: str = "info", json_format: bool = False) -> None:
    """Set up this process's logs; called once, in `__main__`.

    Raises:
        ValueError: the level is not one of LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, not {level!r}")

    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[structlog.typing.Processor] = [_add_call_fields, _hide_secrets, structlog.processors.add_log_level]
    rendering: list[structlog.typing.Processor] = (
        [
            add_service,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
        if json_format
        else [structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)]
    )
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )
    # Libraries speak through the standard library: only what needs attention.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module: `log.info("sandbox ready", sandbox_id=...)`."""
    logger: FilteringBoundLogger = structlog.get_logger(module=name)
    return logger
