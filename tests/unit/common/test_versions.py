"""Versions, and the rule of how old an agent may be."""

import pytest

from services import __version__
from services.common.versions import MINIMUM_AGENT, parse, works
from services.exec_agent.settings import VERSION


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.1.0", (0, 1, 0)),
        ("10.20.30", (10, 20, 30)),
        ("1.2.3-rc.1", (1, 2, 3)),
        ("1.2.3+build", (1, 2, 3)),
        ("1.2", None),
        ("v1.2.3", None),
        ("1.2.3 ", None),
        ("", None),
        ("9999999.0.0", None),
    ],
)
def test_parse(text: str, numbers: tuple[int, int, int] | None) -> None:
    assert parse(text) == numbers


def test_newer_is_a_matter_of_numbers_and_not_of_letters() -> None:
    assert works("0.10.0", minimum="0.9.0")
    assert not works("0.9.9", minimum="0.10.0")
    assert works("1.0.0", minimum="1.0.0")
    assert not works("nonsense", minimum="0.0.0")


def test_a_gateway_works_with_agents_one_minor_version_older() -> None:
    own, minimum = parse(__version__), parse(MINIMUM_AGENT)
    assert own is not None
    assert minimum is not None
    first_release = (0, 1, 0)
    assert minimum <= max(first_release, (own[0], max(0, own[1] - 1), 0))


def test_the_agent_of_this_version_works() -> None:
    assert works(VERSION)
    assert __version__ == VERSION
