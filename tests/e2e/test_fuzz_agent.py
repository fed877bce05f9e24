"""Every method of a sandbox's agent, past the gateway, with calls that nobody would make.

Each is answered, and the agent lives on with nothing left open. Some thousand calls by default, in an order that a seed
gives; `make chaos` makes more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from orchard.exec.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    exec_service_pb2,
    file_service_pb2,
    port_service_pb2,
    tunnel_service_pb2,
)

from services.common.tokens import AGENT_TOKEN_KEY, Principal, Signer, generate_key, load_private_key
from tests.support.agents import SandboxAgent, Usage, agent_of
from tests.support.fuzz_targets import EXAMPLES, Targets
from tests.support.fuzzing import AT_ONCE, Fuzzer, Metadata, methods_of, name_of
from tests.support.platform import PlatformProcess, running_platform
from tests.support.random_messages import damaged
from tests.support.wire import Wire, wire_to

pytestmark = [pytest.mark.root, pytest.mark.chaos]

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = 2 * int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
SANDBOX = "fuzzed"
BACKSTOP = 110
OPEN_SECONDS = 2.0
METHODS = methods_of(exec_service_pb2, file_service_pb2, port_service_pb2, agent_service_pb2, tunnel_service_pb2)
# Calls that last as long as a command, a connection or what they were told to wait. Every other one must end by itself.
OPEN_ENDED = frozenset(
    (
        *("StartExec", "ReadOutput", "WaitExec", "Exec", "WriteStdin", "Attach"),
        *("ForwardPort", "ServeEndpoint", "AcceptConnection"),
    )
)
# What may be kept for the next call: gRPC's connections and threads, idle reapers (launcher.c), and freed memory.
MORE_THREADS, MORE_DESCRIPTORS, MORE_PROCESSES, MORE_MEMORY = 12, 12, 4, 32 << 20
# Half an upload holds its file, and the file's folder twice, for ten minutes: the newest 16 (file_service.proto).
MOST_UPLOADS, UPLOAD_DESCRIPTORS = 16, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, 3.4


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("fuzz-agent")) as platform:
        yield platform


@pytest.fixture
async def wire(platform: PlatformProcess) -> AsyncIterator[Wire]:
    async with wire_to(platform.endpoint, platform.api_key) as wire:
        yield wire


@pytest.fixture
async def agent(platform: PlatformProcess, wire: Wire) -> SandboxAgent:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be sure that the agent is inside a sandbox")
    await wire.ready(SANDBOX, request_id="the-one-of-all-tests")
    return await agent_of(platform, wire, SANDBOX)


async def send_rounds(agent: SandboxAgent, rounds: int, seed: str) -> Counter[str]:
    """Every method at the same time, each round against new targets; returns how the calls were answered."""
    answers: Counter[str] = Counter()
    async with agent.channel() as channel, Targets(channel, agent, random.Random(seed)) as targets:
        fuzzers = [
            Fuzzer(
                channel,
                lambda: agent.metadata,
                method,
                random.Random(f"{seed} {method.full_name}"),
                targets.known_of(method),
                examples=EXAMPLES,
                open_seconds=OPEN_SECONDS,
                must_answer=method.name not in OPEN_ENDED,
            )
            for method in METHODS
        ]
        for _ in range(rounds):
            await targets.renew()
            await asyncio.gather(*(fuzzer.send_all(AT_ONCE) for fuzzer in fuzzers * 2))
            assert [wrong for fuzzer in fuzzers for wrong in fuzzer.wrong] == []
        for fuzzer in fuzzers:
            answers += fuzzer.answers
    return answers


async def test_each_call_is_answered(agent: SandboxAgent) -> None:
    answers = await send_rounds(agent, ROUNDS, f"{SEED}")
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED"} <= answers.keys(), "the calls do not reach the agent"


def wrong_tokens(platform: PlatformProcess, agent: SandboxAgent, rng: random.Random) -> Iterator[str]:
    """What only looks like a token for this agent."""
    key = load_private_key(platform.data / "keys" / "signing.pem")
    yield Signer(key, clock=lambda: time.time() - 3600).agent_token(agent.uid)
    yield Signer(key).agent_token(f"{agent.uid}x")
    yield Signer(key).principal_token(Principal("default", "k", frozenset({"admin"})))
    yield Signer(generate_key()).agent_token(agent.uid)
    yield from ("", ".", "..", "a.b.c", "e30.e30.e30", "bnVsbA.bnVsbA.bnVsbA", "W10.MQ.", "." * 1000)
    right = agent.signer.agent_token(agent.uid)
    head, body, signature = right.split(".")
    yield from (f"{head}.{body}", f"{head}.{body}.", f".{body}.{signature}", f"{body}.{head}.{signature}")
    for _ in range(16):
        broken = damaged(rng, right.encode())
        shown = "".join(chr(byte) for byte in broken if 0x20 < byte < 0x7F)  # what HTTP/2 carries
        if shown != right:
            yield shown


async def test_no_method_serves_a_wrong_token(platform: PlatformProcess, agent: SandboxAgent) -> None:
    rng = random.Random(f"{SEED} tokens")
    tokens = [((AGENT_TOKEN_KEY, token),) for token in wrong_tokens(platform, agent, rng)]
    choices: list[Metadata] = [*tokens, (), (("authorization", f"Bearer {platform.api_key}"),)]

    async with agent.channel() as channel, Targets(channel, agent, rng) as targets:
        await targets.renew()
        before = await targets.state()
        fuzzers = [
            Fuzzer(
                channel,
                lambda: rng.choice(choices),
                method,
                rng,
                targets.known_of(method),
                examples=EXAMPLES,
                open_seconds=BACKSTOP,
                must_answer=True,
            )
            for method in METHODS
        ]
        await asyncio.gather(*(fuzzer.send_all(2 * AT_ONCE) for fuzzer in fuzzers))
        for method, fuzzer in zip(METHODS, fuzzers, strict=True):
            # Given up by this side, a call may have no answer.
            assert set(fuzzer.answers) - {"CANCELLED"} == {"UNAUTHENTICATED"}, (name_of(method), fuzzer.answers)
        assert await targets.state() == before


async def test_connections_that_speak_something_else(agent: SandboxAgent) -> None:
    rng = random.Random(f"{SEED} connections")
    path = agent.endpoint.removeprefix("unix:")

    def frame() -> bytes:
        """One of HTTP/2 (RFC 9113, 4.1), its length true more often than not."""
        body = rng.randbytes(rng.choice((0, 4, 5, 8, 100)))
        size = len(body) if rng.random() < 0.7 else rng.choice((0, 1, 16_384, 2**24 - 1))
        head = bytes((rng.randrange(12), rng.choice((0, 1, 4, 5, 255))))
        return size.to_bytes(3) + head + rng.choice((0, 1, 2, 3, 2**31 - 1)).to_bytes(4) + body

    def say(data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(BACKSTOP)
            connection.connect(path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
                if rng.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

    for _ in range(20 * ROUNDS):
        frames = b"".join(frame() for _ in range(rng.randrange(6)))
        data = rng.choice((b"", PREFACE, PREFACE[: rng.randrange(24)], rng.randbytes(100), b"GET / HTTP/1.1\r\n\r\n"))
        await asyncio.to_thread(say, data + frames)
    assert (await about(agent)).uid == agent.uid


async def about(agent: SandboxAgent) -> agent_service_pb2.GetAgentResponse:
    async with agent.channel() as channel:
        request = agent_service_pb2.GetAgentRequest(sandbox_id=agent.sandbox_id)
        stub = agent_service_pb2_grpc.AgentServiceStub(channel)
        return await stub.GetAgent(request, metadata=agent.metadata, timeout=BACKSTOP)


async def test_nothing_has_died_and_nothing_is_left_open(
    platform: PlatformProcess, wire: Wire, agent: SandboxAgent
) -> None:
    """After all of the above, and as much again."""
    idle = agent.usage().processes
    await send_rounds(agent, 1, f"{SEED} before")
    before, large = agent.usage(), await large_outputs(agent)
    await send_rounds(agent, ROUNDS, f"{SEED} again")
    # A large output that is kept to be read is a file that is open.
    files = MORE_DESCRIPTORS + await large_outputs(agent) - large

    def excess(now: Usage) -> list[str]:
        most = {
            "threads": before.threads + MORE_THREADS,
            "descriptors": before.descriptors + files + UPLOAD_DESCRIPTORS * now.uploads,
            "uploads": MOST_UPLOADS,
            "processes": idle + MORE_PROCESSES,
            "memory": before.memory + MORE_MEMORY,
        }
        return [
            f"{name} {getattr(now, name)}, not {limit}" for name, limit in most.items() if getattr(now, name) > limit
        ]

    await until(lambda: not excess(agent.usage()), lambda: f"{excess(agent.usage())} left of {before}")
    found = await about(agent)
    assert (found.uid, found.restarts) == (agent.uid, 0)
    assert (await agent_of(platform, wire, SANDBOX)).pid == agent.pid
    assert await wire.output(SANDBOX, "echo alive") == b"alive\n"
    # Also of calls that nobody waited for.
    assert "Traceback" not in agent.log.read_text() + platform.output()


async def large_outputs(agent: SandboxAgent) -> int:
    async with agent.channel() as channel:
        return await Targets(channel, agent, random.Random()).large_outputs()


async def until(holds: Callable[[], bool], explain: Callable[[], str]) -> None:
    """What ended late is still being put away."""
    end = time.monotonic() + BACKSTOP
    while not holds():
        assert time.monotonic() < end, explain()
        await asyncio.sleep(0.2)
