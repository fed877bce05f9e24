"""Pages are as small as a client takes them, whatever is on them."""

import grpc
import psycopg
import pytest
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb

from services.common.pages import encode_token
from tests.integration.judge.conftest import Calls
from tests.integration.judge.test_service import fails

MESSAGE_LIMIT = 4 << 20
"""What a client takes at most."""
_LONG = "UPDATE judge.verdicts SET body = jsonb_set(body, %s, to_jsonb(repeat('x', 8192))) WHERE tenant = %s"
_SAME = """
INSERT INTO judge.batch_items (tenant, batch_id, item_id, asked, verdict_id, cached, again)
SELECT tenant, batch_id, item_id || '-' || number, asked, verdict_id, cached, again
FROM judge.batch_items, generate_series(1, %s) AS number WHERE tenant = %s AND batch_id = %s
"""


async def test_a_batch_of_large_verdicts_can_be_read(calls: Calls) -> None:
    """Each as long as the reasons of a panel of eight make it; many items have one like it."""
    await calls.batch("b", {"i": {"judges": ["script"], "parameters": {"votes": 8}}})
    more = MESSAGE_LIMIT // (8 * 8192)
    async with await psycopg.AsyncConnection.connect(calls.process.database, autocommit=True) as connection:
        for vote in range(8):
            await connection.execute(_LONG, (f"{{votes,{vote},reading,reasoning}}", calls.tenant))
        await connection.execute(_SAME, (more, calls.tenant, "b"))
    read: list[str] = []
    request = pb.GetBatchRequest(batch_id="b", page_size=1000)
    while True:
        page = await calls.GetBatch(request)
        read += [item.item_id for item in page.items]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert len(read) == len(set(read)) == more + 1
    # A stream has them in several messages too.
    again, _progress = await calls.batch("b", {}, several=True)
    assert again.keys() == set(read)


async def test_many_large_rubrics_can_be_listed(calls: Calls) -> None:
    criteria = [judge_pb2.Criterion(name=f"c{place}", description="x" * 4096, weight=1 / 32) for place in range(32)]
    names = [f"r{number:02}" for number in range(MESSAGE_LIMIT // (32 * 4096))]
    for name in names:
        await calls.PutRubric(pb.PutRubricRequest(rubric=judge_pb2.Rubric(name=name, criteria=criteria)))
    read: list[str] = []
    request = pb.ListRubricsRequest(page_size=1000)
    while True:
        page = await calls.ListRubrics(request)
        read += [rubric.name for rubric in page.rubrics]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert [name for name in read if name in names] == names


@pytest.mark.parametrize("after", ["a\0b", "\ud800", 7])
async def test_a_token_that_is_none_is_refused(calls: Calls, after: str | int) -> None:
    listed = calls.ListRubrics(pb.ListRubricsRequest(page_token=encode_token((after,))))
    assert await fails(listed, grpc.StatusCode.INVALID_ARGUMENT, "page_token")
