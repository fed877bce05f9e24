"""Delays double up to a bound, and no two who fail together come back together."""

import random

from services.common.backoff import Backoff


def test_delays_are_spread_from_nothing_to_a_bound_that_doubles() -> None:
    draws = [[backoff.next() for _ in range(8)] for backoff in (Backoff(1.0, 30.0) for _ in range(500))]
    for place, bound in enumerate([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]):
        delays = [row[place] for row in draws]
        assert all(0 <= delay <= bound for delay in delays)
        assert min(delays) < bound / 10
        assert max(delays) > bound * 0.9
        assert len(set(delays)) == len(delays)


def test_a_success_begins_anew() -> None:
    backoff = Backoff(0.5, 60.0, rng=random.Random(1))
    for _ in range(20):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.5
