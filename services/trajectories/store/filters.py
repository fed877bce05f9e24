"""From a filter and an order to SQL, with its values apart. Every query carries the tenant."""

from __future__ import annotations

from typing import Any, Final

from psycopg.types.json import Jsonb

from services.trajectories.model import Filter, Order
from services.trajectories.store.tables import COLUMNS, SCHEMA

TOKENS: Final = "(prompt_tokens + completion_tokens)"
_ORDERS: Final = {
    Order.CREATED: "create_time",
    Order.OUTCOME: "outcome_value",
    Order.TURNS: "turns",
    Order.TOKENS: TOKENS,
    Order.COST: "cost_usd",
}
Where = tuple[str, list[Any]]
"""A condition, and the values of its placeholders."""


def conditions(tenant: str, wanted: Filter) -> Where:
    """What must hold of a row."""
    texts, values = ["tenant = %s"], [tenant]

    def add(condition: str, value: Any) -> None:
        if value is not None:
            texts.append(condition)
            values.append(value)

    for name, allowed in wanted.texts.items():
        # Of one value an index also gives the order; of an array it does not.
        if len(allowed) == 1:
            add(f"{name} = %s", allowed[0])
        elif allowed:
            add(f"{name} = ANY(%s)", list(allowed))
    add("status = ANY(%s)", [status.value for status in wanted.statuses] or None)
    add("labels @> %s", Jsonb(dict(wanted.labels)) if wanted.labels else None)
    add("outcome_state = %s", wanted.outcome_state and wanted.outcome_state.value)
    for column, limits in (("outcome_value", wanted.outcome), ("turns", wanted.turns)):
        add(f"{column} >= %s", limits.least)
        add(f"{column} <= %s", limits.most)
    add("longest_tokens <= %s", wanted.tokens_most)
    add("create_time >= %s", wanted.created_from)
    add("create_time < %s", wanted.created_before)
    return " AND ".join(texts), values


def page(
    where: Where,
    order: Order,
    *,
    ascending: bool,
    without_value: bool,
    after: tuple[Any, int] | None,
    count: int,
) -> Where:
    """One page in the order of a column and the key, behind the position `after`.

    Rows without a value have no place in the order: they are listed by key alone, by a query of their own
    (`without_value`), so that both queries follow an index.
    """
    column, than, way = _ORDERS[order], ">" if ascending else "<", "ASC" if ascending else "DESC"
    text, values = where[0], list(where[1])
    if order is Order.OUTCOME:
        text += f" AND outcome_value IS {'' if without_value else 'NOT '}NULL"
    if after is not None and without_value:
        text += f" AND key {than} %s"
        values.append(after[1])
    elif after is not None:
        text += f" AND ({column}, key) {than} (%s, %s)"
        values += after
    query = (
        f"SELECT {COLUMNS}, {column} AS order_value FROM {SCHEMA}.trajectories "  # noqa: S608 (names of our own)
        f"WHERE {text} ORDER BY {column} {way}, key {way} LIMIT %s"
    )
    return query, [*values, count]
