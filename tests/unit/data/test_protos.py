"""Messages as plain JSON values: the same as protobuf's own mapping reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given
from orchard.data import DataError, Record
from orchard.data.errors import Where
from orchard.data.nodes import Node
from orchard.data.protos import from_plain, to_plain
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.strategies import SLOW, records


@SLOW
@given(made=records())
def test_they_come_back_and_protobuf_reads_them_too(made: Record) -> None:
    for message in (made.trajectory, *made.steps, *made.values):
        plain = json.loads(json.dumps(to_plain(message), allow_nan=False))
        kind = type(message)
        assert from_plain(Node(plain, Where()), kind()) == message
        assert ParseDict(plain, kind()) == message
        theirs = MessageToDict(message, preserving_proto_field_name=True)
        assert from_plain(Node(_numbers(theirs), Where()), kind()) == message


def _numbers(value: Any) -> Any:
    """Protobuf's own mapping writes whole numbers of 64 bits as texts."""
    names = {"index", "size", "prompt_tokens", "completion_tokens", "cached_tokens", "parent"}
    if isinstance(value, dict):
        return {
            key: int(item) if key in names and isinstance(item, str) else item if key == "labels" else _numbers(item)
            for key, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list) else value


def test_numbers_that_json_lacks() -> None:
    call = pb.ModelCall(logprobs=[float("-inf"), -0.5])
    assert to_plain(call) == {"logprobs": ["-Infinity", -0.5]}
    assert list(from_plain(Node(to_plain(call), Where()), pb.ModelCall()).logprobs) == [float("-inf"), -0.5]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"mood": 1}, "mood: is not known"),
        ({"index": "first"}, "index: does not fit"),
        ({"index": 2**70}, "index: does not fit"),
        ({"role": "ROLE_JUDGE"}, "role: does not fit"),
        ({"content": {}}, "content: does not fit"),
        ({"content": [{"text": 5}]}, r"content\[0\].text: does not fit"),
        ({"time": "noon"}, "time: does not fit"),
        ({"model_call": []}, "model_call: must be an object, not an array"),
        ({"model_call": {"logprobs": ["much"]}}, "model_call.logprobs: does not fit"),
        ([], "must be an object, not an array"),
    ],
)
def test_a_value_that_does_not_fit_is_named(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_plain(Node(value, Where()), pb.Step())
