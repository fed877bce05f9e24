import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.watcher.pod_lines import BrokenBodyError, Lines, decode, parse, version_of

EVENT = b'{"type":"ADDED","object":{"kind":"Pod"}}'


def cut(body: bytes, sizes: list[int]) -> list[bytes]:
    chunks = []
    for size in sizes:
        chunks.append(body[:size])
        body = body[size:]
    return [*chunks, body]


@given(
    st.lists(st.binary(min_size=1, max_size=50).map(lambda line: line.replace(b"\n", b"x") + b"!"), max_size=20),
    st.lists(st.integers(0, 60), max_size=60),
)
def test_lines_are_the_same_however_the_body_is_cut(written: list[bytes], sizes: list[int]) -> None:
    lines = Lines()
    found = [line for chunk in cut(b"".join(line + b"\n" for line in written), sizes) for line in lines.feed(chunk)]
    lines.end()
    assert found == written


@given(st.integers(1, len(EVENT)))
def test_a_body_that_ends_within_a_line_is_an_error_and_no_event(size: int) -> None:
    lines = Lines()
    assert lines.feed(EVENT + b"\n" + EVENT[:size]) == [EVENT]
    with pytest.raises(BrokenBodyError, match=f"{size} bytes into a line"):
        lines.end()


def test_blank_lines_are_none() -> None:
    assert Lines().feed(b"\n\r\n  \n" + EVENT + b"\r\n\n") == [EVENT + b"\r"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = Lines(limit=1000)
    for _ in range(10):
        assert lines.feed(bytes(100)) == []
    with pytest.raises(BrokenBodyError, match="1000 bytes"):
        lines.feed(b"x")


def test_an_event_is_its_type_and_its_object() -> None:
    assert decode(EVENT) == ("ADDED", {"kind": "Pod"})


@pytest.mark.parametrize(
    "line",
    [
        b"<html><body>504 Gateway Time-out</body></html>",
        b"{}",
        b"[]",
        b"null",
        b'{"type":"ADDED"}',
        b'{"type":1,"object":{}}',
        b'{"type":"ADDED","object":null}',
        EVENT[:-1],
        b'{"type":"ADDED","object":{"a":"\xff"}}',
    ],
)
def test_what_is_no_event_is_an_error(line: bytes) -> None:
    with pytest.raises(BrokenBodyError):
        decode(line)


TEXTS = st.text(max_size=30) | st.sampled_from([',"status":{"', ',"managedFields":[{"', '"}},{', "\\", '\\"', "é"])
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=4)


@given(MAPS, MAPS, st.lists(MAPS, max_size=2), TEXTS, st.booleans())
def test_what_nobody_reads_is_left_out_and_nothing_else(annotations, labels, environment, message, managed) -> None:
    fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in annotations}}, "f:status": {"f:message": {}}}
    metadata = {"uid": "u", "labels": labels, "annotations": annotations}
    entry = {"manager": message, "subresource": "status", "fieldsType": "FieldsV1", "fieldsV1": fields}
    status = {"phase": "Failed", "message": message}
    containers = [{"env": [{"name": key, "value": value} for key, value in one.items()]} for one in environment]
    pod = {
        "kind": "Pod",
        "metadata": {**metadata, **({"managedFields": [entry]} if managed else {})},
        "spec": {"containers": containers, "nodeSelector": labels},
        "status": status,
    }
    kind, thing = decode(orjson.dumps({"type": "ADDED", "object": pod}))
    assert kind == "ADDED"
    assert (thing["metadata"], thing["status"]) == (metadata, status)


def test_versions_are_numbers() -> None:
    assert version_of({"metadata": {"resourceVersion": "987654321987"}}) == 987654321987
    for thing in ({}, {"metadata": None}, {"metadata": {}}, {"metadata": {"resourceVersion": "abc"}}):
        with pytest.raises(BrokenBodyError):
            version_of(thing)


def test_only_an_object_is_parsed() -> None:
    assert parse(orjson.dumps({"kind": "PodList"})) == {"kind": "PodList"}
    with pytest.raises(BrokenBodyError):
        parse(b'"PodList"')
