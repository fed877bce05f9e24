"""Everything that the supervisor prints: its children's lines with a prefix, and its own."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

_QUEUE_LIMIT: Final = 10_000
_CLOSE_SECONDS: Final = 2.0
_CLOSE_PARTS: Final = 20
_COLOURS: Final = (36, 33, 32, 35, 34, 96, 93, 95)
_RED: Final = 31
_BOLD: Final = 1
SUPERVISOR: Final = "orchard"


class Output:
    """Writes lines in a thread of its own: a terminal that does not read stalls nobody; what does not fit is counted.

    With the format "json" every line is one JSON object: those of the services pass through as they are.
    """

    def __init__(
        self, stream: TextIO | None = None, *, log_format: Literal["text", "json"] = "text", colour: bool | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._json = log_format == "json"
        self._colour = _wants_colour(self._stream) if colour is None else colour
        self._numbers: dict[str, int] = {}
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """One line of a child."""
        if self._json and text.startswith("{"):
            self._put(text)
        elif self._json:
            self._put(_as_json(name, text, "info"))
        else:
            number = self._numbers.setdefault(name, len(self._numbers))
            prefix = self._paint(f"{name:<9} |", _COLOURS[number % len(_COLOURS)])
            self._put(f"{prefix} {text}")

    def say(self, text: str) -> None:
        """One line of our own."""
        self._own(text, "info", _BOLD)

    def shout(self, text: str) -> None:
        """Something that a person should see."""
        self._own(text, "error", _RED)

    def block(self, text: str) -> None:
        """Several lines for a person; nothing in JSON."""
        if not self._json:
            self._put(text)

    def _own(self, text: str, level: str, colour: int) -> None:
        if self._json:
            self._put(_as_json(SUPERVISOR, text, level))
        else:
            self._put(self._paint(f"{SUPERVISOR:<9} | {text}", colour))

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour else text

    def _put(self, text: str) -> None:
        if self._queue.qsize() >= _QUEUE_LIMIT:
            self._dropped += 1
            return
        self._tell_dropped()
        self._queue.put(text)

    def _tell_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._queue.put(f"... {dropped} lines were dropped: the output was not read")

    def _write(self) -> None:
        while (text := self._queue.get()) is not None:
            self._print(text + "\n")
        self._print("")

    def _print(self, text: str) -> None:
        # The reader may be gone; the platform goes on.
        with suppress(OSError, ValueError):
            self._stream.write(text)
            if self._queue.empty():
                self._stream.flush()

    def close(self) -> None:
        """Write what is queued, for two seconds at most."""
        self._tell_dropped()
        self._queue.put(None)
        # In small parts: while the whole process stands still, the time of one of them passes at most.
        for _ in range(_CLOSE_PARTS):
            self._thread.join(_CLOSE_SECONDS / _CLOSE_PARTS)


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _as_json(name: str, text: str, level: str) -> str:
    stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": text, "service": name, "level": level, "timestamp": stamp}, ensure_ascii=False)
