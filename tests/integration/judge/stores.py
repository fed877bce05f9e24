"""The stores of judgements, on a database that is there, without a service before them."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime

from orchard.rewards.scores import Scored

from services.common.db import connect
from services.judge.model import Aggregation, Kind, Parameters, Provenance, Reading, Usage, Verdict
from services.judge.store.calls import CallStore, Owner
from services.judge.store.claims import NOWHERE, ClaimStore, Known, Origin
from services.judge.store.endings import Ending, EndingStore
from services.judge.store.lanes import Lines
from services.judge.store.texts import TextStore
from services.judge.store.turns import Turns
from services.judge.store.verdicts import VerdictStore

USAGE = Usage(calls=1, prompt_tokens=10, completion_tokens=1, cost_usd=0.5)


@dataclass
class Stores:
    tenant: str
    verdicts: VerdictStore
    claims: ClaimStore
    calls: CallStore
    endings: EndingStore
    texts: TextStore

    @property
    def owner(self) -> Owner:
        return Owner(self.tenant, "run", "j", "m", "outcome", "b")

    def ending(self, verdict_id: str) -> Ending:
        parameters = Parameters(1, Aggregation.MAJORITY, 1, None, 100)
        provenance = Provenance("[]", parameters, "outcome/2", "", 0, "", "hash", (), ())
        reading, now = Reading(Scored(1.0)), datetime.now(UTC)
        verdict = Verdict(verdict_id, Kind.OUTCOME, reading, None, (), provenance, USAGE, 0.1, now)
        return Ending(self.tenant, "run", "key", verdict, None, Origin("asked", batch_id="b", item_id="i"))

    async def known(self) -> Known:
        return await self.claims.known(self.tenant, "run", "key", NOWHERE)

    async def counted(self) -> tuple[int, int, int]:
        """Calls of the day and of the batch, and the batch's items with a score."""
        ((_judge, _model, _rubric, found),) = await self.calls.usage(self.tenant, date.min, date.max, 10)
        batch = await self.verdicts.batch(self.tenant, "b")
        assert batch is not None
        return found.calls, batch.usage.calls, batch.scored


@asynccontextmanager
async def stores(database: str) -> AsyncIterator[Stores]:
    engine, tenant = connect(database), f"t-{secrets.token_hex(4)}"
    turns, lines = Turns(engine, 2), Lines(engine, 2)
    claims, calls, endings = ClaimStore(lines), CallStore(turns, lines), EndingStore(lines)
    made = Stores(tenant, VerdictStore(turns), claims, calls, endings, TextStore(turns))
    await made.verdicts.begin_batch(tenant, "b", datetime.now(UTC))
    try:
        yield made
    finally:
        for lanes in (claims, calls, endings, lines):
            await lanes.close()
        await engine.dispose()
