"""The process runtime as the node daemon uses it: makes sandboxes, watches over their processes, removes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.common.logs import get_logger
from services.local.runtime import cgroups, linux
from services.local.runtime.cgroups import Limits
from services.local.runtime.identity import Identity, has_ended, kill
from services.local.runtime.model import Abilities, Ended, Image, Reason, Request, new_uid
from services.local.runtime.plan import RUN_MAP_TOOLS, Plan
from services.local.runtime.planning import RESOLVER_FILE, Planner, limits_of
from services.local.runtime.recorded import end_recorded, open_agent, read_record
from services.local.runtime.removal import RemovalError, remove_tree
from services.local.runtime.removals import MappedRemovals
from services.local.runtime.setup import Machine
from services.local.runtime.spares import Spare, Spares
from services.local.runtime.steps import SOCKET_NAME, StartError
from services.local.runtime.zygote_client import Answer, Zygote, ZygoteDiedError, ZygoteError

_log = get_logger(__name__)

_LISTEN_SECONDS: Final = 2.0
_LISTEN_POLL_SECONDS: Final = 0.001
_KILL_SECONDS: Final = 10.0
_MOST_RESTARTS: Final = 5
_INIT_GRACE_SECONDS: Final = 1.0
_RESTART_WINDOW_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Live:
    """A sandbox whose init runs."""

    plan: Plan
    limits: Limits
    init: Identity
    init_fd: int
    agent_fd: int | None = None
    restarts: int = 0
    recent: deque[float] = field(default_factory=deque)
    deleting: bool = False
    joining: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    agent_ended: asyncio.Event = field(default_factory=asyncio.Event)


class ProcessRuntime:
    """See services.local.node.service.Runtime."""

    def __init__(
        self, machine: Machine, zygote: Zygote, *, public_keys_pem: Callable[[], str], spare_sandboxes: int = 0
    ) -> None:
        self._machine = machine
        self._planner = Planner(machine)
        self._zygote = zygote
        self._public_keys_pem = public_keys_pem
        self._spares = Spares(spare_sandboxes, self._make_spare)
        self._live: dict[str, _Live] = {}
        self._ends: asyncio.Queue[Ended] = asyncio.Queue()
        # Removing files and groups blocks; two threads keep the cores busy and a flood of deletes bounded.
        self._mapped_removals = MappedRemovals(machine.ids, zygote)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="removal")

    def abilities(self) -> Abilities:
        """What this machine can do."""
        return Abilities(self._machine.ids.level, self._machine.cgroups.version or "rlimits", self._machine.gaps)

    def endpoint(self, uid: str) -> str:
        """Address (gRPC) of a sandbox's agent."""
        return f"unix:{self._machine.socket_folder(uid)}/{SOCKET_NAME}"

    def reserve(self, request: Request) -> str:
        """See Runtime: of a spare, if one is ready and fits."""
        return (self._planner.fits_spare(request) and self._spares.reserve()) or new_uid()

    async def keep_spares(self) -> None:
        """Make sandboxes ahead of creates, for as long as it runs."""
        await self._spares.keep_full()

    async def create(self, request: Request, image: Image | None) -> dict[str, float]:
        """Make a sandbox; returns when its agent listens, with the milliseconds that each step took.

        Raises:
            StartError: it could not be made; nothing of it runs.
        """
        limits = limits_of(request)
        plan = self._planner.plan(request, image, self._public_keys_pem())
        with self._spares.others_first():
            answer = await self._claim(request.uid, plan, limits) or await self._make(request, plan, limits)
            live = self._watch_over(request.uid, plan, limits, answer)
            started = time.perf_counter()
            await self._listens(live, request.uid)
        return {**answer.milliseconds, "listen": round((time.perf_counter() - started) * 1e3, 2)}

    async def _make(self, request: Request, plan: Plan, limits: Limits) -> Answer:
        for _ in range(2):
            self._make_folders(request)
            try:
                return await self._ask(request.uid, plan, limits)
            except ZygoteError as error:
                raise StartError(str(error)) from None
            except ZygoteDiedError:
                await self._remove(request.uid)
        raise StartError("the process that agents are forked from died twice while it was being made")

    async def _make_spare(self) -> Spare:
        request = Request(uid=new_uid(), sandbox_id="")
        try:
            plan = self._planner.spare(request)
            return Spare(request.uid, await self._make(request, plan, limits_of(request)))
        except BaseException:
            await self._remove(request.uid)
            raise

    async def _claim(self, uid: str, plan: Plan, limits: Limits) -> Answer | None:
        """The spare that was reserved, as this sandbox; None: there is none, or it has ended meanwhile."""
        spare = self._spares.take(uid)
        if spare is None:
            return None
        try:
            cgroups.limit(self._machine.cgroups.paths(uid), limits)
            spare.tell(plan.agent or {})
        except OSError as error:
            _log.warning("a spare sandbox had ended before it was claimed", uid=uid, error=str(error))
            await self._discard(spare)
            return None
        return spare.answer

    async def _discard(self, spare: Spare) -> None:
        spare.close()
        await self._remove(spare.uid)

    async def _ask(self, uid: str, plan: Plan, limits: Limits) -> Answer:
        group = cgroups.open_group(self._machine.cgroups.paths(uid), limits)
        try:
            return await self._zygote.ask(plan, group)
        finally:
            group.close()

    async def adopt(self, known: Sequence[tuple[Request, Image | None]]) -> list[Ended]:
        """See Runtime."""
        await self._remove_others([request.uid for request, _ in known])
        ended = await asyncio.gather(*(self._adopt_one(request, image) for request, image in known))
        return [end for end in ended if end is not None]

    async def _adopt_one(self, request: Request, image: Image | None) -> Ended | None:
        folder = self._machine.sandbox_folder(request.uid)
        try:
            record = await asyncio.to_thread(read_record, folder)
            init_fd = record.init.open()
        except (OSError, ValueError):
            return Ended(request.uid, Reason.HOST_RESTART, "the platform was stopped or restarted under it")
        agent, agent_fd = record.agent, None
        if agent is None:
            os.close(init_fd)  # `create` or `delete` ends it
            return Ended(request.uid, Reason.HOST_RESTART, "the node daemon was restarted while it was being made")
        try:
            agent_fd = agent.open()
        except ProcessLookupError:
            agent = None
        plan = self._planner.plan(request, image, self._public_keys_pem())
        self._watch_over(request.uid, plan, limits_of(request), Answer(record.init, init_fd, agent, agent_fd, {}))
        return None

    async def watch(self) -> AsyncIterator[Ended]:
        """Sandboxes that end though nobody deleted them, as they do."""
        while True:
            yield await self._ends.get()

    async def delete(self, uid: str) -> None:
        """End a sandbox and remove everything of it.

        Raises:
            RemovalError: it does not go away.
        """
        spare, live = self._spares.take(uid), self._live.get(uid)
        if spare is not None:
            spare.close()
        if live is not None:
            live.deleting = True
            kill(live.init_fd)
            await self._gone(uid, live)
        await self._remove(uid)

    async def remove_tree(self, path: Path) -> None:
        """Remove a folder that has files of sandboxes' users.

        Raises:
            RemovalError: it cannot be removed.
            OSError: likewise.
        """
        if self._machine.ids.how == RUN_MAP_TOOLS:
            await self._mapped_removals.remove(str(path))
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, remove_tree, path)

    async def _remove(self, uid: str) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._remove_all_but_files, uid)
        await self.remove_tree(self._machine.sandbox_folder(uid))

    async def close(self, *, platform_ends: bool) -> None:
        """Stop watching over sandboxes. They live on, unless the platform ends: then their groups are removed."""
        for spare in self._spares.drain():
            try:
                await self._discard(spare)
            except (RemovalError, OSError) as error:
                _log.warning("a spare sandbox is left for the next start to remove", uid=spare.uid, error=str(error))
        if platform_ends:
            ends = [asyncio.ensure_future(live.ended.wait()) for live in self._live.values()]
            if ends:
                await asyncio.wait(ends, timeout=_KILL_SECONDS)
            for end in ends:
                end.cancel()
            try:
                await asyncio.to_thread(cgroups.remove_others, self._machine.cgroups, ())
            except OSError as error:
                _log.warning("control groups are left for the next start to remove", error=str(error))
        for live in list(self._live.values()):
            self._forget(live)
        self._live.clear()
        self._threads.shutdown(wait=False)
        cgroups.remove_parents(self._machine.cgroups)

    # What a sandbox is made of

    def _make_folders(self, request: Request) -> None:
        ids = self._machine.ids
        folder = self._machine.sandbox_folder(request.uid)
        folder.mkdir(mode=0o711)
        if request.host_network:
            resolver = Path("/etc/resolv.conf")
            (folder / RESOLVER_FILE).write_bytes(resolver.read_bytes() if resolver.exists() else b"")
            (folder / RESOLVER_FILE).chmod(0o644)
        for path in (folder / "state", self._machine.socket_folder(request.uid)):
            path.mkdir(mode=0o700)
            if ids.privileged:
                os.chown(path, ids.owner, ids.owner)

    # Its processes

    def _watch_over(self, uid: str, plan: Plan, limits: Limits, answer: Answer) -> _Live:
        live = _Live(plan=plan, limits=limits, init=answer.init, init_fd=answer.init_fd)
        self._live[uid] = live
        loop = asyncio.get_running_loop()
        loop.add_reader(live.init_fd, self._init_ended, uid, live)
        self._watch_agent(uid, live, answer.agent_fd)
        return live

    def _watch_agent(self, uid: str, live: _Live, descriptor: int | None) -> None:
        """None: it is gone."""
        if descriptor is None:
            self._agent_ended(uid, live)
            return
        live.agent_fd = descriptor
        live.agent_ended.clear()
        asyncio.get_running_loop().add_reader(descriptor, self._agent_ended, uid, live)

    def _agent_ended(self, uid: str, live: _Live) -> None:
        """The agent is gone; unless its sandbox is too, or is about to be, join a fresh one."""
        if live.agent_fd is not None:
            _stop_watching(live.agent_fd)
            live.agent_fd = None
        live.agent_ended.set()
        if live.deleting or has_ended(live.init_fd):
            return
        work = self._end_with_init(uid, live) if live.init.is_ending() else self._join_again(uid, live)
        live.joining = asyncio.get_running_loop().create_task(work, name=f"agent of {uid}")

    async def _join_again(self, uid: str, live: _Live) -> None:
        now = time.monotonic()
        live.recent.append(now)
        while live.recent and live.recent[0] < now - _RESTART_WINDOW_SECONDS:
            live.recent.popleft()
        if len(live.recent) > _MOST_RESTARTS:
            await self._fail(
                uid, live, f"its agent ended {len(live.recent)} times within a minute{self._last_words(uid)}"
            )
            return
        live.restarts += 1
        why = await asyncio.to_thread(self._why_agent_ended, uid)
        _log.warning("agent ended; joining a fresh one", uid=uid, restarts=live.restarts, why=why)
        fields = {**(live.plan.agent or {}), "restarts": live.restarts}
        plan = Plan(
            folder=live.plan.folder,
            socket_folder=live.plan.socket_folder,
            ids=live.plan.ids,
            host_network=live.plan.host_network,
            most_processes=live.plan.most_processes,
            agent=fields,
            init=live.init,
        )
        try:
            answer = await self._ask(uid, plan, live.limits)
        except ZygoteDiedError:
            # What it had recorded by then is an agent like any other; what it had not ends by itself.
            self._watch_agent(uid, live, await asyncio.to_thread(open_agent, self._machine.sandbox_folder(uid)))
            return
        except (StartError, ZygoteError, OSError) as error:
            # An init that is killed takes its agent first: then there is nothing to join, and no fault of the agent.
            if await self._has_ended_within(_INIT_GRACE_SECONDS, live):
                _log.info("the agent ended because its sandbox did; no fresh one is needed", uid=uid)
            else:
                await self._fail(uid, live, f"no fresh agent could be started: {error}")
            return
        os.close(answer.init_fd)
        self._watch_agent(uid, live, answer.agent_fd)

    async def _end_with_init(self, uid: str, live: _Live) -> None:
        """Wait for the end that has begun. A process inside that the kernel holds keeps it off, for ever perhaps, and
        there is no agent any more.
        """
        if not await self._has_ended_within(_KILL_SECONDS, live):
            await self._fail(uid, live, f"its first process, {live.init.pid}, is ending and does not end")

    @staticmethod
    async def _has_ended_within(seconds: float, live: _Live) -> bool:
        """Whether a sandbox has ended by then, or is being deleted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await live.ended.wait()
        return live.deleting or live.ended.is_set()

    async def _fail(self, uid: str, live: _Live, message: str) -> None:
        live.deleting = True
        kill(live.init_fd)
        await self._ends.put(Ended(uid, Reason.AGENT_START, message))

    def _init_ended(self, uid: str, live: _Live) -> None:
        asyncio.get_running_loop().remove_reader(live.init_fd)
        live.ended.set()
        if live.deleting:
            return
        if linux.killed_for_memory(live.init.pid, live.init.start):
            end = Ended(uid, Reason.OOM, "the machine ran out of memory and ended it as a whole")
        else:
            end = Ended(uid, Reason.DELETED_EXTERNALLY, "its first process was ended from outside")
        self._ends.put_nowait(end)

    async def _gone(self, uid: str, live: _Live) -> None:
        """Wait until all of its processes are."""
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await live.ended.wait()
                if live.joining is not None:
                    await asyncio.wait([live.joining])
                if live.agent_fd is not None:
                    await live.agent_ended.wait()
        except TimeoutError:
            raise RemovalError(
                f"process {live.init.pid} of sandbox {uid} was killed and does not end: the kernel "
                "holds it, most often in I/O to a file system that does not answer"
            ) from None
        self._forget(live)
        self._live.pop(uid, None)

    def _forget(self, live: _Live) -> None:
        _stop_watching(live.init_fd)
        if live.agent_fd is not None:
            _stop_watching(live.agent_fd)
            live.agent_fd = None

    async def _listens(self, live: _Live, uid: str) -> None:
        """Wait until the agent accepts connections. One that takes longer is the watcher's to judge."""
        path = f"{self._machine.socket_folder(uid)}/{SOCKET_NAME}"
        deadline = time.monotonic() + _LISTEN_SECONDS
        while time.monotonic() < deadline and not live.ended.is_set():
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(path)
                except OSError:
                    pass
                else:
                    return
            await asyncio.sleep(_LISTEN_POLL_SECONDS)

    def _why_agent_ended(self, uid: str) -> str:
        """What can be told of it: how a process ended is known to its parent alone, and to the kernel's log."""
        try:
            agent = read_record(self._machine.sandbox_folder(uid)).agent
        except (OSError, ValueError):
            agent = None
        if agent is not None and linux.killed_for_memory(agent.pid, agent.start):
            return "the kernel killed it for lack of memory"
        return f"nothing in the kernel's log{self._last_words(uid) or '; it was killed'}"

    def _last_words(self, uid: str) -> str:
        try:
            lines = (self._machine.sandbox_folder(uid) / "agent.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    # Its files

    async def _remove_others(self, known: list[str]) -> None:
        """What daemons before this one were still removing when they ended."""
        machine = self._machine
        uids = {path.name for parent in (machine.sandboxes, machine.sockets) for path in parent.iterdir()}
        for uid in uids - set(known):
            await self._remove(uid)
        await asyncio.to_thread(cgroups.remove_others, machine.cgroups, known)

    def _remove_all_but_files(self, uid: str) -> None:
        end_recorded(self._machine.sandbox_folder(uid))
        cgroups.remove_group(self._machine.cgroups.paths(uid))
        shutil.rmtree(self._machine.socket_folder(uid), ignore_errors=True)


def _stop_watching(descriptor: int) -> None:
    asyncio.get_running_loop().remove_reader(descriptor)
    os.close(descriptor)
