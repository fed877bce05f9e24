import pytest
from google.protobuf.duration_pb2 import Duration

from services.common.errors import InvalidArgumentError
from services.common.validation import Fields, span


def fields_named(call) -> list[str]:
    fields = Fields()
    call(fields)
    try:
        fields.done()
    except InvalidArgumentError as error:
        return [violation.field for violation in error.violations]
    return []


@pytest.mark.parametrize("value", ["a", "a1", "abc-def", "a" * 63, "sb-0123456789abcdef"])
def test_good_sandbox_ids(value: str) -> None:
    assert fields_named(lambda fields: fields.sandbox_id("sandbox_id", value)) == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        "..",
        ".",
        "all",
        "self",
        "default",
        "a" * 64,
        "A",
        "1a",
        "-a",
        "a-",
        "a_b",
        "a/b",
        "é",
        "a\n",
        "a b",
        "日本",
        "a\0",
    ],
)
def test_bad_sandbox_ids_name_the_field(value: str) -> None:
    assert fields_named(lambda fields: fields.sandbox_id("sandbox_id", value)) == ["sandbox_id"]


@pytest.mark.parametrize("value", ["", "..", "a" * 65, "é", "a b", "a/b", "a\n"])
def test_bad_exec_ids_name_the_field(value: str) -> None:
    assert fields_named(lambda fields: fields.token_id("exec_id", value)) == ["exec_id"]


@pytest.mark.parametrize("key", ["A=B", "", "1A", "A-B", "A B", "é", "A\0"])
def test_bad_environment_keys_are_shown(key: str) -> None:
    assert fields_named(lambda fields: fields.env("env", {key: "x"})) == [f"env[{key!r}]"]


def test_a_nul_in_an_environment_value() -> None:
    assert fields_named(lambda fields: fields.env("env", {"A": "x\0y"})) == ["env['A']"]


def test_an_oversized_environment() -> None:
    assert fields_named(lambda fields: fields.env("env", {f"A{n}": "x" * 100_000 for n in range(11)})) == ["env"]
    assert fields_named(lambda fields: fields.env("env", {f"A{number}": "" for number in range(1001)})) == ["env"]


KERNEL = (1 << 17) - 1  # MAX_ARG_STRLEN of Linux is 32 pages of 4 KiB, the final NUL included


def test_what_the_kernel_takes_of_one_variable() -> None:
    assert fields_named(lambda fields: fields.env("env", {"KEY": "x" * (KERNEL - 4)})) == []
    assert fields_named(lambda fields: fields.env("env", {"KEY": "x" * (KERNEL - 3)})) == ["env['KEY']"]
    # Bytes count, not characters.
    assert fields_named(lambda fields: fields.env("env", {"KEY": "é" * ((KERNEL - 4) // 2)})) == []
    assert fields_named(lambda fields: fields.env("env", {"KEY": "é" * (KERNEL // 2)})) == ["env['KEY']"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["x", "y" * KERNEL], []),
        (["x", "y" * (KERNEL + 1)], ["argv[1]"]),
        (["x", "é" * (KERNEL // 2)], []),
        (["x", "é" * (KERNEL // 2 + 1)], ["argv[1]"]),
        (["x" * 100_000] * 10, []),
        (["printf", "%s", *["x" * (64 << 10)] * 16], []),
        (["é" * 50_000] * 12, ["argv"]),
        ([], ["argv"]),
        (["x"] * 65_536, []),
        (["x"] * 65_537, ["argv"]),
        (["", "x"], ["argv[0]"]),
        (["x", ""], []),
        (["x", "a\0b"], ["argv[1]"]),
    ],
    ids=range(13),
)
def test_arguments(arguments: list[str], named: list[str]) -> None:
    assert fields_named(lambda fields: fields.arguments("argv", arguments)) == named


@pytest.mark.parametrize(
    ("seconds", "nanos", "good"),
    [(1, 0, True), (0, 999_999_999, False), (-5, 0, False), (10**12, 0, False), (60, 0, True), (60, 1, False)],
)
def test_durations_have_both_ends(seconds: int, nanos: int, good: bool) -> None:
    value = Duration(seconds=seconds, nanos=nanos)
    named = fields_named(lambda fields: fields.duration("timeout", value, minimum=1, maximum=60))
    assert named == ([] if good else ["timeout"])


def test_every_violation_is_reported_at_once() -> None:
    fields = Fields()
    fields.sandbox_id("sandbox_id", "")
    fields.path("path", "a\0b")
    with pytest.raises(InvalidArgumentError) as caught:
        fields.done()
    assert [violation.field for violation in caught.value.violations] == ["sandbox_id", "path"]
    assert "sandbox_id: is required" in caught.value.message


@pytest.mark.parametrize(("size", "used"), [(0, 100), (1, 1), (1000, 1000)])
def test_page_sizes(size: int, used: int) -> None:
    assert Fields().page_size("page_size", size, default=100, maximum=1000) == used


@pytest.mark.parametrize("size", [-1, 1001])
def test_bad_page_sizes(size: int) -> None:
    assert fields_named(lambda fields: fields.page_size("page_size", size, default=100, maximum=1000)) == ["page_size"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.001, "0.001 s"), (90, "90 s"), (86_400, "86400 s"), (2_592_000, "30 days"), (172_801, "172,801 s")],
)
def test_durations_are_told_in_numbers_that_people_read(seconds: float, text: str) -> None:
    assert span(seconds) == text
