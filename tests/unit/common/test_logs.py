import json

import pytest

from services.common import logs


def test_fields_of_the_call_are_added_and_secrets_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("test", json_format=True)
    token = logs.call_fields.set({"request_id": "r1", "trace_id": "t1"})
    try:
        logs.get_logger("x").warning("hello", sandbox_id="sb", api_key="ork_1_2", secret_env={"A": "b"})
    finally:
        logs.call_fields.reset(token)
    record = json.loads(capsys.readouterr().err)
    assert record["event"] == "hello"
    assert (record["request_id"], record["trace_id"], record["sandbox_id"]) == ("r1", "t1", "sb")
    assert record["service"] == "test"
    assert (record["api_key"], record["secret_env"]) == ("[hidden]", "[hidden]")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level"):
        logs.configure("test", level="loud")


@pytest.mark.parametrize("value", ["a\nerror   forged", "a\r\x1b[2Kforged", "a\u2028forged"])
def test_a_value_stays_on_its_line(capsys: pytest.CaptureFixture[str], value: str) -> None:
    logs.configure("test")
    logs.get_logger("x").warning("hello", why=value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning hello why=")
    assert line.isprintable()
