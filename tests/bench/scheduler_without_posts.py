"""`python -m tests.bench.scheduler_without_posts`: the scheduler as it is, but that no request for a Pod is sent.

All that comes before is done, up to the bytes of the request. What the API server would answer is made up: that is what
`admission_per_second` leaves out.
"""

from __future__ import annotations

import secrets
import sys

import orjson

from services.common.process import run_service
from services.scheduler.app import run
from services.scheduler.pod_api import Pod, PodApi
from services.scheduler.settings import SchedulerSettings


async def _create(self: PodApi, pod: Pod) -> Pod | None:
    orjson.dumps(pod)
    return {"metadata": {"uid": secrets.token_hex(16)}}


if __name__ == "__main__":
    PodApi.create = _create  # type: ignore[method-assign]
    sys.exit(run_service("scheduler", SchedulerSettings, run))
