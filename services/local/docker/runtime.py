"""The docker runtime as the node daemon uses it: makes containers, follows their ends, removes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.common.backoff import Backoff
from services.common.logs import get_logger
from services.local.docker.carrying import carried_out, give_up
from services.local.docker.container import (
    KEYS_LABEL,
    UID_LABEL,
    Place,
    annotations_of,
    configuration,
    hash_of_keys,
    make_folders,
    make_link,
    why_ended,
)
from services.local.docker.engine import Container, Engine, EngineAwayError, EngineError, ImageFacts
from services.local.docker.images import Puller
from services.local.runtime.model import Abilities, Ended, Image, Reason, Request, new_uid
from services.local.runtime.removal import RemovalError, remove_tree
from services.local.runtime.steps import StartError

_log = get_logger(__name__)

_LISTEN_POLL_SECONDS: Final = 0.01
_CONNECT_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 1.0
_RESYNC_SECONDS: Final = 30.0
_DOUBT_SECONDS: Final = 3.0  # from the first container that a stopping engine ends to its own end
_REMOVED_SECONDS: Final = 20.0
_REMOVED_POLL_SECONDS: Final = 0.05
_CLOSE_SECONDS: Final = 25.0
_LOG_LINES: Final = 5


@dataclass(slots=True)
class _Live:
    """A sandbox whose container is there, or is being made."""

    container: str = ""
    making: asyncio.Task[None] | None = None
    deleting: bool = False
    suspect_at: float = 0.0
    """When it was found ended for a reason that is not clear yet; 0: it was not."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class DockerRuntime:
    """See services.local.node.service.Runtime."""

    def __init__(
        self,
        engine: Engine,
        place: Place,
        puller: Puller,
        *,
        public_keys_pem: Callable[[], str],
        concurrent_starts: int,
    ) -> None:
        self._engine = engine
        self._place = place
        self._puller = puller
        self._public_keys_pem = public_keys_pem
        self._slots = asyncio.Semaphore(concurrent_starts)
        self._live: dict[str, _Live] = {}
        self._ends: asyncio.Queue[Ended] = asyncio.Queue()
        self._away = False

    def abilities(self) -> Abilities:
        """What this machine can do."""
        facts = self._place.engine
        gaps = ["disk is not limited: the engine cannot do it with most storage drivers"]
        if not facts.cgroup_version:
            gaps.append("memory is not limited: the engine has no memory control groups")
        if not facts.networks:
            gaps.append("no sandbox has a network: the engine has none named bridge")
        limits = f"cgroup-v{facts.cgroup_version}" if facts.cgroup_version else "none"
        return Abilities("engine", limits, tuple(gaps))

    def endpoint(self, uid: str) -> str:
        """Address (gRPC) of a sandbox's agent."""
        return f"unix:{self._place.socket(uid)}"

    def reserve(self, request: Request) -> str:  # noqa: ARG002
        """The uid that the sandbox of this request is to have."""
        return new_uid()

    # Making

    async def create(self, request: Request, image: Image | None) -> dict[str, float]:  # noqa: ARG002
        """Make a sandbox; returns when its agent listens. An engine that is away is waited for.

        Raises:
            StartError: it could not be made; nothing of it runs.
            PullError: its image cannot be had.
        """
        live = self._live[request.uid] = _Live()
        live.making = asyncio.get_running_loop().create_task(self._make(request, live), name=f"make {request.uid}")
        try:
            await asyncio.shield(live.making)
        except asyncio.CancelledError:
            if not live.making.cancelled():
                # The daemon stops; what comes after finds all that this has made.
                give_up(live.making)
                await asyncio.wait([live.making])
                raise
            raise StartError("it was deleted while it was made") from None
        except BaseException:
            del self._live[request.uid]
            raise
        else:
            if live.ended.is_set():  # while it was made, and until here
                del self._live[request.uid]
                raise await self._failed(request.uid, live, "its container ended at once")
        finally:
            live.making = None
        return {}

    def give_up(self, uid: str) -> None:
        """Cut short a create that is under way: it is to be deleted."""
        live = self._live.get(uid)
        if live is not None and live.making is not None:
            give_up(live.making)

    async def _make(self, request: Request, live: _Live) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(0.1, 2.0)
        patience = request.start_seconds  # apart from pulls
        while True:
            try:
                image = await self._puller.have(request.image, request.pull_seconds)
                async with self._slots:
                    began = loop.time()
                    try:
                        async with asyncio.timeout(max(patience, _LEAST_SECONDS)):
                            await self._make_once(request, live, image)
                            return
                    finally:
                        patience -= loop.time() - began
            except EngineAwayError as error:
                if patience <= 0:
                    raise StartError(str(error)) from None
                _log.warning("a sandbox waits for the engine", uid=request.uid, why=str(error))
            except EngineError as error:
                raise await self._failed(request.uid, live, f"the engine refuses: {error}") from None
            except RemovalError as error:
                raise await self._failed(request.uid, live, f"what an earlier attempt left: {error}") from None
            except TimeoutError:  # an OSError, too
                why = f"its agent did not listen within {request.start_seconds:g} s"
                raise await self._failed(request.uid, live, why) from None
            except OSError as error:
                why = f"its folder cannot be made: {error.strerror or error}"
                raise await self._failed(request.uid, live, why) from None
            delay = backoff.next()
            patience -= delay
            await asyncio.sleep(delay)

    async def _make_once(self, request: Request, live: _Live, image: ImageFacts) -> None:
        place, uid, keys = self._place, request.uid, self._public_keys_pem()
        live.container = ""  # what is still told of an earlier attempt is of no use
        await self._gone(place.name(uid))  # of an attempt that an engine did not survive
        await carried_out(asyncio.to_thread(make_folders, place, request, image, keys))
        live.ended.clear()
        wanted = configuration(place, request, image, keys)
        live.container = await carried_out(self._engine.create(place.name(uid), wanted))
        await self._engine.start(live.container)
        ended = asyncio.ensure_future(live.ended.wait())
        try:
            while not ended.done() and not await _listens(place.socket(uid)):
                await asyncio.wait([ended], timeout=_LISTEN_POLL_SECONDS)
        finally:
            ended.cancel()

    async def _failed(self, uid: str, live: _Live, why: str) -> StartError:
        """The error to raise; what there is of the sandbox goes."""
        with suppress(EngineAwayError, EngineError):  # then the next look at all containers removes it
            words = await self._engine.log_of(live.container, _LOG_LINES) if live.container else ""
            why = f"{why}; it wrote: {words}" if words else why
            await self._engine.remove(self._place.name(uid))
        await asyncio.to_thread(self._remove_folder, uid)
        return StartError(why)

    # Following

    async def follow(self) -> None:
        """Learn of containers that end, for as long as the daemon runs; an engine that is away is waited for."""
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                async with self._engine.events(self._place.label) as ends:
                    await self._look(after_absence=self._away)
                    if self._away:
                        _log.info("the engine is back")
                    self._away = False
                    backoff.reset()
                    await self._follow(ends)
            except (EngineAwayError, EngineError) as error:
                if not self._away:
                    _log.warning("the engine is away; sandboxes are looked at when it is back", why=str(error))
                self._away = True
            await asyncio.sleep(backoff.next())

    async def _follow(self, ends: AsyncIterator[str]) -> None:
        """Until the stream ends. An engine that is stuck is found out by the looks between."""
        coming = asyncio.ensure_future(anext(ends))
        try:
            while True:
                done, _ = await asyncio.wait([coming], timeout=self._patience())
                if done:
                    container = coming.result()
                    for uid in [uid for uid, live in self._live.items() if live.container == container]:
                        await self._judge(uid, container, after_absence=False)
                    coming = asyncio.ensure_future(anext(ends))
                else:
                    await self._look(after_absence=False)
        except StopAsyncIteration:
            raise EngineAwayError("the engine ended its stream of events") from None
        finally:
            coming.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration, EngineAwayError):
                await coming

    def _patience(self) -> float:
        """Until the next look."""
        suspects = [live for live in self._live.values() if live.suspect_at and not live.deleting]
        since = [live.suspect_at for live in suspects if not live.ended.is_set()]
        now = asyncio.get_running_loop().time()
        return min([_RESYNC_SECONDS, *(max(0.0, at + _DOUBT_SECONDS - now) for at in since)])

    async def _look(self, *, after_absence: bool) -> None:
        """Compare what is there with what should be."""
        known = dict(self._live)
        found = {one.labels.get(UID_LABEL, ""): one for one in await self._engine.containers(self._place.label)}
        for uid, live in known.items():
            one = found.get(uid)
            if live.making is None and (one is None or not one.lives):
                # One that was being made when the list was is not in it.
                await self._judge(uid, live.container, after_absence=after_absence)
            elif one is not None and one.lives:
                live.suspect_at = 0.0
        for uid, one in found.items():
            if uid not in known and uid not in self._live and one.status != "removing":
                _log.warning("removing a container that no sandbox knows", container=one.name)
                await self._engine.remove(one.id)
                await asyncio.to_thread(self._remove_folder, uid)

    async def _judge(self, uid: str, its: str, *, after_absence: bool) -> None:
        container, live = await self._engine.inspect(its), self._live.get(uid)
        lives = container is not None and container.lives
        if lives or live is None or live.container != its or live.deleting or live.ended.is_set():
            return
        if live.making is not None:
            live.ended.set()  # whoever makes it tells why
            return
        log = "" if container is None else await self._engine.log_of(container.id, _LOG_LINES)
        end = why_ended(uid, container, engine_was_away=after_absence, log=log)
        if container is not None and end.reason is Reason.DELETED_EXTERNALLY:
            # An engine that is stopped ends its containers first, and tells of that as of any other end.
            now = asyncio.get_running_loop().time()
            live.suspect_at = live.suspect_at or now
            if now < live.suspect_at + _DOUBT_SECONDS:
                return
            if not await self._engine.serves_others():
                live.suspect_at = now  # it may take long over that
                return
        live.ended.set()
        await self._ends.put(end)

    async def watch(self) -> AsyncIterator[Ended]:
        """Sandboxes that end though nobody deleted them, as they do."""
        while True:
            yield await self._ends.get()

    # Taking over

    async def unrecorded(self, recorded: set[str]) -> list[tuple[str, Mapping[str, str]]]:
        """Sandboxes that live though their uid is not recorded, and what a record is rebuilt from."""
        keys = hash_of_keys(self._public_keys_pem())
        return [
            (uid, annotations_of(one.labels))
            for one in await self._engine.containers(self._place.label)
            # An agent with other keys would never believe our gateway.
            if (uid := one.labels.get(UID_LABEL, "")) not in recorded
            and one.status == "running"
            and one.labels.get(KEYS_LABEL) == keys
        ]

    async def adopt(self, known: Sequence[tuple[Request, Image | None]]) -> list[Ended]:
        """See Runtime."""
        found = {one.labels.get(UID_LABEL, ""): one for one in await self._engine.containers(self._place.label)}
        ended = []
        for request, _ in known:
            uid = request.uid
            end = await self._adopt_one(uid, found.get(uid))
            if end is not None:
                ended.append(end)
        wanted = {request.uid for request, _ in known}
        for one in found.values():
            if one.labels.get(UID_LABEL, "") not in wanted:
                await self._engine.remove(one.id)
        await asyncio.to_thread(self._remove_other_folders, wanted)
        return ended

    async def _adopt_one(self, uid: str, one: Container | None) -> Ended | None:
        if one is not None and one.status in ("running", "paused"):
            await asyncio.to_thread(make_link, self._place, uid)
            self._live[uid] = _Live(container=one.id)
            return None
        if one is not None and one.status != "created":
            seen = await self._engine.inspect(one.id)
            if seen is not None:
                log = await self._engine.log_of(one.id, _LOG_LINES)
                return why_ended(uid, seen, engine_was_away=True, log=log)
        if one is None and self._place.folder(uid).exists():
            return why_ended(uid, None, engine_was_away=True, log="")
        return Ended(uid, Reason.HOST_RESTART, "the platform was stopped or restarted under it")

    # Removing

    async def delete(self, uid: str) -> None:
        """End a sandbox and remove everything of it.

        Raises:
            RemovalError: it does not go away.
        """
        live = self._live.get(uid)
        if live is not None:
            live.deleting = True
        name = self._place.name(uid)
        try:
            await self._gone(name)
        except (EngineAwayError, EngineError) as error:
            raise RemovalError(f"its container {name} cannot be removed: {error}") from None
        self._live.pop(uid, None)
        await asyncio.to_thread(self._remove_folder, uid)

    async def _gone(self, name: str) -> None:
        """Remove a container, and return once it is no more: its name is free then.

        Raises:
            RemovalError: it does not go away.
        """
        try:
            async with asyncio.timeout(_REMOVED_SECONDS):
                # False also where somebody else removes it right now: then wait until it is gone.
                while not await self._engine.remove(name) and await self._engine.inspect(name) is not None:  # noqa: ASYNC110
                    await asyncio.sleep(_REMOVED_POLL_SECONDS)
        except TimeoutError:
            raise RemovalError(f"its container {name} is being removed and does not go") from None

    async def close(self, *, platform_ends: bool) -> None:
        """Stop. Sandboxes live on, unless the platform ends: then they go."""
        for uid in self._live:
            self.give_up(uid)
        if not platform_ends:
            return
        self_ending = [self.delete(uid) for uid in list(self._live)]
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                results = await asyncio.gather(*self_ending, return_exceptions=True)
                errors = [str(result) for result in results if isinstance(result, BaseException)]
        except TimeoutError:
            errors = [f"they were not gone within {_CLOSE_SECONDS:g} s"]
        if errors:
            _log.warning("containers are left for the next start to remove", why=errors[0], count=len(errors))

    def _remove_folder(self, uid: str) -> None:
        self._place.link(uid).unlink(missing_ok=True)
        try:
            remove_tree(self._place.folder(uid))
        except OSError as error:
            # What a sandbox's root puts beside its socket is root's, also where this daemon is an ordinary user's.
            _log.warning("a folder is left behind", folder=str(self._place.folder(uid)), error=str(error))

    def _remove_other_folders(self, wanted: set[str]) -> None:
        for folder in self._place.sandboxes.iterdir():
            if folder.name not in wanted:
                self._remove_folder(folder.name)


async def _listens(socket: Path) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_unix_connection(str(socket))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
