import io
import json
import threading

import pytest

from services.local.supervisor.children import LINE_LIMIT, _Lines
from services.local.supervisor.output import Output


def test_lines_get_the_name_of_their_process() -> None:
    stream = io.StringIO()
    output = Output(stream)
    output.line("node", "one")
    output.say("two")
    output.close()
    assert stream.getvalue() == "node      | one\norchard   | two\n"


def test_colours_tell_processes_apart() -> None:
    stream = io.StringIO()
    output = Output(stream, colour=True)
    output.line("node", "one")
    output.line("watcher", "one")
    output.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("\x1b[36m")
    assert second.startswith("\x1b[33m")
    assert first.endswith("\x1b[0m one")


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def coloured() -> bool:
        stream = Terminal()
        output = Output(stream)
        output.say("x")
        output.close()
        return "\x1b" in stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()


def test_json_passes_through_and_the_rest_becomes_json() -> None:
    stream = io.StringIO()
    output = Output(stream, log_format="json")
    output.line("node", '{"event": "x"}')
    output.line("postgres", "LOG:  y")
    output.block("for people\n")
    output.shout("z")
    output.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0] == {"event": "x"}
    assert [(line["service"], line["event"], line["level"]) for line in lines[1:]] == [
        ("postgres", "LOG:  y", "info"),
        ("orchard", "z", "error"),
    ]


def test_a_reader_that_stalls_stalls_nobody() -> None:
    reading = threading.Event()

    class Stalled(io.StringIO):
        def write(self, text: str) -> int:
            reading.wait(110)
            return super().write(text)

    stream = Stalled()
    output = Output(stream)
    for number in range(20_000):
        output.line("node", str(number))
    reading.set()
    while not output._queue.empty():
        threading.Event().wait(0.001)
    output.line("node", "last")
    output.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) < 11_000
    assert "lines were dropped" in lines[-2]
    assert lines[-1] == "node      | last"


def test_all_of_it_is_out_once_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.local.supervisor.output._QUEUE_LIMIT", 2)
    writing, reading = threading.Event(), threading.Event()

    class Buffered(io.StringIO):
        out = ""

        def write(self, text: str) -> int:
            writing.set()
            reading.wait(110)
            return super().write(text)

        def flush(self) -> None:
            self.out = self.getvalue()

    stream = Buffered()
    output = Output(stream)
    output.line("node", "0")
    writing.wait(110)
    for number in range(1, 9):
        output.line("node", str(number))
    closing = threading.Thread(target=output.close)
    closing.start()
    while output._queue.qsize() < 4:
        threading.Event().wait(0.001)
    reading.set()
    closing.join()
    told = "... 6 lines were dropped: the output was not read"
    assert stream.out.splitlines() == [*(f"node      | {number}" for number in range(3)), told]


def test_a_closed_stream_is_survived() -> None:
    stream = io.StringIO()
    output = Output(stream)
    stream.close()
    output.say("x")
    output.close()


def test_lines_are_cut_out_of_chunks_and_are_bounded() -> None:
    found: list[str] = []
    lines = _Lines(found.append)
    lines.data_received(b"a\xff\nb")
    lines.data_received(b"c\r\n\nd")
    lines.connection_lost(None)
    assert found == ["a\ufffd", "bc", "", "d"]
    found.clear()
    lines = _Lines(found.append)
    lines.data_received(b"x" * (3 * LINE_LIMIT))
    assert [len(line) for line in found] == [3 * LINE_LIMIT]
    lines.data_received(b"y" * (LINE_LIMIT - 1))
    lines.data_received(b"y")
    assert [len(line) for line in found] == [3 * LINE_LIMIT, LINE_LIMIT]
