"""The service over gRPC: verdicts with what they rest on, the cache, kills, budgets, rubrics, calibration, usage."""

import asyncio
import hashlib
import json
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from services.common.peer_status import peer_status
from services.judge.rubrics import SOFTWARE_ENGINEERING
from tests.integration.judge.conftest import STEPS, Calls, ServiceProcess, batch_requests, image, step
from tests.support.judge_server import JudgeServer

SCORED = judge_pb2.VERDICT_STATE_SCORED
EXCLUDED = judge_pb2.VERDICT_STATE_EXCLUDED
ABSTAINED = judge_pb2.VERDICT_STATE_ABSTAINED
BUILT_IN = judge_pb2.RubricReference(name=SOFTWARE_ENGINEERING.name)


async def fails(call: Any, code: grpc.StatusCode, *words: str) -> str:
    """The ErrorInfo reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is code, raised.value.details()
    assert all(word in str(raised.value.details()) for word in words), raised.value.details()
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(raised.value)
    assert status is not None
    status.details[0].Unpack(info)
    return info.reason


def criteria(*weights: float) -> list[judge_pb2.Criterion]:
    return [
        judge_pb2.Criterion(name=f"c{number}", description="Good?", weight=weight)
        for number, weight in enumerate(weights)
    ]


async def test_a_verdict_says_what_it_rests_on_and_is_found_again(calls: Calls, server: JudgeServer) -> None:
    fields: dict[str, Any] = {"kind": "RUBRIC", "rubric": BUILT_IN, "gold_patch": "x" * 5000}
    verdict = await calls.judge(**fields)
    assert (verdict.state, verdict.value, verdict.cached) == (SCORED, 1.0, False)
    assert {score.name for score in verdict.scores} == set(SOFTWARE_ENGINEERING.weights)
    found = verdict.provenance
    assert json.loads(found.judges_json)[0]["model"] == "judge-1"
    assert found.prompt_version == "rubric/3"
    assert found.rubric == judge_pb2.RubricReference(name=SOFTWARE_ENGINEERING.name, version=1)
    assert found.rubric_hash == SOFTWARE_ENGINEERING.hash
    assert len(found.trajectory_hash) == 64
    assert [(cut.part, cut.original) for cut in found.cuts] == [("gold_patch", 5000)]
    assert (found.parameters.votes, found.parameters.quorum) == (1, 1)
    (vote,) = verdict.votes
    assert (vote.judge, vote.model, list(vote.evidence), vote.reasoning) == ("model", "judge-1-0601", [1], "It did.")
    usage = judge_pb2.Usage(calls=1, prompt_tokens=1000, completion_tokens=100, cached_tokens=400, cost_usd=0.0026)
    assert verdict.usage == vote.usage == usage
    assert verdict.latency.ToNanoseconds() > 0
    # The raw answer, by its hash.
    chunks = [part.data async for part in calls.GetAnswer(pb.GetAnswerRequest(sha256=vote.answers[0]))]
    assert hashlib.sha256(b"".join(chunks)).hexdigest() == vote.answers[0]
    assert json.loads(b"".join(chunks))["reasoning"] == "It did."
    # By id, and once more: nothing is asked.
    stored = (await calls.GetVerdict(pb.GetVerdictRequest(verdict_id=verdict.verdict_id))).verdict
    assert stored == verdict
    again = await calls.judge(**fields)
    assert (again.verdict_id, again.cached, again.usage) == (verdict.verdict_id, True, judge_pb2.Usage())
    assert len(server.requests) == 1
    # Another tenant knows nothing of it.
    other = calls.of("other")
    missing = other.GetVerdict(pb.GetVerdictRequest(verdict_id=verdict.verdict_id))
    assert await fails(missing, grpc.StatusCode.NOT_FOUND) == "VERDICT_NOT_FOUND"
    not_theirs = other.GetAnswer(pb.GetAnswerRequest(sha256=vote.answers[0])).read()
    assert await fails(not_theirs, grpc.StatusCode.NOT_FOUND) == "ANSWER_NOT_FOUND"
    assert not (await other.judge(**fields)).cached


async def test_whatever_a_verdict_rests_on_makes_another_question(calls: Calls, server: JudgeServer) -> None:
    """And nothing else does."""
    await calls.judge()
    others: list[dict[str, Any]] = [
        {"instruction": "Do that."},
        {"patch": "diff"},
        {"judges": ["other"]},
        {"judges": ["model", "other"]},
        {"kind": "VALUE_CURVE"},
        {"kind": "VALUE_CURVE", "resolved": False},
        {"parameters": judge_pb2.JudgementParameters(temperature=0.0)},
        {"parameters": judge_pb2.JudgementParameters(max_output_tokens=500)},
        {"parameters": judge_pb2.JudgementParameters(votes=2)},
        {"fresh": True},
    ]
    for fields in others:
        assert not (await calls.judge(**fields)).cached, fields
    assert not (await calls.judge([STEPS[0], step(1, "done.")])).cached
    asked = len(server.requests)
    for fields in others[:-1]:
        assert (await calls.judge(**fields)).cached, fields
    assert (await calls.judge(parameters=judge_pb2.JudgementParameters(votes=1, quorum=1))).cached
    assert len(server.requests) == asked


async def test_only_scores_are_found_again(calls: Calls, server: JudgeServer) -> None:
    for behaviour, state, reason in (
        ("429", EXCLUDED, "JUDGE_RATE_LIMITED"),
        ("half", EXCLUDED, "ANSWER_CUT_OFF"),
        ("refusal", ABSTAINED, "JUDGE_REFUSED"),
    ):
        server.behave(behaviour)
        verdict = await calls.judge()
        assert (verdict.state, verdict.reason) == (state, reason)
        assert not verdict.HasField("value")
        assert not verdict.votes[0].HasField("value")
        assert verdict.message
    server.behave("bad")
    verdict = await calls.judge()
    assert (verdict.state, verdict.value, verdict.cached) == (SCORED, 0.0, False)
    assert verdict.HasField("value")


async def test_identical_requests_at_once_are_judged_once(calls: Calls, server: JudgeServer) -> None:
    server.behave("wait")
    asking = [asyncio.create_task(calls.judge()) for _ in range(8)]
    await asyncio.wait_for(server.arrived.wait(), 90)
    assert not any(task.done() for task in asking)
    server.go_on.set()
    verdicts = await asyncio.gather(*asking)
    assert len({verdict.verdict_id for verdict in verdicts}) == 1
    assert len(server.requests) == 1
    assert sorted(verdict.cached for verdict in verdicts) == [False] + [True] * 7


async def test_a_request_whose_caller_leaves_is_judged_for_those_who_stay(calls: Calls, server: JudgeServer) -> None:
    """And what was asked already is answered for them: it is not asked, and paid, a second time."""
    server.behave("wait")
    first = asyncio.create_task(calls.judge())
    await asyncio.wait_for(server.arrived.wait(), 90)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(calls.judge())
    server.go_on.set()
    assert (await second).value == 1.0
    assert len(server.requests) == 1
    (usage,) = (await calls.GetUsage(pb.GetUsageRequest())).usage
    assert (usage.usage.calls, usage.usage.failed_calls) == (1, 0)


async def test_each_kind(calls: Calls, server: JudgeServer) -> None:
    shown = [image(bytes([number]) * 10) for number in range(4)]
    screens = [step(index, role=trajectory_pb2.ROLE_TOOL, content=[part]) for index, (_, part) in enumerate(shown)]
    sent = {sha256: bytes([number]) * 10 for number, (sha256, _part) in enumerate(shown) if number}
    verdict = await calls.judge(screens, images=sent, kind="GUI_SUCCESS")
    assert verdict.value == 1.0
    assert list(verdict.provenance.image_hashes) == [sha256 for sha256, _part in shown[1:]]
    kept = calls.process.objects / "images" / calls.tenant
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == sent
    curve = await calls.judge(kind="VALUE_CURVE")
    assert list(curve.values) == [judge_pb2.StateValue(state=0, step_index=1, value=0.5)]
    pair = await calls.judge(STEPS, STEPS, kind="PAIRWISE")
    assert (pair.state, pair.reason) == (ABSTAINED, "ORDER_DEPENDENT")
    assert len(pair.votes[0].answers) == 2
    tools = [judge_pb2.ToolStatus(tool=name, status=status) for name, status in (("A", 500), ("B", 500), ("C", 200))]
    claw = await calls.judge(kind="CLAW_EVAL", tool_statuses=tools)
    scores = {score.name: score.score for score in claw.scores}
    assert scores == pytest.approx({"completion": 1, "safety": 1, "robustness": 1 / 3}, abs=1e-5)
    assert claw.value == pytest.approx(0.866667, abs=1e-5)
    assert claw.passed
    scripted = await calls.judge(judges=["script"], kind="RUBRIC", rubric=BUILT_IN)
    assert scripted.value == pytest.approx(0.3, abs=1e-9)
    missing = calls.judge(screens, images=dict([next(iter(sent.items()))]), kind="GUI_SUCCESS")
    assert await fails(missing, grpc.StatusCode.INVALID_ARGUMENT, shown[2][0]) == "INVALID_ARGUMENT"


async def test_a_batch_goes_on_after_a_kill_without_asking_again_for_what_was_answered(
    process: ServiceProcess, server: JudgeServer
) -> None:
    """Six items of three votes; the service dies when eight answers are there and all others under way."""
    items = {
        f"i{number}": {"instruction": f"Do {number}.", "parameters": judge_pb2.JudgementParameters(votes=3)}
        for number in range(6)
    }
    server.behave(*["good"] * 8, "hang")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stream = asyncio.create_task(Calls(process, channel).batch("b", items))
        while len(server.requests) < 18 or not await _answers(process, 8):
            await asyncio.sleep(0.02)
        process.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await stream
    server.behave("good")
    process.start()
    async with grpc.aio.insecure_channel(process.address) as channel:
        calls = Calls(process, channel)
        verdicts, progress = await calls.batch("b", items)
        assert {item_id: verdict.value for item_id, verdict in verdicts.items()} == dict.fromkeys(items, 1.0)
        assert len(server.requests) == 10
        assert (progress[-1].scored, progress[-1].usage.calls) == (6, 18)
        # Once more: nothing is asked, everything is there.
        again, _progress = await calls.batch("b", items)
        assert {item: verdict.verdict_id for item, verdict in again.items()} == {
            item: verdict.verdict_id for item, verdict in verdicts.items()
        }
        assert len(server.requests) == 10


async def _answers(process: ServiceProcess, count: int) -> bool:
    """Whether so many answers were committed."""
    import psycopg

    async with await psycopg.AsyncConnection.connect(process.database) as connection:
        cursor = await connection.execute("SELECT sum(calls) FROM judge.usage WHERE tenant = %s", (process.tenant,))
        row = await cursor.fetchone()
    return row is not None and (row[0] or 0) >= count


async def test_a_budget_stops_a_batch_and_a_larger_one_goes_on(calls: Calls, server: JudgeServer) -> None:
    """A call takes 1,100 tokens; its room is its prompt, of a few hundred, and an answer of up to 1,000."""
    parameters = judge_pb2.JudgementParameters(max_output_tokens=1000)
    items = {f"i{number}": {"instruction": f"Do {number}.", "parameters": parameters} for number in range(8)}
    verdicts, progress = await calls.batch("b", items, budget=judge_pb2.Budget(tokens=4000))
    scored = [item_id for item_id, verdict in verdicts.items() if verdict.state == SCORED]
    assert {verdict.reason for verdict in verdicts.values() if verdict.state != SCORED} == {"BUDGET_EXHAUSTED"}
    assert len(verdicts) == 8
    assert 1 <= len(scored) == len(server.requests) <= 3
    last = progress[-1]
    assert (last.scored, last.budget_exhausted) == (len(scored), True)
    assert last.usage.prompt_tokens + last.usage.completion_tokens == 1100 * len(scored) <= 4000
    # What is spent stays spent.
    verdicts, progress = await calls.batch("b", items, budget=judge_pb2.Budget(tokens=4000))
    assert len(server.requests) <= 3
    verdicts, progress = await calls.batch("b", items, budget=judge_pb2.Budget(tokens=50_000))
    assert {verdict.state for verdict in verdicts.values()} == {SCORED}
    assert (progress[-1].scored, progress[-1].budget_exhausted, len(server.requests)) == (8, False, 8)


async def test_batches_keep_their_items_apart(calls: Calls) -> None:
    script = {"judges": ["script"]}
    await calls.batch("b", {"one": script, "two": {**script, "instruction": "Else."}})
    got = await calls.GetBatch(pb.GetBatchRequest(batch_id="b", page_size=1))
    assert (got.progress.scored, [item.item_id for item in got.items]) == (2, ["one"])
    rest = await calls.GetBatch(pb.GetBatchRequest(batch_id="b", page_size=1, page_token=got.next_page_token))
    assert [item.item_id for item in rest.items] == ["two"]
    other = calls.batch("b", {"one": {**script, "instruction": "Something else."}})
    assert await fails(other, grpc.StatusCode.ALREADY_EXISTS) == "ITEM_EXISTS"
    none = calls.of("other").GetBatch(pb.GetBatchRequest(batch_id="b"))
    assert await fails(none, grpc.StatusCode.NOT_FOUND) == "BATCH_NOT_FOUND"

    async def cut_short():
        requests = [request async for request in batch_requests("c", {"one": script})]
        for request in requests[:-1]:
            yield request

    async def all_of(stream: Any) -> list[Any]:
        with peer_status(stream):
            return [response async for response in stream]

    await fails(all_of(calls.JudgeBatch(cut_short())), grpc.StatusCode.INVALID_ARGUMENT, "'one'")


async def test_rubrics_have_versions_that_stay_once_used(calls: Calls) -> None:
    def rubric(*weights: float, **fields: Any) -> pb.PutRubricRequest:
        given = {"name": "mine", "criteria": criteria(*weights)} | fields
        return pb.PutRubricRequest(rubric=judge_pb2.Rubric(**given))

    first = (await calls.PutRubric(rubric(0.5, 0.5))).rubric
    assert (first.version, first.used, first.step) == (1, False, 0.1)
    assert (await calls.PutRubric(rubric(0.5, 0.5))).rubric == first
    changed = (await calls.PutRubric(rubric(0.4, 0.6))).rubric
    assert changed.version == 1
    reference = judge_pb2.RubricReference(name="mine")
    judged = await calls.judge(kind="RUBRIC", rubric=reference, judges=["script"])
    assert judged.provenance.rubric_hash == changed.hash
    assert (await calls.PutRubric(rubric(0.4, 0.6))).rubric.version == 1
    second = (await calls.PutRubric(rubric(0.3, 0.7))).rubric
    assert second.version == 2
    kept = (await calls.GetRubric(pb.GetRubricRequest(rubric={"name": "mine", "version": 1}))).rubric
    assert (kept.hash, kept.used) == (changed.hash, True)
    listed = (await calls.ListRubrics(pb.ListRubricsRequest())).rubrics
    assert [(found.name, found.version) for found in listed] == [("mine", 2), (SOFTWARE_ENGINEERING.name, 1)]
    theirs = (await calls.of("other").ListRubrics(pb.ListRubricsRequest())).rubrics
    assert [found.name for found in theirs] == [SOFTWARE_ENGINEERING.name]
    bad = calls.PutRubric(rubric(0.5, 0.4))
    assert await fails(bad, grpc.StatusCode.INVALID_ARGUMENT, "rubric.criteria", "0.9") == "INVALID_ARGUMENT"
    unknown = calls.judge(kind="RUBRIC", rubric=judge_pb2.RubricReference(name="mine", version=9))
    assert await fails(unknown, grpc.StatusCode.NOT_FOUND) == "RUBRIC_NOT_FOUND"


async def test_calibration_and_usage(calls: Calls, server: JudgeServer) -> None:
    """Judged yes, yes, no, no and nothing; labelled yes, no, no, no and yes."""
    labels = []
    for number, (behaviour, label) in enumerate(
        [("good", True), ("good", False), ("bad", False), ("bad", False), ("refusal", True)]
    ):
        server.behave(behaviour)
        verdict = await calls.judge(instruction=f"Do {number}.")
        labels.append(pb.Label(verdict_id=verdict.verdict_id, positive=label))
    found = await calls.Calibrate(pb.CalibrateRequest(labels=labels))
    counts = (found.true_positive, found.false_positive, found.false_negative, found.true_negative, found.unscored)
    assert counts == (1, 1, 0, 2, 1)
    assert found.accuracy == 0.75
    assert found.kappa == pytest.approx(0.5, abs=1e-9)
    constant = await calls.Calibrate(pb.CalibrateRequest(labels=labels[2:4]))
    assert constant.accuracy == 1
    assert not constant.HasField("kappa")
    unknown = calls.Calibrate(pb.CalibrateRequest(labels=[pb.Label(verdict_id="vd-none", positive=True)]))
    assert await fails(unknown, grpc.StatusCode.NOT_FOUND, "vd-none") == "VERDICT_NOT_FOUND"
    server.behave("500")
    await calls.judge(kind="RUBRIC", rubric=BUILT_IN)
    usage = (await calls.GetUsage(pb.GetUsageRequest())).usage
    by_rubric = {(one.judge, one.model, one.rubric): one.usage for one in usage}
    assert set(by_rubric) == {("model", "judge-1", "outcome"), ("model", "judge-1", SOFTWARE_ENGINEERING.name)}
    assert by_rubric["model", "judge-1", "outcome"].calls == 5
    assert by_rubric["model", "judge-1", "outcome"].cost_usd == pytest.approx(0.013, abs=1e-9)
    failed = by_rubric["model", "judge-1", SOFTWARE_ENGINEERING.name]
    assert (failed.calls, failed.failed_calls, failed.prompt_tokens) == (3, 3, 0)
    assert not (await calls.of("other").GetUsage(pb.GetUsageRequest())).usage


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"kind": "UNSPECIFIED"}, "judgement.kind"),
        ({"instruction": ""}, "judgement.instruction"),
        ({"judges": ["nobody"]}, "nobody"),
        ({"judges": ["model", "model"]}, "judgement.judges"),
        ({"judges": ["x" * 10_000]}, "judgement.judges[0]"),
        ({"kind": "RUBRIC", "rubric": {"name": "a\0b"}}, "judgement.rubric.name"),
        ({"kind": "RUBRIC", "rubric": {"name": "x" * 10_000}}, "judgement.rubric.name"),
        ({"kind": "RUBRIC"}, "judgement.rubric"),
        ({"rubric": BUILT_IN}, "judgement.rubric"),
        ({"parameters": {"votes": 17}}, "judgement.parameters.votes"),
        ({"parameters": {"quorum": 2}}, "judgement.parameters.quorum"),
        ({"parameters": {"temperature": 2.5}}, "judgement.parameters.temperature"),
        ({"parameters": {"max_output_tokens": 1}}, "judgement.parameters.max_output_tokens"),
        ({"kind": "VALUE_CURVE", "parameters": {"aggregation": 1}}, "MAJORITY"),
        ({"kind": "PAIRWISE", "patch": "diff"}, "judgement.patch"),
        ({"kind": "PAIRWISE"}, "attempt 1 has no step"),
        ({"budget": {"tokens": -1}}, "judgement.budget.tokens"),
        ({"budget": {"cost_usd": float("nan")}}, "judgement.budget.cost_usd"),
        ({"tool_statuses": [{"tool": "a", "status": 7}]}, "judgement.tool_statuses[0].status"),
    ],
)
def test_a_bad_judgement_names_its_field(fields: dict[str, Any], word: str) -> None:
    """Without the service: what it would refuse."""
    from services.common.errors import InvalidArgumentError
    from services.judge.backends.endpoint import make_endpoint
    from services.judge.backends.settings import JudgeSettings
    from services.judge.service import Judging
    from services.judge.servicer_intake import Intake
    from tests.integration.judge.conftest import judgement

    class Shelf:
        async def use(self, *_named: Any) -> Any:
            return SOFTWARE_ENGINEERING

    async def refused() -> None:
        intake = Intake(judgement(**fields))
        intake.steps(pb.AttemptSteps(steps=STEPS))
        endpoint = make_endpoint(JudgeSettings(name="model", kind="scripted"))
        nothing: Any = None
        stores = [nothing] * 4
        judging = Judging({"model": endpoint}, *stores, Shelf(), *stores)  # type: ignore[arg-type]
        await judging.prepare("t", intake.request())

    with pytest.raises(InvalidArgumentError) as raised:
        asyncio.run(refused())
    assert word in raised.value.message


def test_steps_and_images_are_checked() -> None:
    from services.common.errors import InvalidArgumentError
    from services.judge.servicer_intake import Intake
    from tests.integration.judge.conftest import judgement

    def refused(*feeds: Any) -> str:
        intake = Intake(judgement())
        with pytest.raises(InvalidArgumentError) as raised:
            for feed in feeds:
                (intake.image if isinstance(feed, pb.ImageChunk) else intake.steps)(feed)
            intake.request()
        return raised.value.message

    assert "attempt 0 has no step" in refused()
    assert "steps[2].index: must be 1" in refused(pb.AttemptSteps(steps=[STEPS[0], step(2)]))
    assert "steps.attempt" in refused(pb.AttemptSteps(attempt=1, steps=STEPS))
    assert "steps[0].role" in refused(pb.AttemptSteps(steps=[step(0, role=0)]))
    blob = {"blob": {"sha256": "0" * 64, "media_type": "text/plain"}}
    assert "steps[0].content[0]" in refused(pb.AttemptSteps(steps=[step(0, content=[blob])]))
    steps = pb.AttemptSteps(steps=STEPS)
    assert "another hash" in refused(steps, pb.ImageChunk(sha256="0" * 64, media_type="image/png", data=b"x"))
    assert "image.media_type" in refused(steps, pb.ImageChunk(sha256="0" * 64, media_type="image/svg+xml", data=b"x"))
    assert "image.sha256" in refused(steps, pb.ImageChunk(sha256="../x", media_type="image/png", data=b"x"))
