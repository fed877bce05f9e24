"""What is wrong with an argument names it: its parameter, what is wanted and what was given."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from orchard import (
    InvalidArgument,
    Judgement,
    OrchardError,
    Reward,
    RewardState,
    RolloutPlan,
    SandboxClient,
    Step,
    StepValue,
    Task,
    process_reward_of,
)
from orchard._client.arguments import explained
from orchard._client.trajectories.writer import prepared


class Odd:
    """What no parameter takes."""


@pytest.fixture
def client() -> Iterator[SandboxClient]:
    """Nobody listens where it goes to: whatever it sends fails with Unavailable."""
    with SandboxClient("127.0.0.1:1", api_key="k", retry_timeout=0) as client:
        yield client


VALID: Mapping[str, Any] = {
    "batch_id": "b",
    "columns": 80,
    "number": 15,
    "rows": 24,
    "blob": "0" * 64,
    "command": "true",
    "data": b"x",
    "diff": "",
    "endpoint": "llm",
    "exec_id": "e",
    "group_id": "g",
    "index": 0,
    "items": {},
    "judgement": Judgement("outcome", "Do it.", [Step.user("Do it.")]),
    "key_id": "k",
    "labels": {},
    "name": "n",
    "path": "/tmp/x",
    "port": 80,
    "rubric": "r",
    "sandbox_id": "sb-1",
    "sandbox_ids": ["sb-1"],
    "sha256": "0" * 64,
    "source": "/tmp/x",
    "status": "completed",
    "step": Step.user("Do it."),
    "target": "/tmp/y",
    "tenant": "t",
    "trajectories": [],
    "trajectory_id": "t",
    "verdict_id": "v",
}
"""For the parameters that a method needs, whichever it is."""
TAKEN_LATER = {
    ("download", "progress"),
    ("download", "unsafe_links"),
    ("upload", "progress"),
    ("upload", "exclude"),
    ("forward", "on_event"),
    ("iter_file", "progress"),
    ("read_text", "encoding"),
    ("read_text", "errors"),
}
"""Parameters that come into play once something was sent."""
NOT_CALLED = {"close", "detach", "begin_store"}


def _parts(client: SandboxClient) -> Mapping[str, Any]:
    sandbox = client.attach("sb-1")
    return {
        "client": client,
        "keys": client.keys,
        "tenants": client.tenants,
        "images": client.images,
        "sandbox": sandbox,
        "process": sandbox.process("e"),
        "trajectories": client.trajectories,
        "bodies": client.trajectories.bodies,
        "groups": client.trajectories.groups,
        "judge": client.judge,
    }


def _called(method: Callable[..., Any], wrong: inspect.Parameter, valid: Mapping[str, Any]) -> None:
    """Call a method with what is wrong in one place."""
    args, given = [], {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.name == wrong.name:
            value: Any = Odd()
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            value = valid[parameter.name]
        else:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.append(value)
        else:
            given[parameter.name] = value
    made = method(*args, **given)
    if hasattr(made, "__enter__"):
        with made:
            pass
    elif isinstance(made, Iterable):
        next(iter(made), None)


@pytest.mark.parametrize(
    "part", ["client", "keys", "tenants", "images", "sandbox", "process", "trajectories", "bodies", "groups", "judge"]
)
def test_an_argument_of_another_type_is_named_by_every_method(client: SandboxClient, part: str) -> None:
    subject = _parts(client)[part]
    valid = {**VALID, "sandbox": client.attach("sb-1")}
    looked_at = 0
    wrong: list[str] = []
    for name, method in inspect.getmembers(subject, inspect.ismethod):
        if name.startswith("_") or name in NOT_CALLED:
            continue
        for parameter in inspect.signature(method).parameters.values():
            # What is asked for its truth alone may be anything.
            takes_anything = parameter.annotation in {"bool", "Any"} or parameter.kind is parameter.VAR_KEYWORD
            if takes_anything or (name, parameter.name) in TAKEN_LATER:
                continue
            looked_at += 1
            told = f"{part}.{name}({parameter.name}=Odd())"
            try:
                _called(method, parameter, valid)
            except InvalidArgument as error:
                if parameter.name.removesuffix("s") not in str(error).partition(":")[0]:
                    wrong.append(f"{told}: {error}")
            except Exception as error:
                wrong.append(f"{told}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{told}: is taken")
    assert looked_at
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda c: c.create(cpu="two"), "cpu: must be a number, not a string"),
        (lambda c: c.create(env={"A": 5}), "env['A']: must be a string, not int"),
        (lambda c: c.create(priority=1 << 40), "priority: 1099511627776 is out of range"),
        (lambda c: c.attach("sb-1").write_file("/x", 5), "data: must be bytes or a string, not 5"),
        (lambda c: c.attach("sb-1").read_file(5), "path: must be a string, not 5"),
        (lambda c: c.attach("sb-1").exec("ls", cwd=Path("/tmp")), "cwd: must be a string, not a PosixPath"),
        (lambda c: c.attach("sb-1").exec("ls", user="\udc80"), "user: has a lone surrogate, which is no character"),
        (lambda c: c.attach("sb-1").download(5, "/tmp/x"), "source: must be a string, not 5"),
        (lambda c: c.record(5), "task: must be a Task or the id of an instance, not int"),
        (lambda c: c.record("t", attempt="first"), "attempt: must be a whole number, not a string"),
        (lambda c: c.attach("sb-1").exec("cat", input=5), "input: must be bytes or a string, not int"),
        (lambda _: process_reward_of("t"), "info: must be a TrajectoryInfo, as `client.trajectories.get(id)`"),  # type: ignore[arg-type]
        (lambda c: c.record("t", sandbox="sb-1"), "sandbox: must be a Sandbox or None, not a string"),
        (lambda c: c.trajectories.annotate("t", rewards=[1.0]), "rewards[0]: must be a Reward, not 1.0"),
        (lambda c: c.trajectories.annotate("t", rewards="one"), "rewards: must be a Reward or a sequence of Reward"),
        (
            lambda c: c.trajectories.annotate("t", rewards=Reward("outcome", RewardState.SCORED, "high")),  # type: ignore[arg-type]
            "rewards.value: must be a number or None, not a string",
        ),
        (
            lambda _: Reward.scored("high"),  # type: ignore[arg-type]
            "value: must be a number, not 'high'; what has none is Reward.excluded or Reward.abstained",
        ),
        (
            lambda c: c.trajectories.annotate("t", values=[StepValue(0, "value", "high")]),  # type: ignore[arg-type]
            "values[0].value: must be a number, not a string",
        ),
        (lambda c: c.trajectories.create(Task(5)), "task.instance_id: must be a string, not 5"),  # type: ignore[arg-type]
        (lambda c: next(c.trajectories.list(datasets=5)), "datasets: must be a string or a sequence of strings, not 5"),
        (lambda c: c.trajectories.delete(created_from=5, all=True), "created_from: must be a datetime, not int"),
        (
            lambda c: c.trajectories.groups.create("g", plan=RolloutPlan(low="none")),  # type: ignore[arg-type]
            "plan.low: must be a number, not a string",
        ),
        (
            lambda c: c.trajectories.groups.create("g", plan=RolloutPlan(stride=0)),
            "plan.stride: must be a whole number",
        ),
        (
            lambda c: c.judge.run(Judgement("outcome", 5, [])),  # type: ignore[arg-type]
            "judgement.instruction: must be a string, not 5",
        ),
        (
            lambda c: list(c.judge.batch("b", "items")),
            "items: must be judgements by item id, as a mapping",
        ),
        (lambda c: c.attach("sb-1").process(""), "exec_id: must be the id of a command, and is empty"),
        (lambda c: c.keys.create("t", roles=5), "roles: must be"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_wanted(
    client: SandboxClient, call: Callable[[Any], Any], told: str
) -> None:
    # Whoever catches ValueError, as for any value that cannot be, catches this too.
    with pytest.raises(ValueError) as caught:
        call(client)
    assert isinstance(caught.value, InvalidArgument)
    assert str(caught.value).startswith(told)
    assert caught.value.violations[0].field == told.partition(":")[0]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": 5}, "content: must be a string or a list of parts, not int"),
        ({"role": "user", "content": {"type": "text"}}, "content: must be a string or a list of parts, not dict"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls: must be a list of calls, not int"),
        ({"role": "assistant", "tool_calls": {"id": 1}}, "tool_calls: must be a list of calls, not dict"),
        ({"role": "assistant", "tool_calls": ["ls"]}, 'tool_calls: each must be {"id": ...'),
        ({"role": "assistant", "tool_calls": [{"function": "ls"}]}, 'tool_calls: each must be {"id": ...'),
    ],
)
def test_a_message_that_is_none_is_told_by_its_field(message: Mapping[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prepared(message)
    assert str(caught.value).startswith(told)


@dataclass(frozen=True)
class Part:
    """A value with fields."""

    size: int
    names: Sequence[str] = ()


@explained
class Subject:
    """Fails as code does that is not ready for what it gets."""

    def act(
        self, number: int, *parts: Part, mode: Literal["a", "b"] = "a", call: Callable[[], int] | None = None
    ) -> str:
        """Needs all of them as they should be."""
        if mode not in {"a", "b"}:
            raise KeyError(mode)
        return "x" * number + "".join("".join(part.names) * part.size for part in parts) + "y" * (call or int)()

    async def act_later(self, number: int) -> str:
        """The same."""
        return "x" * number

    async def each(self, number: int) -> AsyncGenerator[str, None]:
        """The same."""
        yield "x" * number

    def fail(self, number: int) -> None:
        """Fails of its own."""
        raise ValueError(f"{number} is not my day")

    def refuse(self, number: int) -> None:
        """Calls another."""
        self.act(number)


@pytest.mark.parametrize(
    ("args", "given", "told"),
    [
        (("a",), {}, "number: must be a whole number, not a string"),
        ((1.5,), {}, "number: must be a whole number, not 1.5"),
        ((1, 2), {}, "parts: must be a Part, not 2"),
        ((1, Part("a", ["b"])), {}, "parts.size: must be a whole number, not a string"),  # type: ignore[arg-type]
        ((1, Part(1, ["a", 2])), {}, "parts.names[1]: must be a string, not 2"),  # type: ignore[list-item]
        ((1,), {"mode": "c"}, "mode: must be one of 'a', 'b', not a string"),
        ((1,), {"call": 5}, "call: must be a function or None, not 5"),
    ],
)
def test_the_argument_that_does_not_fit_is_named(args: Any, given: Any, told: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Subject().act(*args, **given)
    assert str(caught.value) == told
    assert caught.value.__cause__ is not None


async def test_so_it_is_in_coroutines_and_generators() -> None:
    told = "number: must be a whole number, not a dict"
    with pytest.raises(InvalidArgument, match=told):
        await Subject().act_later({})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=told):
        [one async for one in Subject().each({})]  # type: ignore[arg-type]
    assert await Subject().act_later(2) == "xx"
    assert [one async for one in Subject().each(2)] == ["xx"]


def test_a_loop_that_ends_closes_what_was_left_amid_its_items() -> None:
    """Whoever leaves a list early leaves it to the event loop, which closes all generators at once."""
    ends: list[str] = []
    troubles: list[object] = []

    @explained
    class Paged:
        """Has items that come one by one."""

        async def items(self) -> AsyncGenerator[int, None]:
            """All of them."""
            try:
                yield 1
                yield 2
            finally:
                await asyncio.sleep(0)
                ends.append("closed")

    left = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: troubles.append(context))
        left.append(items := Paged().items())
        assert await anext(items) == 1

    asyncio.run(leave())
    assert (ends, troubles) == (["closed"], [])


def test_an_error_that_is_none_of_an_argument_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="3 is not my day") as caught:
        Subject().fail(3)
    assert not isinstance(caught.value, OrchardError)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nubmer'"):
        Subject().act(nubmer=3)  # type: ignore[call-arg]
    assert Subject().act(2, Part(1, ["z"]), mode="b", call=lambda: 1) == "xxzy"
