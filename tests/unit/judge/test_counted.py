"""A value is there from the first who holds it to the last."""

from __future__ import annotations

import pytest

from services.judge.counted import Counted


def test_all_who_hold_it_at_once_have_one_value_and_the_next_one_another() -> None:
    counted: Counted[str, object] = Counted()
    with counted.held("a", object) as first:
        with counted.held("a", object) as second, counted.held("b", object) as other:
            assert second is first
            assert other is not first
        with counted.held("a", object) as third:
            assert third is first
    with counted.held("a", object) as later:
        assert later is not first


def test_who_fails_lets_go() -> None:
    counted: Counted[str, int] = Counted()
    with pytest.raises(ValueError, match="why"), counted.held("a", lambda: 1):
        raise ValueError("why")
    with counted.held("a", lambda: 2) as value:
        assert value == 2
