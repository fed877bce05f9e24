"""Units, text, options, profile and results: no I/O beyond a temporary folder."""

from __future__ import annotations

import codecs
import datetime as dt
import inspect
import itertools
import json
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import orchard
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard import ExecEnd, ExecResult, InvalidArgument
from orchard._client import transport
from orchard._client.options import check_sandbox_id, exec_spec, sandbox_spec
from orchard._client.profile import Profile, load_profile
from orchard._client.text import Characters, decode_in_order
from orchard._client.transport import Retry
from orchard._client.units import duration, parse_size, parse_time
from orchard.sandbox.v1 import sandbox_pb2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, 0),
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5Mi", 3 << 19),
        ("1g", 10**9),
        ("10MB", 10**7),
    ],
)
def test_sizes(text: int | str | None, expected: int) -> None:
    assert parse_size("memory", text) == expected


@pytest.mark.parametrize("bad", ["", "much", "-1", "1XiB", -1, 1 << 63, 1.5, True])
def test_bad_sizes_name_the_field(bad: object) -> None:
    with pytest.raises(orchard.InvalidArgument) as caught:
        parse_size("memory", bad)  # type: ignore[arg-type]
    assert caught.value.violations[0].field == "memory"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5", 1.5), ("90s", 90), ("2h30m", 9000), ("500ms", 0.5), ("1d", 86400)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_time("ttl", text) == seconds


@pytest.mark.parametrize("bad", ["", "soon", "1y", "1h30"])
def test_bad_times(bad: str) -> None:
    with pytest.raises(orchard.InvalidArgument):
        parse_time("ttl", bad)


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan, "3", True, 1e20])
def test_bad_durations(bad: object) -> None:
    with pytest.raises(orchard.InvalidArgument):
        duration("timeout", bad)  # type: ignore[arg-type]


def test_durations_keep_nanoseconds() -> None:
    assert duration("t", 1.000000001).nanos == 1
    assert duration("t", dt.timedelta(minutes=2)).seconds == 120


@given(st.text(), st.lists(st.integers(0, 200)))
def test_decoding_in_pieces_is_decoding_at_once(text: str, cuts: list[int]) -> None:
    data = text.encode()
    characters = Characters()
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [characters.whole("stdout", data[start:end]).decode() for start, end in itertools.pairwise(places)]
    assert "".join(pieces) == text
    assert not list(characters.finish())


@given(st.lists(st.lists(st.sampled_from(b"a\x80\xa0\xbf\xc0\xc3\xe0\xe2\xed\xf0\xf4\xf5\xff"), max_size=5)))
def test_each_chunk_has_the_text_of_an_incremental_decoder(chunks: list[list[int]]) -> None:
    characters = Characters()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in map(bytes, chunks):
        assert characters.whole("stdout", chunk).decode(errors="replace") == decoder.decode(chunk)
    rest = b"".join(left for _stream, left in characters.finish())
    assert rest.decode(errors="replace") == decoder.decode(b"", final=True)


def test_interleaved_streams_decode_apart() -> None:
    chunks = [("stdout", b"\xe2\x82"), ("stderr", b"E"), ("stdout", b"\xac"), ("stderr", b"\xff")]
    assert decode_in_order(chunks) == "E\u20ac\ufffd"


# Options


def test_a_string_goes_to_a_shell_and_a_list_does_not() -> None:
    assert exec_spec("a | b", {}).shell == "a | b"
    assert list(exec_spec(("a", "b c"), {}).argv.args) == ["a", "b c"]
    for bad in ([], b"bytes", ["a", 1]):
        with pytest.raises(orchard.InvalidArgument):
            exec_spec(bad, {})  # type: ignore[arg-type]


def test_defaults_of_exec_and_start_differ() -> None:
    foreground, background = exec_spec("x", {}), exec_spec("x", {}, background=True)
    assert (foreground.concurrent, foreground.no_timeout, foreground.orphan_timeout.seconds) == (False, False, 60)
    assert (background.concurrent, background.no_timeout) == (True, True)
    assert not background.HasField("orphan_timeout")
    assert not foreground.HasField("timeout")
    assert exec_spec("x", {"timeout": None}).no_timeout


def test_a_command_beyond_the_message_limit_is_refused_here() -> None:
    with pytest.raises(orchard.InvalidArgument):
        exec_spec("x" * (3 << 20), {})


def test_sandbox_options() -> None:
    spec = sandbox_spec("img", {"memory": "1GiB", "network": "allow:pypi", "keep_alive": True, "shm": 65536})
    assert spec.resources.memory_bytes == 1 << 30
    assert (spec.network.mode, spec.network.allow_list) == (sandbox_pb2.NETWORK_MODE_ALLOW_LIST, "pypi")
    assert spec.heartbeat_timeout.seconds == 60
    cluster = sandbox_spec(
        "img",
        {"pull_timeout": 90, "image_pull_secret": "s", "node_selector": {"zone": "a"}, "runtime_class": "gvisor"},
    )
    assert (cluster.pull_timeout.seconds, cluster.image_pull_secret, cluster.runtime_class) == (90, "s", "gvisor")
    assert dict(cluster.node_selector) == {"zone": "a"}
    assert sandbox_spec(None, {}).network.mode == sandbox_pb2.NETWORK_MODE_UNSPECIFIED
    with pytest.raises(orchard.InvalidArgument, match="network"):
        sandbox_spec(None, {"network": "everything"})
    with pytest.raises(TypeError, match="memroy"):
        sandbox_spec(None, {"memroy": 1})  # type: ignore[typeddict-unknown-key]


def test_help_shows_every_option() -> None:
    for function in (orchard.Sandbox.exec, orchard.AsyncSandbox.exec, orchard.Sandbox.start):
        assert {"command", "timeout", "cwd", "merge_stderr"} <= set(inspect.signature(function).parameters)
    assert {"image", "memory", "secret_env"} <= set(inspect.signature(orchard.SandboxClient.create).parameters)
    for function in (orchard.Sandbox.exec, orchard.SandboxClient.create, orchard.AsyncSandboxClient.create):
        shown = str(inspect.signature(function))
        assert "env: 'Mapping[str, str]' = ..." in shown
        assert not any(word in shown for word in ("ForwardRef", "Ellipsis"))


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [
        (orchard.SandboxClient, orchard.AsyncSandboxClient),
        (orchard.Sandbox, orchard.AsyncSandbox),
        (orchard.Process, orchard.AsyncProcess),
        (orchard.ExecStream, orchard.AsyncExecStream),
    ],
)
def test_sync_and_async_have_the_same_names_and_parameters(sync: type, asynchronous: type) -> None:
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name in dir(kind)
            if not name.startswith("_") and callable(member := getattr(kind, name))
        }

    assert public(sync) == public(asynchronous)


# Results and errors


def result(**more: object) -> ExecResult:
    values: dict[str, object] = {
        "exec_id": "e",
        "ended": ExecEnd.EXITED,
        "exit_code": 0,
        "signal": 0,
        "message": "",
        "start_time": None,
        "end_time": None,
        "user_cpu": 0.0,
        "system_cpu": 0.0,
        "peak_memory_bytes": 0,
        "output_size": 0,
        "dropped_bytes": 0,
        "command": "cmd",
    }
    return ExecResult(**{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "code", "kind"),
    [
        (ExecEnd.EXITED, 1, orchard.CommandFailed),
        (ExecEnd.SIGNALLED, -1, orchard.CommandFailed),
        (ExecEnd.TIMED_OUT, -1, orchard.CommandTimeout),
        (ExecEnd.OUTPUT_LIMIT, -1, orchard.OutputLimitExceeded),
        (ExecEnd.OUT_OF_MEMORY, -1, orchard.CommandFailed),
    ],
)
def test_check_raises_by_how_it_ended(ended: ExecEnd, code: int, kind: type[orchard.CommandFailed]) -> None:
    with pytest.raises(kind) as caught:
        result(ended=ended, exit_code=code, chunks=(("stderr", b"why\n"),)).check()
    assert type(caught.value) is kind
    assert str(caught.value).endswith("why")
    copied = pickle.loads(pickle.dumps(caught.value))
    assert type(copied) is kind
    assert copied.result == caught.value.result
    assert str(copied) == str(caught.value)


def test_check_returns_a_success() -> None:
    assert result().check().ok


def test_file_errors_survive_pickling_as_python_errors() -> None:
    error = orchard.FileNotFound("gone", metadata={"path": "/x"}, request_id="r", attempts=3)
    copied = pickle.loads(pickle.dumps(error))
    assert isinstance(copied, FileNotFoundError)
    assert (copied.metadata, copied.attempts, copied.errno, str(copied)) == ({"path": "/x"}, 3, 2, "gone")


# Profile


def test_profile_comes_from_the_file_and_the_environment_overrides(tmp_path: Path) -> None:
    environ = {"ORCHARD_CONFIG_DIR": str(tmp_path)}
    (tmp_path / "profile.json").write_text(json.dumps({"endpoint": "127.0.0.1:7411", "api_key": "stored"}))
    assert load_profile(environ=environ) == Profile("127.0.0.1:7411", "stored")
    given = {**environ, "ORCHARD_ENDPOINT": "https://far:443", "ORCHARD_API_KEY": "mine"}
    assert load_profile(environ=given) == Profile("https://far:443", "mine")
    assert load_profile("near:1", "arg", environ=given) == Profile("near:1", "arg")
    assert "stored" not in repr(load_profile(environ=environ))


def test_a_stored_key_is_never_sent_to_another_endpoint(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({"endpoint": "127.0.0.1:7411", "api_key": "stored"}))
    with pytest.raises(orchard.ConfigurationError, match="ORCHARD_API_KEY"):
        load_profile("elsewhere:7411", environ={"ORCHARD_CONFIG_DIR": str(tmp_path)})


@pytest.mark.parametrize("content", [None, "{", "[]", '{"endpoint": "x:1"}'])
def test_a_missing_or_broken_profile_says_what_to_do(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    with pytest.raises(orchard.ConfigurationError) as caught:
        load_profile(environ={"XDG_CONFIG_HOME": "/none", "ORCHARD_CONFIG_DIR": str(tmp_path)})
    assert str(tmp_path) in str(caught.value)
    if content is None:
        assert "orchard up" in str(caught.value)


def test_files_for_tls_come_from_the_environment_or_with_the_stored_endpoint(tmp_path: Path) -> None:
    environ = {"ORCHARD_CONFIG_DIR": str(tmp_path)}
    stored = {"endpoint": "https://x:1", "api_key": "k", "ca_file": "/ca", "cert_file": "/c", "key_file": "/k"}
    (tmp_path / "profile.json").write_text(json.dumps(stored))
    assert load_profile(environ=environ) == Profile("https://x:1", "k", "/ca", "/c", "/k")
    overridden = {**environ, "ORCHARD_CA_FILE": "/other", "ORCHARD_INSECURE": "1"}
    assert load_profile(environ=overridden) == Profile("https://x:1", "k", "/other", "/c", "/k", insecure=True)
    # Nothing that is stored for one platform is used with another.
    elsewhere = {**environ, "ORCHARD_ENDPOINT": "https://y:1", "ORCHARD_API_KEY": "mine"}
    assert load_profile(environ=elsewhere) == Profile("https://y:1", "mine")
    with pytest.raises(orchard.ConfigurationError, match="ORCHARD_INSECURE must be 1 or 0"):
        load_profile("x:1", "k", environ={**environ, "ORCHARD_INSECURE": "perhaps"})


def test_targets() -> None:
    assert Profile("https://host:443/", "k").target == "host:443"
    assert Profile("unix:/tmp/s", "k").is_local
    assert Profile("127.0.0.1:1", "k").is_local
    assert not Profile("http://far:80", "k").is_local
    assert not Profile("127.0.0.1.example.org:80", "k").is_local
    assert Profile("grpcs://host:1", "k").uses_tls
    assert not Profile("grpc://host:1", "k").uses_tls


# Loading


def test_a_stub_loads_no_sdk_and_the_sdk_nothing_of_the_platform() -> None:
    code = (
        "import sys, orchard.exec.v1.exec_service_pb2_grpc as _;"
        "assert not [m for m in sys.modules if m.startswith('orchard._client')];"
        "import orchard; orchard.SandboxClient; assert 'orchard._client.sync' in sys.modules;"
        "bad = {m.split('.')[0] for m in sys.modules} & {'services', 'typer', 'rich', 'opentelemetry'};"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    for name in orchard.__all__:
        assert getattr(orchard, name) is not None
    with pytest.raises(AttributeError):
        orchard.Nonsense  # noqa: B018


async def test_quiet_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that had nothing to say for an hour and then breaks has all of its budget."""
    retry = Retry(60.0)
    retry.succeeded()
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(transport, "time", clock)
    now = 3600.0
    assert retry.failing_seconds == 0
    assert await retry.failed(0.0)
    now += 61
    assert retry.failing_seconds == 61
    assert not await retry.failed(0.0)


async def test_a_retry_budget_counts_from_the_first_failure_after_a_success() -> None:
    retry = Retry(60.0)
    assert await retry.failed(0.0)
    assert await retry.failed(0.01)
    assert retry.attempts == 3
    assert not await retry.failed(100.0)
    retry.succeeded()
    assert await retry.failed(0.0)
    assert not await Retry(0.0).failed(0.0)


async def test_an_operation_that_was_answered_waits_as_long_as_any() -> None:
    """Its budget is that of the moment: the first contact was within the operation itself."""
    budget = 0.0
    retry = Retry(lambda: budget)
    assert not await retry.failed(0.0)
    budget = 10.0
    assert await retry.failed(0.0)


@pytest.mark.parametrize("sandbox_id", ["", "..", "a/b", "Ä", "x" * 64, "-a", "a-", "1a", 5, None])
def test_no_handle_is_made_of_what_is_no_id(sandbox_id: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_sandbox_id(sandbox_id)  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == ["sandbox_id"]


@pytest.mark.parametrize("sandbox_id", ["a", "sb-ve02ibu2n77q5i5a", "x" * 63])
def test_handles_are_made_of_ids(sandbox_id: str) -> None:
    check_sandbox_id(sandbox_id)
