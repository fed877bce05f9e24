"""An API server of scripted answers, on a clock of the test, and a watch of Pods that asks it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson

from services.common.observed import Observed
from services.common.states import State
from services.watcher.model import Bookmark, Interrupted, Restarted, Seen, Synced
from services.watcher.pod_watch import ConnectionLostError, PodWatch, Timing

SELECTOR = "app=sandbox"
BACKSTOP = 110


def pod(name: str, version: int) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"uid": name, "resourceVersion": str(version)}}


def line(kind: str, thing: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"type": kind, "object": thing}) + b"\n"


def change(name: str, version: int, kind: str = "MODIFIED") -> bytes:
    return line(kind, pod(name, version))


def bookmark(version: int, *, end: bool = False) -> bytes:
    notes = {"annotations": {"k8s.io/initial-events-end": "true"}} if end else {}
    return line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version), **notes}})


def error(code: int, reason: str, **details: Any) -> bytes:
    return line("ERROR", {"kind": "Status", "code": code, "reason": reason, "message": "m", "details": details})


def pods_of(version: int, *found: dict[str, Any], more: str = "") -> bytes:
    metadata = {"resourceVersion": str(version), **({"continue": more} if more else {})}
    return orjson.dumps({"kind": "PodList", "metadata": metadata, "items": found})


def project(thing: dict[str, Any], *, removed: bool = False, complete_revision: int = 0) -> Seen:
    metadata = thing["metadata"]
    state = State.DELETED if removed else State.STARTING
    observed = Observed("t", "id", metadata["uid"], int(metadata["resourceVersion"]), state)
    return Seen(observed, 0, complete_revision=complete_revision)


LOST = ConnectionLostError("reset")
SILENT = ConnectionLostError("nothing for 75 s", silent=True)
FOR_EVER = None
"""Nothing more, and the script is over."""
NOTHING_MORE = "nothing more"


class Answer:
    """An answer of so many chunks, then its end, an error, or nothing for ever."""

    def __init__(
        self, *parts: bytes | str | Exception | None, status: int = 200, retry_after: str = "", lasts: float = 60
    ) -> None:
        self.parts = parts
        self.status = status
        self.retry_after = retry_after
        self.lasts = lasts
        self.open = False
        self.over = asyncio.Event()
        self.pass_by: Callable[[float], None] = lambda _seconds: None

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if part is FOR_EVER:
                self.over.set()
            if part in (FOR_EVER, NOTHING_MORE):
                await asyncio.Event().wait()
            if isinstance(part, Exception):
                self.pass_by(self.lasts)
                raise part
            yield part
        self.pass_by(self.lasts)


class Server:
    """Gives scripted answers in turn, on a clock that answers and waits move."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.answer_seconds: list[float] = []
        self.read_seconds: list[float] = []
        self.forgotten = 0
        self.now = 0.0
        self.waits: list[float] = []
        self.snapshot_seconds = float(BACKSTOP)
        self.over = asyncio.Event()
        """Nothing more will come."""

    @asynccontextmanager
    async def get(
        self, query: Mapping[str, str], *, answer_seconds: float, read_seconds: float
    ) -> AsyncIterator[Answer]:
        self.asked.append(dict(query))
        self.answer_seconds.append(answer_seconds)
        self.read_seconds.append(read_seconds)
        answer = self.answers.pop(0) if self.answers else Answer(FOR_EVER)
        if isinstance(answer, Exception):
            raise answer
        answer.pass_by, answer.over = self.pass_by, self.over
        answer.open = True
        try:
            yield answer
        finally:
            answer.open = False

    def forget_credentials(self) -> None:
        self.forgotten += 1

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    @property
    def versions(self) -> list[str]:
        """From which version each request asked on; "" for a new snapshot."""
        return [query.get("resourceVersion", "") for query in self.asked]


class Longest(random.Random):
    """Waits as long as it may."""

    def uniform(self, a: float, b: float) -> float:
        return b


def watch_of(server: Server, rng: random.Random | None = None) -> PodWatch:
    return PodWatch(
        server,
        project,
        SELECTOR,
        Timing(snapshot=server.snapshot_seconds),
        rng=rng or Longest(),
        clock=lambda: server.now,
        sleep=server.sleep,
    )


def shown(event: Any) -> str:
    if isinstance(event, Seen):
        gone = "-" if event.observed.state is State.DELETED else ""
        return f"{gone}{event.observed.uid}{event.observed.revision}"
    return {Restarted: "restarted", Synced: "synced", Bookmark: "bookmark", Interrupted: "interrupted"}[type(event)]


async def run(server: Server, rng: random.Random | None = None) -> str:
    """What comes until the script is over, in a few words."""
    watch = watch_of(server, rng)
    return await told_by(watch, server)


async def told_by(watch: PodWatch, server: Server) -> str:
    told = []
    events = watch.events()
    over = asyncio.ensure_future(server.over.wait())
    async with asyncio.timeout(BACKSTOP):
        while True:
            following = asyncio.ensure_future(anext(events))
            await asyncio.wait((following, over), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                break
            told.append(shown(following.result()))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await events.aclose()
    return " ".join(told)


SNAPSHOT = (change("a", 3, "ADDED"), change("b", 2, "ADDED"), bookmark(5, end=True))
