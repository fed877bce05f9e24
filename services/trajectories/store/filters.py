"""From a filter and an order to SQL. Every query carries the tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from services.trajectories.model import Filter, Order
from services.trajectories.store.tables import TRAJECTORIES

_T: Final = TRAJECTORIES.c
TOKENS: Final = _T.prompt_tokens + _T.completion_tokens
_COLUMNS: Final[dict[Order, sa.ColumnElement[Any]]] = {
    Order.CREATED: _T.create_time,
    Order.OUTCOME: _T.outcome_value,
    Order.TURNS: _T.turns,
    Order.TOKENS: TOKENS,
    Order.COST: _T.cost_usd,
}


def conditions(tenant: str, wanted: Filter) -> list[sa.ColumnElement[bool]]:
    """What must hold of a row."""
    found: list[sa.ColumnElement[bool]] = [_T.tenant == tenant]
    found += [_T[name].in_(values) for name, values in wanted.texts.items() if values]
    if wanted.statuses:
        found.append(_T.status.in_(wanted.statuses))
    if wanted.labels:
        found.append(_T.labels.contains(dict(wanted.labels)))
    if wanted.outcome_state is not None:
        found.append(_T.outcome_state == wanted.outcome_state)
    for column, limits in ((_T.outcome_value, wanted.outcome), (_T.turns, wanted.turns)):
        if limits.least is not None:
            found.append(column >= limits.least)
        if limits.most is not None:
            found.append(column <= limits.most)
    if wanted.tokens_most is not None:
        found.append(_T.longest_tokens <= wanted.tokens_most)
    if wanted.created_from is not None:
        found.append(_T.create_time >= wanted.created_from)
    if wanted.created_before is not None:
        found.append(_T.create_time < wanted.created_before)
    return found


def order_value(order: Order) -> sa.ColumnElement[Any]:
    """What a list is ordered by."""
    return _COLUMNS[order]


def page(
    where: Sequence[sa.ColumnElement[bool]],
    order: Order,
    *,
    ascending: bool,
    without_value: bool,
    after: tuple[Any, int] | None,
    count: int,
) -> sa.Select[Any]:
    """One page in the order of a column and the key, behind the position `after`.

    Rows without a value have no place in the order: they are listed by key alone, by a query of their own
    (`without_value`), so that both queries follow an index.
    """
    column = order_value(order)
    query = sa.select(TRAJECTORIES, column.label("order_value")).where(*where)
    keys: list[sa.ColumnElement[Any]] = [_T.key] if without_value else [column, _T.key]
    if order is Order.OUTCOME:
        query = query.where(_T.outcome_value.is_(None) if without_value else _T.outcome_value.is_not(None))
    if after is not None:
        position = sa.tuple_(*[sa.literal(part, key.type) for part, key in zip(after[-len(keys) :], keys, strict=True)])
        here = sa.tuple_(*keys)
        query = query.where(here > position if ascending else here < position)
    return query.order_by(*(key.asc() if ascending else key.desc() for key in keys)).limit(count)
