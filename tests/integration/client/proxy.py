"""A TCP proxy whose connections can be cut, refused or held, to see what the client does about it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


def has_answer(data: bytes) -> bool:
    """Whether an HTTP/2 frame of a call begins in these bytes, which begin with a frame (no ping)."""
    at = 0
    while at + 9 <= len(data):
        if data[at + 3] in (0x0, 0x1):
            return True
        at += 9 + int.from_bytes(data[at : at + 3])
    return False


class Proxy:
    """Runs on a thread of its own; every method may be called from anywhere."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._pairs: list[set[asyncio.StreamWriter]] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._drop_answer = False
        self._cut_after: int | None = None
        self._cut_after_sent: int | None = None
        self._sent = 0
        self.passed = 0
        self.sent = 0
        self.connections = 0
        self.cuts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(110)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self._run(call())

    def cut(self) -> None:
        """Break every connection."""
        self._call(self._cut)

    def refuse(self, refusing: bool) -> None:
        """Accept no connection; existing ones break."""
        self._refusing = refusing
        if refusing:
            self.cut()

    def cut_first(self) -> None:
        """Break the oldest connection and accept no other one; the rest goes on."""
        self._refusing = True

        def cut() -> None:
            for writer in self._pairs[0]:
                writer.transport.abort()

        self._call(cut)

    def cut_after(self, count: int | None) -> None:
        """Break every connection each time another `count` bytes of answers have passed; None stops that."""
        self.passed = 0
        self._cut_after = count

    def cut_after_sent(self, count: int | None) -> None:
        """The same for requests, all of which `sent` counts from now on; None stops the cutting."""
        self._sent = 0
        self.sent = 0 if count is not None else self.sent
        self._cut_after_sent = count

    def drop_next_answer(self) -> None:
        """Let requests through, and break the connection when their answer comes."""
        self._drop_answer = True

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(110)
        self._loop.close()

    async def _end(self) -> None:
        """Every connection is closed, also one that is just being made, before the loop is."""
        self._refusing = True
        self._server.close()
        await asyncio.sleep(0)  # what was accepted just now gets its task
        while self._serving:
            self._cut()
            await asyncio.wait(list(self._serving), timeout=0.1)
        for _ in range(3):
            await asyncio.sleep(0)  # a transport closes its socket in a later round of the loop

    def _cut(self) -> None:
        self.cuts += 1
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        if self._refusing:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        self._pairs.append(pair)
        await asyncio.gather(self._pump(reader, far_writer, False), self._pump(far_reader, writer, True))
        self._writers -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if answers and self._drop_answer and has_answer(data):
                    self._drop_answer = False
                    self._cut()
                    break
                writer.write(data)
                await writer.drain()
                if not answers:
                    self.sent += len(data)
                    self._sent += len(data)
                    if self._cut_after_sent is not None and self._sent >= self._cut_after_sent:
                        self._sent = 0
                        self._cut()
                        break
                else:
                    self.passed += len(data)
                    if self._cut_after is not None and self.passed >= self._cut_after:
                        self.passed = 0
                        self._cut()
                        break
        writer.close()
