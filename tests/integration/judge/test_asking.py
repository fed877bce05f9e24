"""Judges over real HTTP: each way to fail is the right state and reason, after at most the stated number of calls."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from orchard.rewards.scores import Abstained, Excluded, Score, Scored

from services.common.errors import NotFoundError, UnavailableError
from services.common.settings import SettingsError
from services.judge.asking import Asker, Kept, Place
from services.judge.backends.base import Reply
from services.judge.backends.endpoint import Endpoint, make_endpoint
from services.judge.backends.limits import Amount, Breaker, Meter
from services.judge.backends.settings import JudgeSettings, load_judges
from services.judge.building import Prompts
from services.judge.model import Aggregation, Image, Kind, Parameters, Question, Role, Step, Task, Usage, Vote
from services.judge.prompting.prompts import Prompt
from services.judge.rubrics import SOFTWARE_ENGINEERING
from tests.support.judge_server import JudgeServer

STEPS = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))
KINDS = ["openai", "anthropic"]
ATTEMPTS = 3


class Notes:
    """A journal that only remembers. `broken`: votes whose answers it cannot take; `cleared`: whose it has no more;
    `full`: it takes none.
    """

    def __init__(self, *broken: int) -> None:
        self.given: list[tuple[Kept, str]] = []
        self.failures = 0
        self.broken = broken
        self.cleared: tuple[int, ...] = ()
        self.full = False
        self.asked_to_keep, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def kept(self) -> Sequence[Kept]:
        return [kept for kept, _text in self.given]

    async def text(self, kept: Kept) -> str:
        if kept.place.vote in self.cleared:
            raise NotFoundError("it is not there")
        return next(text for other, text in self.given if other == kept)

    async def ready(self) -> None:
        if self.full:
            raise UnavailableError("full")

    async def answered(self, place: Place, prompt: Prompt, reply: Reply, usage: Usage, latency: float) -> Kept:
        self.asked_to_keep.set()
        await self.go_on.wait()
        if place.vote in self.broken:
            raise UnavailableError("no")
        sha256 = hashlib.sha256(reply.text.encode()).hexdigest()
        kept = Kept(place, prompt.ticket, sha256, reply.finish, reply.words, reply.model, usage, latency)
        self.given.append((kept, reply.text))
        return kept

    async def failed(self, place: Place, usage: Usage) -> None:
        self.failures += usage.failed_calls


def settings(server: JudgeServer, kind: str = "openai", **changes: Any) -> JudgeSettings:
    given = {
        "name": "j",
        "kind": kind,
        "model": "judge-1",
        "base_url": server.url + ("/v1" if kind == "openai" else ""),
        "attempts": ATTEMPTS,
        "first_delay_seconds": 0.001,
        "timeout_seconds": 60,
        "prompt_usd_per_million": 2,
        "cached_usd_per_million": 1,
        "completion_usd_per_million": 10,
    }
    return JudgeSettings(**(given | changes))


@asynccontextmanager
async def endpoint_of(given: JudgeSettings, stopping: asyncio.Event | None = None) -> AsyncIterator[Endpoint]:
    endpoint = make_endpoint(given, stopping)
    try:
        yield endpoint
    finally:
        await endpoint.close()


def question(kind: Kind = Kind.RUBRIC, images: dict[str, Image] | None = None) -> Question:
    attempts = (STEPS, STEPS) if kind is Kind.PAIRWISE else (STEPS,)
    if images:
        attempts = ((STEPS[0], Step(1, Role.TOOL, images=tuple(images))),)
    rubric = SOFTWARE_ENGINEERING if kind is Kind.RUBRIC else None
    return Question(kind, Task("Do it."), attempts, rubric, images or {})


async def ask(
    given: JudgeSettings,
    asked: Question,
    *,
    votes: int = 1,
    meters: Sequence[Meter] = (),
    notes: Notes | None = None,
    stopping: asyncio.Event | None = None,
) -> list[Vote]:
    parameters = Parameters(votes, Aggregation.MEDIAN, 1, 0.5, 1000)
    async with endpoint_of(given, stopping) as endpoint:
        asker = Asker(Prompts(asked), "key", parameters, [endpoint], meters, notes or Notes())
        return await asyncio.wait_for(asker.votes(), 110)


EX, AB = Excluded, Abstained
FAILURES: list[tuple[str, Score, int]] = [
    ("good", Scored(1), 1),
    ("bad", Scored(0), 1),
    ("fenced", Scored(1), 1),
    ("echoed", Scored(0), 1),
    ("429", EX("JUDGE_RATE_LIMITED"), ATTEMPTS),
    ("500", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("503", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("529", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("400", EX("JUDGE_REJECTED"), 1),
    ("401", EX("JUDGE_UNAUTHENTICATED"), 1),
    ("disconnect", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("truncated", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("truncated stream", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("html", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("no completion", EX("JUDGE_UNAVAILABLE"), ATTEMPTS),
    ("empty", EX("ANSWER_EMPTY"), ATTEMPTS),
    ("half", EX("ANSWER_CUT_OFF"), ATTEMPTS),
    ("length", EX("ANSWER_CUT_OFF"), 1),
    ("odd finish", EX("ANSWER_CUT_OFF"), ATTEMPTS),
    ("echo alone", EX("ANSWER_INVALID"), ATTEMPTS),
    ("strings", EX("ANSWER_INVALID"), ATTEMPTS),
    ("extra digits", EX("ANSWER_INVALID"), ATTEMPTS),
    ("nan", EX("ANSWER_INVALID"), ATTEMPTS),
    ("duplicate keys", EX("ANSWER_INVALID"), ATTEMPTS),
    ("wrong criteria", EX("ANSWER_INVALID"), ATTEMPTS),
    ("two", EX("ANSWER_AMBIGUOUS"), ATTEMPTS),
    ("refusal", AB("JUDGE_REFUSED"), 1),
    ("content filter", AB("JUDGE_REFUSED"), 1),
    ("abstain", AB("JUDGE_ABSTAINED"), 1),
]
CALLS_WITHOUT_ANSWER = {"429", "500", "503", "529", "400", "401", "disconnect", "truncated", "truncated stream"}
CALLS_WITHOUT_ANSWER |= {"html", "no completion"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("behaviour", "score", "calls"), FAILURES, ids=[row[0] for row in FAILURES])
async def test_each_behaviour(server: JudgeServer, kind: str, behaviour: str, score: Score, calls: int) -> None:
    server.behave(behaviour)
    notes = Notes()
    (vote,) = await ask(settings(server, kind), question(), notes=notes)
    assert vote.reading.score == score, vote.reading.message
    assert len(server.requests) == calls
    answered = 0 if behaviour in CALLS_WITHOUT_ANSWER else calls
    assert len(vote.answers) == len(notes.given) == answered
    assert (vote.usage.calls, vote.usage.failed_calls) == (calls, calls - answered)
    assert notes.failures == calls - answered
    # 600 tokens at 2, 400 at 1 and 100 at 10 dollars a million.
    assert vote.usage.prompt_tokens == 1000 * answered
    assert vote.usage.cost_usd == pytest.approx(0.0026 * answered, abs=1e-12)
    if isinstance(score, Scored):
        assert vote.model == "judge-1-0601"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("behaviour", ["no usage", "odd usage", "huge usage"])
async def test_an_answer_counts_whatever_its_server_says_of_tokens(
    server: JudgeServer, kind: str, behaviour: str
) -> None:
    """Where that is nothing, a guess does: a budget must end."""
    server.behave(behaviour)
    meter, notes = Meter(Amount(tokens=10_000)), Notes()
    votes = await ask(settings(server, kind, concurrency=1), question(), votes=16, meters=[meter], notes=notes)
    assert {vote.reading.score for vote in votes} == {Scored(1), Excluded("BUDGET_EXHAUSTED")}
    assert 5000 < meter.spent.tokens <= 10_000
    kept = [kept.usage for kept, _text in notes.given]
    assert sum(usage.tokens for usage in kept) == meter.spent.tokens
    assert all(usage.prompt_tokens > usage.completion_tokens > 0 for usage in kept)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_has_the_words_of_the_server(server: JudgeServer, kind: str) -> None:
    server.behave("400")
    (vote,) = await ask(settings(server, kind), question())
    assert vote.reading.message == "the judge answered with status 400: no"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_judge_that_hangs_is_left_in_time(server: JudgeServer, kind: str) -> None:
    server.behave("hang")
    (vote,) = await ask(settings(server, kind, timeout_seconds=2), question())
    assert vote.reading.score == Excluded("JUDGE_TIMEOUT")
    assert len(server.requests) == ATTEMPTS


@pytest.mark.parametrize("behaviour", [row[0] for row in FAILURES if row[2] > 1])
async def test_a_failure_that_passes_does_no_harm(server: JudgeServer, behaviour: str) -> None:
    server.behave(behaviour, behaviour, "good")
    (vote,) = await ask(settings(server), question())
    assert vote.reading.score == Scored(1)
    assert len(server.requests) == ATTEMPTS
    # A call without an answer is repeated as what it was; an answer that could not be read must not come again.
    keys = 1 if behaviour in CALLS_WITHOUT_ANSWER else ATTEMPTS
    assert len({headers["idempotency-key"] for headers in server.headers}) == keys


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_listens(server: JudgeServer, kind: str) -> None:
    given = settings(server, kind, base_url="http://127.0.0.1:1/v1")
    (vote,) = await ask(given, question())
    assert vote.reading.score == Excluded("JUDGE_UNAVAILABLE")
    assert vote.usage == Usage(calls=ATTEMPTS, failed_calls=ATTEMPTS)


async def test_retry_after_is_kept(server: JudgeServer) -> None:
    server.retry_after = "1"
    server.behave("429", "good")
    started = asyncio.get_running_loop().time()
    (vote,) = await ask(settings(server), question())
    assert vote.reading.score == Scored(1)
    assert asyncio.get_running_loop().time() - started >= 1


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_judge_is_sent(server: JudgeServer, kind: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-secret\n")
    images = {name * 64: Image(name * 64, "image/png", name.encode()) for name in "abc"}
    given = settings(server, kind, api_key_file=tmp_path / "key")
    await ask(given, question(Kind.GUI_SUCCESS, images))
    (body,), (headers,) = server.requests, server.headers
    assert body["model"] == "judge-1"
    assert body["temperature"] == 0.5
    sent = body["messages"][-1]["content"]
    assert [part["type"] for part in sent][1:] == ["image_url" if kind == "openai" else "image"] * 3
    for part, data in zip(sent[1:], "abc", strict=True):
        encoded = base64.b64encode(data.encode()).decode()
        assert encoded in (part["image_url"]["url"] if kind == "openai" else part["source"]["data"])
    assert (body.get("max_completion_tokens") or body.get("max_tokens")) == 1000
    assert headers["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in repr(given) + str(given.identity())


async def test_both_orders_of_a_pair_are_asked(server: JudgeServer) -> None:
    """A judge that always prefers the first one it sees prefers nothing."""
    server.behave("good")
    (vote,) = await ask(settings(server), question(Kind.PAIRWISE))
    assert vote.reading.score == Abstained("ORDER_DEPENDENT")
    server.behave("good", "bad")
    (vote,) = await ask(settings(server), question(Kind.PAIRWISE))
    assert vote.reading.score == Scored(1)
    assert len(vote.answers) == vote.usage.calls == 2


async def test_votes_are_apart(server: JudgeServer) -> None:
    server.behave("good", "refusal", "bad")
    votes = await ask(settings(server, concurrency=1), question(), votes=3)
    assert sorted(type(vote.reading.score).__name__ for vote in votes) == ["Abstained", "Scored", "Scored"]
    assert len(server.requests) == 3


async def test_what_was_answered_is_not_asked_again(server: JudgeServer) -> None:
    notes = Notes()
    server.behave("good")
    before = await ask(settings(server, concurrency=1), question(), votes=2, notes=notes)  # in the order of the votes
    notes.given = notes.given[:1]
    server.behave("bad")
    after = await ask(settings(server), question(), votes=2, notes=notes)
    assert len(server.requests) == 1
    assert after[0] == before[0]
    assert after[1].reading.score == Scored(0)


async def test_an_answer_that_is_stored_no_more_is_asked_for_again(server: JudgeServer) -> None:
    notes = Notes()
    before = {vote.answers for vote in await ask(settings(server), question(), votes=2, notes=notes)}
    notes.cleared = (1,)
    server.behave("bad")
    first, second = await ask(settings(server), question(), votes=2, notes=notes)
    assert first.answers in before
    assert (second.reading.score, len(server.requests)) == (Scored(0), 1)
    # Both are told of, and both were paid for; under one place there is one answer alone.
    assert second.usage.calls == 2
    assert [kept.place.attempt for kept, _text in notes.given if kept.place.vote == 1] == [0, 1]


async def test_at_most_so_many_calls_at_once(server: JudgeServer) -> None:
    server.behave("wait")
    asking = asyncio.create_task(ask(settings(server, concurrency=3), question(), votes=9))
    while server.running < 3:
        await asyncio.wait_for(server.arrived.wait(), 110)
        server.arrived.clear()
    server.go_on.set()
    assert len(await asking) == 9
    assert server.most_running == 3


async def test_an_endpoint_that_fails_is_left_alone(server: JudgeServer) -> None:
    """It rests after so many failures in a row, and one call at a time finds out whether it is well."""
    server.behave(*["500"] * Breaker.THRESHOLD, "good")
    votes = await ask(settings(server, attempts=10, concurrency=4), question(), votes=4)
    assert {vote.reading.score for vote in votes} == {Scored(1)}
    assert len(server.requests) <= Breaker.THRESHOLD + 4


async def test_the_scripted_judge_answers_the_same_and_by_its_rules() -> None:
    script = [{"contains": "Do it", "score": 0.3}]
    given = JudgeSettings(name="demo", kind="scripted", script=script)  # type: ignore[arg-type]
    for kind, value in ((Kind.OUTCOME, 0.0), (Kind.RUBRIC, 0.3), (Kind.VALUE_CURVE, 0.3), (Kind.PAIRWISE, 0.5)):
        (vote,) = await ask(given, question(kind))
        assert vote.reading.score == Scored(value), vote.reading.message
    free = JudgeSettings(name="demo", kind="scripted")
    first, second = await ask(free, question()), await ask(free, question())
    assert first[0].reading.score == second[0].reading.score
    assert isinstance(first[0].reading.score, Scored)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ("[]", "at least one"),
        ("{}", "must be a list of judges"),
        ("[1]", "0: "),
        ('[{"name": "a", "kind": "openai"}]', "model and base_url must be given for kind openai"),
        ('[{"name": "a", "kind": "openai", "base_url": "http://h"}]', "0: model must be given"),
        ('[{"name": "a", "kind": "openai", "model": "m", "base_url": "localhost:8000"}]', "0/base_url: is no address"),
        ('[{"name": "a", "kind": "openai", "model": "m", "base_url": "http://"}]', "0/base_url: is no address"),
        ('[{"name": "a", "kind": "openai", "model": "m", "base_url": "http://s3cret@h:x"}]', "0/base_url: is no addre"),
        ('[{"name": "a", "kind": "openai", "model": "m", "base_url": "http://h:99999"}]', "0/base_url: is no address"),
        ('[{"name": "My Judge", "kind": "scripted"}]', "0/name: must be 1 to 64 of a-z"),
        ('[{"name": "a", "kind": "scripted", "modle": "m"}]', "0/modle: is no field; there are name, kind, model"),
        (
            '[{"name": "a", "kind": "scripted", "script": [{"contains": "x", "score": 1, "sore": 1}]}]',
            "there are contain",
        ),
        ('[{"name": "a", "kind": "scripted", "requests_per_minute": Infinity}]', "Infinity is no number"),
        (
            '[{"name": "a", "kind": "scripted", "extra_body": {"seed": 18446744073709551616}}]',
            "0/extra_body: cannot be sent: Integer exceeds 64-bit range",
        ),
        ('[{"name": "a", "kind": "scripted"}, {"name": "a", "kind": "scripted"}]', "each name once, and has more of a"),
        ('[{"name": "a", "kind": "magic"}]', "0/kind"),
        ('[{"name": "a", "kind": "scripted", "api_key": "s3cret"}]', "0/api_key: .* api_key_file"),
    ],
)
def test_a_bad_file_of_judges_says_where(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "judges.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=word) as raised:
        load_judges(path)
    assert "s3cret" not in str(raised.value)


def test_a_key_that_is_not_there_says_where_it_should_be() -> None:
    given = JudgeSettings(name="a", kind="openai", model="m", base_url="http://localhost", api_key_env="JUDGE_KEY")
    with pytest.raises(SettingsError, match="JUDGE_KEY"):
        given.key({})
    assert given.key({"JUDGE_KEY": " k "}) == "k"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "cannot be read \\(No such file"),
        (b"\n", "has no key"),
        (b"s3cret\nmore", "more than a key"),
        (b"Bearer s3cret", "more than a key"),
        (b"\xff\xfes3cret", "more than a key"),
    ],
)
def test_a_key_file_that_has_no_key_is_named(tmp_path: Path, content: bytes | None, word: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    given = JudgeSettings(name="a", kind="openai", model="m", base_url="http://localhost", api_key_file=file)
    with pytest.raises(SettingsError, match=f"judge a: api_key_file {file} .*{word}") as raised:
        given.key()
    assert "s3cret" not in str(raised.value)


def test_a_key_file_may_be_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("k\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = JudgeSettings(name="a", kind="openai", model="m", base_url="http://localhost", api_key_file=Path("~/key"))
    assert given.key() == "k"
