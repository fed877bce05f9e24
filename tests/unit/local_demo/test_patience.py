"""Limits of time on a machine that does other work."""

import os

import pytest

from services.local.demo.evaluate import load_now, patience


@pytest.mark.parametrize(
    ("load", "cores", "times"),
    [(0.0, 2, 1.0), (2.0, 2, 1.0), (3.0, 2, 1.5), (10.0, 2, 5.0), (20.0, 64, 1.0), (500.0, 2, 8.0)],
)
def test_a_limit_grows_with_what_waits_for_a_core(load: float, cores: int, times: float) -> None:
    assert patience(load, cores) == times


async def test_the_load_is_that_of_now() -> None:
    assert 0 <= await load_now() <= os.getloadavg()[0] + 1
