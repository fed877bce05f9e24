"""Sandboxes that work, and what must be true of them whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import orchard

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.support.pod_platform import TENANT, PodPlatform
from tests.support.testbed import NAMESPACE

SETTLE_SECONDS = 300
"""How long the platform may take to be right again after a fault; README.md says what is measured."""
RIGHT_SECONDS = 30
"""How long after an API server that was away answers again every record must be right."""
LINE = "line {number:07d} of a command that must run once and whose output must come whole\n"
# Notes outside of its output that it has begun, writes until it is told to end, and then how much and how often it did.
COMMAND = (
    "echo begun >>/root/{run}; n=0; until [ -e /root/end-{run} ]; do i=0; while [ $i -lt 20 ]; do i=$((i+1)); "
    "n=$((n+1)); printf 'line %07d of a command that must run once and whose output must come whole\\n' $n; done; "
    "sleep 0.05; done; echo wrote $n; cat /root/{run}"
)


class Command:
    """A command that writes all the time, and a reader that follows it."""

    def __init__(self, sandbox: orchard.AsyncSandbox) -> None:
        self._sandbox = sandbox
        self._run = secrets.token_hex(4)
        self._writes = asyncio.Event()
        self._following = asyncio.create_task(self._follow(), name=f"follow {self._run}")

    async def _follow(self) -> str:
        stream = self._sandbox.exec_stream(COMMAND.format(run=self._run), concurrent=True)
        read = []
        async for chunk in stream:
            read.append(chunk.data)
            self._writes.set()
        assert stream.result.exit_code == 0, stream.result
        return b"".join(read).decode()

    async def writes(self) -> None:
        """Wait until it does."""
        await self._writes.wait()

    async def whole(self) -> None:
        """End it: it must have run once, and every byte must be there."""
        await self._sandbox.write_file(f"/root/end-{self._run}", b"")
        *lines, wrote, begun = (await self._following).splitlines(keepends=True)
        assert begun == "begun\n"
        assert wrote == f"wrote {len(lines)}\n"
        assert lines == [LINE.format(number=number + 1) for number in range(len(lines))]

    async def interrupted(self) -> BaseException:
        """Why it could not end: its sandbox is gone."""
        (result,) = await asyncio.gather(self._following, return_exceptions=True)
        assert isinstance(result, BaseException), result[-300:]
        return result


@dataclass
class Load:
    """Sandboxes that must live through everything, and those that come and go beside them."""

    platform: PodPlatform
    client: orchard.AsyncSandboxClient
    steady: dict[str, str] = field(default_factory=dict)
    """Uids by id."""
    _commands: list[Command] = field(default_factory=list)
    _doomed: list[orchard.AsyncSandbox] = field(default_factory=list)
    _work: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> None:
        """Commands write in every steady sandbox, and there is one more, which is to be deleted in the middle."""
        missing = 2 - len(self.steady)
        *made, doomed = await asyncio.gather(*(self.create(detach=True) for _ in range(missing)), self.create())
        self.steady.update({sandbox.sandbox_id: (await sandbox.refresh()).uid for sandbox in made})
        self._doomed = [doomed]
        self._commands = [Command(self.client.attach(name)) for name in self.steady]
        await asyncio.gather(*(command.writes() for command in self._commands))

    async def create(self, *, detach: bool = False) -> orchard.AsyncSandbox:
        """A sandbox that waits for a cluster whose own parts have to notice that the API server is there again."""
        return await self.client.create(BUSYBOX, detach=detach, start_timeout=SETTLE_SECONDS)

    def go_on(self) -> None:
        """What users do without knowing that anything is wrong: it has to end well once nothing is."""
        self._work = [
            asyncio.create_task(self._life(), name="a life"),
            *(asyncio.create_task(doomed.delete(), name="a delete") for doomed in self._doomed),
            *(asyncio.create_task(self._short(self.client.attach(name)), name="a command") for name in self.steady),
        ]

    async def commands_answer(self) -> None:
        """Commands in a sandbox that runs need nobody but gateway and agent."""
        async with asyncio.timeout(SETTLE_SECONDS):
            for name in self.steady:
                await self._short(self.client.attach(name))

    async def _life(self) -> None:
        async with await self.create() as sandbox:
            await self._short(sandbox)

    async def _short(self, sandbox: orchard.AsyncSandbox) -> None:
        run = secrets.token_hex(4)
        result = await sandbox.exec(f"echo once >>/root/{run}; cat /root/{run}", concurrent=True)
        assert (result.stdout, result.exit_code) == ("once\n", 0), result

    async def ends_well(self) -> float:
        """After a fault: all that was begun ends as if there had been none, and what is recorded is what is there.

        Returns how many seconds that took.
        """
        began = time.monotonic()
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.gather(*self._work)
            for doomed in self._doomed:
                ended = await doomed.wait_ended(SETTLE_SECONDS)
                assert (ended.state, ended.reason) == (orchard.SandboxState.DELETED, "REQUESTED"), ended
            await asyncio.gather(*(command.whole() for command in self._commands))
        await self.settled()
        return time.monotonic() - began

    async def records_right(self, victim: orchard.AsyncSandbox) -> float:
        """Wait until the records are what the Pods say, whatever of the cluster has not yet gone on with those.

        What happens only now has to be among it, and needs nobody but the API server: the victim's Pod is taken away.
        Returns how many seconds that took.
        """
        began = time.monotonic()
        pod = pods.pod_name(TENANT, victim.sandbox_id)
        remove = ("-n", NAMESPACE, "delete", "pod", pod, "--wait=false", "--force", "--grace-period=0")
        await asyncio.to_thread(self.platform.testbed.kubectl, *remove)
        ended = await victim.wait_ended(SETTLE_SECONDS)
        assert (ended.state, ended.reason) == (orchard.SandboxState.FAILED, "DELETED_EXTERNALLY"), ended
        there: dict[str, tuple[str, str]] = {}
        recorded: dict[str, tuple[str, str]] | None = None
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while recorded != there:
                    recorded = {one.sandbox_id: (one.uid, one.state.name) async for one in self.client.list()}
                    found = await asyncio.to_thread(self.platform.sandbox_pods)
                    there = {name: _said_by(pod) for name, pod in found}
        except TimeoutError:
            raise AssertionError(f"there {there}\nrecorded {recorded}") from None
        return time.monotonic() - began

    async def settled(self) -> None:
        """Wait until Pods and records are exactly the steady sandboxes."""
        wanted = {name: (uid, orchard.SandboxState.READY) for name, uid in self.steady.items()}
        there: dict[str, str] = {}
        recorded: dict[str, tuple[str, orchard.SandboxState]] = {}
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while there != self.steady or recorded != wanted:
                    await asyncio.sleep(0.1)
                    there = await asyncio.to_thread(self.platform.sandboxes)
                    recorded = {one.sandbox_id: (one.uid, one.state) async for one in self.client.list()}
        except TimeoutError:
            raise AssertionError(f"wanted {wanted}\nthere {there}\nrecorded {recorded}") from None

    async def close(self) -> None:
        """Delete what is steady."""
        await asyncio.gather(*(self.client.attach(name).delete() for name in self.steady))
        self.steady = {}
        await self.settled()


def _said_by(pod: dict[str, Any]) -> tuple[str, str]:
    """The uid, and the state that its record must have."""
    metadata, status = pod["metadata"], pod["status"]
    if "deletionTimestamp" in metadata:
        return metadata["uid"], "DELETING"
    runs = any("running" in one["state"] for one in status.get("containerStatuses") or ())
    return metadata["uid"], "READY" if runs and status.get("podIP") else "STARTING"
