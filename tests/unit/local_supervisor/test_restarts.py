import pytest

from services.local.supervisor.unit import restart_delay


@pytest.mark.parametrize(
    ("deaths", "delay"),
    [
        ([100.0], 0.1),
        ([99.0, 100.0], 0.2),
        ([98.0, 99.0, 100.0], 0.4),
        ([97.0, 98.0, 99.0, 100.0], 0.8),
        ([96.0, 97.0, 98.0, 99.0, 100.0], 10.0),
        # Only the last 30 s count.
        ([1.0, 2.0, 3.0, 69.0, 100.0], 0.1),
        ([70.0, 71.0, 72.0, 73.0, 100.0], 10.0),
    ],
)
def test_it_waits_longer_the_more_often_it_dies(deaths: list[float], delay: float) -> None:
    assert restart_delay(deaths, 100.0) == pytest.approx(delay)
