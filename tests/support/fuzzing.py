"""Calls with what nobody would send: damaged messages, streams in the wrong order, left half open, given up midway."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from services.common.peer_status import peer_status
from tests.support.random_messages import Known, RandomMessages, damaged

Metadata = Sequence[tuple[str, str | bytes]]

AT_ONCE: Final = 8
ANSWER_SECONDS: Final = 100.0
"""Deadline of one that must end by itself, on however busy a machine."""
_GIVE_UP_SECONDS: Final = (0.0, 0.001, 0.01, 0.1)
_HUNG: Final = "HUNG far beyond its deadline"
_BROKEN: Final = (grpc.StatusCode.INTERNAL.name, grpc.StatusCode.UNKNOWN.name, _HUNG.split()[0])


def methods_of(*modules: ModuleType) -> list[MethodDescriptor]:
    """Every method of every service of these generated modules."""
    return [
        method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def name_of(method: MethodDescriptor) -> str:
    """Of a test's parameter."""
    return f"{method.containing_service.name}.{method.name}"


class Fuzzer:
    """Sends nonsense to one method, and keeps how it was answered."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Callable[[], Metadata],
        method: MethodDescriptor,
        rng: random.Random,
        known: Known,
        *,
        examples: Mapping[str, Sequence[Message]] = MappingProxyType({}),
        open_seconds: float = 4.0,
        must_answer: bool = False,
    ) -> None:
        """Take what calls are made of.

        Args:
            channel: to whom.
            metadata: of each call.
            method: which one.
            rng: chooses everything.
            known: see RandomMessages, also for `examples`.
            examples: good messages.
            open_seconds: deadline of a call that may go on for as long as its client likes.
            must_answer: a call ends by itself once all of its requests are sent.
        """
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._channel = channel
        self._metadata = metadata
        self._method = method
        self._rng = rng
        self._messages = RandomMessages(rng, known, examples)
        self._open_seconds = open_seconds
        self._must_answer = must_answer
        self._path = f"/{method.containing_service.full_name}/{method.name}"

    async def send_all(self, calls: int) -> None:
        """So many calls, AT_ONCE of them at a time."""
        for _ in range(0, calls, AT_ONCE):
            await asyncio.gather(*(self.send() for _ in range(AT_ONCE)))

    async def send(self) -> None:
        """One call."""
        rng, streams = self._rng, self._method.client_streaming
        requests = [self._request(member) for member in self._members()]
        is_half_open = streams and rng.random() < 0.2
        give_up = rng.choice(_GIVE_UP_SECONDS) if rng.random() < 0.2 else None
        must_answer = self._must_answer and not is_half_open
        ended = asyncio.Event()

        async def given() -> AsyncIterator[bytes]:
            for request in requests:
                yield request
            if is_half_open:
                await ended.wait()

        deadline = ANSWER_SECONDS if must_answer else self._open_seconds
        call = self._begin(given() if streams else requests[0], deadline)
        timer = None if give_up is None else asyncio.get_running_loop().call_later(give_up, call.cancel)
        try:
            async with asyncio.timeout(deadline + ANSWER_SECONDS) as limit:
                answer = await self._outcome(call)
        finally:
            ended.set()
            if timer is not None:
                timer.cancel()
            call.cancel()
        self._note(_HUNG if limit.expired() else answer, requests, must_answer=must_answer)

    def _begin(self, given: Any, deadline: float) -> Any:
        kind = (self._method.client_streaming, self._method.server_streaming)
        names = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary"}
        make: Any = getattr(self._channel, names.get(kind, "stream_stream"))(self._path)
        return make(given, metadata=tuple(self._metadata()), timeout=deadline)

    async def _outcome(self, call: Any) -> str:
        try:
            with peer_status(call):
                if self._method.server_streaming:
                    async for _ in call:
                        pass
                else:
                    await call
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except asyncio.CancelledError:
            # It was given up here, or gRPC says so that the stream ended while it was written.
            return "CANCELLED"
        return "OK"

    def _note(self, answer: str, requests: list[bytes], *, must_answer: bool) -> None:
        code = answer.partition(" ")[0]
        self.answers[code] += 1
        if code in _BROKEN or (must_answer and code == grpc.StatusCode.DEADLINE_EXCEEDED.name):
            self.wrong.append(f"{answer} for {requests}")

    def _request(self, member: str) -> bytes:
        made = self._messages.make(self._method.input_type, member=member).SerializeToString()
        return damaged(self._rng, made) if self._rng.random() < 0.2 else made

    def _members(self) -> list[str]:
        """What each request of a call is: mostly a start at the front and an end at the back."""
        if not self._method.client_streaming:
            return [""]
        rng, one_ofs = self._rng, self._method.input_type.oneofs
        names = [field.name for field in one_ofs[0].fields] if one_ofs else [""]
        if "start" not in names or rng.random() < 0.3:
            return [rng.choice(names) for _ in range(rng.randrange(1, 6))]
        later = [name for name in names if name != "start"]
        ends = [name for name in names if name in ("end", "eof")]
        return [
            "start",
            *(rng.choice([name for name in later if name not in ends]) for _ in range(rng.randrange(4))),
            *(ends if rng.random() < 0.6 else ()),
        ]
