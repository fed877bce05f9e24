"""Formats: what is written comes back, and what cannot be is said."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.data import DataError, Record, Report, codecs, detect, read
from orchard.data.errors import Where
from orchard.data.messages import inline_images, message_of, step_of
from orchard.data.nodes import Node
from orchard.data.record import text_of
from orchard.data.training.conversations import conversations

from tests.unit.data.files import write
from tests.unit.data.strategies import BODIES, JSON, OBJECTS, SLOW, TEXTS, WORDS, records, same


@SLOW
@given(record=records())
def test_our_own_format_loses_nothing(record: Record, tmp_path: Path) -> None:
    path, report = write(record, "orchard", tmp_path)
    (back,) = read(path)
    same(record, back)
    assert report.losses == ()
    for step in record.steps:
        assert text_of(step, back.bodies) == text_of(step, BODIES)


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": TEXTS
        | st.lists(
            st.builds(lambda text: {"type": "text", "text": text}, TEXTS)
            | st.just({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
            | st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}})
            | st.just({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
            max_size=3,
        ),
        "name": WORDS,
        "tool_call_id": WORDS,
        "reasoning_content": TEXTS.filter(bool),
        "refusal": TEXTS,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": WORDS,
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries({"name": WORDS, "arguments": TEXTS | OBJECTS}),
                }
            ),
            min_size=1,
            max_size=2,
        ),
    },
)


@SLOW
@given(message=MESSAGES)
def test_a_message_comes_back_as_it_was(message: dict[str, Any]) -> None:
    bodies: dict[str, bytes] = {}
    step = step_of(Node(message, Where("f")), 0, bodies)
    back = message_of(step, bodies, inline_images(bodies))
    assert back == {"content": None} | message


@SLOW
@given(lines=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), OBJECTS), min_size=1, max_size=2))
def test_openai_lines_come_back(lines: list[tuple[list[dict[str, Any]], dict[str, Any]]], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{f"x-{key}": value for key, value in others.items()} | {"messages": m} for m, others in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for record, row in zip(read(path, format="openai"), rows, strict=True):
        written, report = write(record, "openai", tmp_path)
        back = json.loads(written.read_text())
        assert back.pop("id")
        del back["orchard"]
        assert back == row | {"messages": [{"content": None} | message for message in row["messages"]]}
        assert report.losses == ()


@SLOW
@given(record=records(least=1))
def test_messages_keep_the_description_of_a_trajectory(record: Record, tmp_path: Path) -> None:
    path, _ = write(record, "openai", tmp_path)
    found = conversations(record)
    back = list(read(path, format="openai"))
    assert len(back) == len(found)
    for conversation, one in zip(found, back, strict=True):
        assert one.trajectory.outcome == record.trajectory.outcome
        assert one.trajectory.labels == record.trajectory.labels
        assert [step.role for step in one.steps] == [record.steps[index].role for index in conversation.path]


PREDICTIONS = st.fixed_dictionaries(
    {"instance_id": WORDS, "model_name_or_path": WORDS, "model_patch": TEXTS | st.none()},
    optional={"cost": st.integers(0, 9)},
)


@SLOW
@given(predictions=st.lists(PREDICTIONS, min_size=1, max_size=4))
@pytest.mark.parametrize("shape", ["lines", "array", "by instance"])
def test_predictions_come_back(predictions: list[dict[str, Any]], shape: str, tmp_path: Path) -> None:
    path = tmp_path / ("in.jsonl" if shape == "lines" else "in.json")
    if shape == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in predictions))
    elif shape == "array":
        path.write_text(json.dumps(predictions))
    else:
        predictions = list({row["instance_id"]: row for row in predictions}.values())
        path.write_text(json.dumps({row["instance_id"]: row for row in predictions}))
    assert detect(path).name == "swebench"
    for record, row in zip(read(path), predictions, strict=True):
        written, _ = write(record, "swebench", tmp_path)
        assert json.loads(written.read_text()) == row


def test_a_prediction_without_a_patch_says_so(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"instance_id": "a", "model_patch": ""}\n{"instance_id": "b"}\n')
    with pytest.raises(DataError, match=r"in.jsonl:2: model_patch: is missing"):
        list(read(path, format="swebench"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [}', r"in.jsonl:2: is no JSON: .* column 15"),
        ('{"messages": ["cut', r"in.jsonl:2: is no JSON: Invalid control character at column 19"),
        ('{"messages": NaN}', r"in.jsonl:2: has NaN, which is no JSON"),
        ('{"messages": {}}', r"in.jsonl:2: messages: must be an array, not an object"),
        ('{"messages": [{"content": "x"}]}', r"in.jsonl:2: messages\[0\].role: is missing"),
        ('{"messages": [{"role": "judge"}]}', r"in.jsonl:2: messages\[0\].role: is 'judge'; use one of system"),
        ('{"messages": [{"role": "user", "content": 1}]}', r"messages\[0\].content: must be an array, not a number"),
        ("[" * 100_000, r"in.jsonl:2: is nested too deep"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"messages": []}}\n{text}\n')
    with pytest.raises(DataError, match=message) as caught:
        list(read(path, format="openai"))
    assert caught.value.where.line == 2


def test_what_is_before_a_bad_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"messages": []}\n{"messages": []}\n{\n')
    found = read(path, format="openai")
    assert [next(found).id, next(found).id] == ["in-1", "in-2"]
    with pytest.raises(DataError):
        next(found)


def test_a_format_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no format 'parchment'; use one of orchard"):
        read(tmp_path, format="parchment")
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"is of no format that is known; name it with format \(--from\): orchard"):
        detect(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="is not there"):
        detect(tmp_path / "y.jsonl")


@SLOW
@given(value=JSON)
def test_any_json_is_read_or_refused_by_name(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "in.jsonl"
    path.write_text(json.dumps(value) + "\n")
    for codec in codecs().values():
        if codec.read is None or not path.match("*.jsonl"):
            continue
        with contextlib.suppress(DataError):
            list(codec.read(path, Report()))
