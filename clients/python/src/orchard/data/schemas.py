"""Columns of rows as Parquet has them. pyarrow is imported when a schema is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchard.data.errors import MissingExtraError

if TYPE_CHECKING:
    import pyarrow as pa


def arrow() -> Any:
    """The pyarrow module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtraError("Parquet", "pyarrow", "data") from None
    return pa


def message(*, calls: bool = True) -> pa.DataType:
    """A message with text."""
    pa = arrow()
    fields = [("role", pa.string()), ("content", pa.string())]
    if calls:
        function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
        call = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
        fields += [
            ("reasoning_content", pa.string()),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", pa.string()),
            ("name", pa.string()),
        ]
    return pa.struct(fields)


def images() -> pa.DataType:
    """Images as the `datasets` library keeps them: bytes and a path."""
    pa = arrow()
    return pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def description() -> list[tuple[str, pa.DataType]]:
    """What a row is of."""
    pa = arrow()
    names = ("trajectory_id", "dataset", "instance_id", "repo", "website", "split", "harness", "model")
    return [*((name, pa.string()) for name in names), ("outcome", pa.float64()), ("tools", pa.string())]


def sft() -> pa.Schema:
    """Examples for supervised fine-tuning."""
    pa = arrow()
    sequence = pa.struct([("input_ids", pa.list_(pa.uint32())), ("loss_mask", pa.list_(pa.uint8()))])
    return pa.schema(
        [
            ("id", pa.string()),
            ("messages", pa.list_(message())),
            ("loss_mask", pa.list_(pa.uint8())),
            ("images", images()),
            ("sequences", pa.list_(sequence)),
            *description(),
        ]
    )


def prompt_completion() -> pa.Schema:
    """TRL's conversational prompt and completion."""
    pa = arrow()
    return pa.schema([("prompt", pa.list_(message())), ("completion", pa.list_(message())), ("tools", pa.string())])


def tokens() -> pa.Schema:
    """TRL's tokenized examples."""
    pa = arrow()
    return pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64()))])


def preference() -> pa.Schema:
    """TRL's conversational preference pairs."""
    pa = arrow()
    turns = pa.list_(message())
    return pa.schema(
        [
            ("prompt", turns),
            ("chosen", turns),
            ("rejected", turns),
            ("tools", pa.string()),
            ("score_chosen", pa.float64()),
            ("score_rejected", pa.float64()),
            ("chosen_id", pa.string()),
            ("rejected_id", pa.string()),
            ("group", pa.string()),
        ]
    )


def value() -> pa.Schema:
    """Decisions of a value model."""
    pa = arrow()
    return pa.schema(
        [
            ("id", pa.string()),
            ("turn", pa.int32()),
            ("messages", pa.list_(message())),
            ("response", pa.list_(message())),
            ("images", images()),
            ("reward", pa.float64()),
            ("value", pa.float64()),
            ("target", pa.float64()),
            *description(),
        ]
    )


def public_swe() -> pa.Schema:
    """The `swe` part of the public Orchard dataset."""
    pa = arrow()
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", function)])
    turn = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_call_id", pa.string()),
            ("tool_calls", pa.list_(call)),
        ]
    )
    return pa.schema([("tools", pa.string()), ("messages", pa.list_(turn)), ("metadata", pa.string())])


def public_gui() -> pa.Schema:
    """The `gui` part of the public Orchard dataset."""
    pa = arrow()
    return pa.schema(
        [
            ("messages", pa.list_(message(calls=False))),
            ("images", images()),
            ("reward", pa.float64()),
            ("status", pa.string()),
            ("metadata", pa.string()),
        ]
    )
