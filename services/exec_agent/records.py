"""Lines of the journal: what they say of a command, and what they come to when an agent reads them all.

    B id sequence create-ns spec-hash command   it is about to be spawned; before anything else of it
    S id pid start-ns                           its process runs
    O id offset stream base64                   output that stands in no file
    L id end                                    its output has reached `end`, and nothing before that is kept
    E id how exit signal end-ns user-us system-us peak-bytes output-bytes message
    N id sequence create-ns spec-hash how end-ns [command, message]
                                                it will never be spawned; the only line of it
    D base64                                    digests of ids that have ended, eight bytes each

Commands and messages are JSON strings; the message of an error that a start ended with is an array. Each line ends with
a CRC-32: what was cut short when an agent was killed does not count.
"""

from __future__ import annotations

import binascii
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from services.common import errors
from services.common.errors import OrchardError
from services.exec_agent.lines import body_of, line
from services.exec_agent.model import Chunk, End, Result

_JOIN_LIMIT: Final = 4 << 10
_DIGEST_BYTES: Final = 8
_DIGESTS_A_LINE: Final = 4096
_NO_HASH: Final = "-"
_ERRORS: Final = {
    kind.__name__: kind
    for kind in (errors.FailedPreconditionError, errors.ResourceExhaustedError, errors.UnavailableError)
}


def digest_of(exec_id: str) -> bytes:
    """Eight bytes instead of an id: a long-lived sandbox may have run a million commands."""
    return hashlib.blake2b(exec_id.encode(), digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True)
class Past:
    """A command as the journal knows it.

    Attributes:
        exec_id: its id.
        sequence: its place among all commands, in the order of their arrival.
        create_ns: when it arrived, in nanoseconds since the epoch.
        spec_hash: of its spec; empty for an id that was cancelled before it arrived.
        display: its command line for people.
        begun: whether it was, or was about to be, spawned.
        pid: of its process; zero before the start.
        start_ns: when it started; zero before.
        result: how it ended.
        error: why it could not start.
        start: offset of the first byte of `output`.
        output: what was noted of its output, without holes.
        end: offset after the last byte.
    """

    exec_id: str
    sequence: int
    create_ns: int
    spec_hash: str
    display: str
    begun: bool = False
    pid: int = 0
    start_ns: int = 0
    result: Result | None = None
    error: OrchardError | None = None
    start: int = 0
    output: list[Chunk] = field(default_factory=list)
    end: int = 0

    def add(self, chunk: Chunk) -> None:
        """Output that was noted. Where some before it could not be, all before it is given up."""
        if chunk.offset != self.end:
            self.lose(chunk.offset)
        last = self.output[-1] if self.output else None
        if last is not None and last.stream == chunk.stream and len(last.data) + len(chunk.data) <= _JOIN_LIMIT:
            self.output[-1] = Chunk(last.offset, last.stream, last.data + chunk.data)
        else:
            self.output.append(chunk)
        self.end += len(chunk.data)

    def lose(self, end: int) -> None:
        """Nothing before `end` is kept."""
        self.output.clear()
        self.start = self.end = end

    def lines(self) -> Iterator[bytes]:
        """All that is to be said of it."""
        if self.result is not None and not self.begun:
            yield never_line(self)
            return
        yield begin_line(self)
        if self.start_ns:
            yield start_line(self.exec_id, self.pid, self.start_ns)
        if self.start:
            yield lost_line(self.exec_id, self.start)
        for chunk in self.output:
            yield output_line(self.exec_id, chunk)
        if self.result is not None:
            yield end_line(self)


# ------------------------------------------------------------ writing


def begin_line(past: Past) -> bytes:
    """It is about to be spawned."""
    command = json.dumps(past.display)
    return line(f"B {past.exec_id} {past.sequence} {past.create_ns} {past.spec_hash or _NO_HASH} {command}")


def start_line(exec_id: str, pid: int, start_ns: int) -> bytes:
    """Its process runs."""
    return line(f"S {exec_id} {pid} {start_ns}")


def output_line(exec_id: str, chunk: Chunk) -> bytes:
    """It wrote this."""
    text = binascii.b2a_base64(chunk.data, newline=False).decode()
    return line(f"O {exec_id} {chunk.offset} {chunk.stream} {text}")


def lost_line(exec_id: str, end: int) -> bytes:
    """Its output up to here is not kept."""
    return line(f"L {exec_id} {end}")


def end_line(past: Past) -> bytes:
    """It ended.

    Raises:
        ValueError: it has not.
    """
    result = _result_of(past)
    return line(
        f"E {past.exec_id} {result.ended.name} {result.exit_code} {result.signal} {result.end_ns} {result.user_us}"
        f" {result.system_us} {result.peak_bytes} {past.end} {json.dumps(_why(past, result))}"
    )


def never_line(past: Past) -> bytes:
    """It will never be spawned: all that is to be said of it.

    Raises:
        ValueError: it has not ended.
    """
    result = _result_of(past)
    words = json.dumps([past.display, _why(past, result)])
    return line(
        f"N {past.exec_id} {past.sequence} {past.create_ns} {past.spec_hash or _NO_HASH} {result.ended.name}"
        f" {result.end_ns} {words}"
    )


def digest_lines(digests: Iterable[bytes]) -> Iterator[bytes]:
    """These have ended."""
    joined = b"".join(digests)
    step = _DIGESTS_A_LINE * _DIGEST_BYTES
    for start in range(0, len(joined), step):
        yield line("D " + binascii.b2a_base64(joined[start : start + step], newline=False).decode())


def _result_of(past: Past) -> Result:
    if past.result is None:
        raise ValueError(f"{past.exec_id} has not ended")
    return past.result


def _why(past: Past, result: Result) -> object:
    error = past.error
    if error is None:
        return result.message
    return [error.message, type(error).__name__, error.reason, dict(error.metadata)]


# ------------------------------------------------------------ reading


@dataclass(slots=True)
class History:
    """What the lines of a journal come to.

    Attributes:
        kept: how many commands that ended are kept, the last ones.
        buried: how many of those that were cancelled before they arrived.
        begun: commands whose end no agent has seen, by id.
        ended: commands that ended, in that order.
        tombstones: those that were cancelled before they arrived.
        digests: of every id that has ended or will never start.
    """

    kept: int
    buried: int
    begun: dict[str, Past] = field(default_factory=dict)
    ended: OrderedDict[str, Past] = field(default_factory=OrderedDict)
    tombstones: OrderedDict[str, Past] = field(default_factory=OrderedDict)
    digests: set[bytes] = field(default_factory=set)

    def recent(self, oldest_ns: int) -> dict[str, Past]:
        """Commands that ended, or will never start, since then, by id."""
        both = (*self.ended.items(), *self.tombstones.items())
        return {exec_id: past for exec_id, past in both if past.result is not None and past.result.end_ns > oldest_ns}

    def replay(self, written: bytes) -> None:
        """Take in a line; one that is not whole is passed over."""
        body = body_of(written)
        if body is None:
            return
        kind, _, rest = body.partition(" ")
        if kind == "D":
            joined = binascii.a2b_base64(rest)
            self.digests.update(joined[i : i + _DIGEST_BYTES] for i in range(0, len(joined), _DIGEST_BYTES))
            return
        exec_id, _, rest = rest.partition(" ")
        if kind == "B":
            sequence, create_ns, spec_hash, command = rest.split(" ", 3)
            past = _past(exec_id, sequence, create_ns, spec_hash)
            past.display, past.begun = json.loads(command), True
            self.begun[exec_id] = past
        elif kind == "E":
            self._end(exec_id, rest)
        elif kind == "N":
            self._never(exec_id, rest)
        else:
            self._add(kind, exec_id, rest)

    def _add(self, kind: str, exec_id: str, rest: str) -> None:
        past = self.begun.get(exec_id) or self.ended.get(exec_id)
        if past is None:  # its beginning was cut short, or it is no longer kept
            return
        words = rest.split(" ")
        if kind == "S":
            past.pid, past.start_ns = int(words[0]), int(words[1])
        elif kind == "O":
            past.add(Chunk(int(words[0]), int(words[1]), binascii.a2b_base64(words[2])))
        elif kind == "L":
            past.lose(int(words[0]))

    def _end(self, exec_id: str, rest: str) -> None:
        self.digests.add(digest_of(exec_id))
        past = self.begun.pop(exec_id, None)
        if past is None:
            return
        how, exit_code, signal, end_ns, user_us, system_us, peak_bytes, size, why = rest.split(" ", 8)
        message, past.error = _parse_why(json.loads(why))
        past.result = Result(
            ended=End[how],
            exit_code=int(exit_code),
            signal=int(signal),
            message=message,
            end_ns=int(end_ns),
            user_us=int(user_us),
            system_us=int(system_us),
            peak_bytes=int(peak_bytes),
        )
        if past.end != int(size):  # the rest is in a file, or could not be noted
            past.lose(int(size))
        _keep(self.ended, past, self.kept)

    def _never(self, exec_id: str, rest: str) -> None:
        self.digests.add(digest_of(exec_id))
        sequence, create_ns, spec_hash, how, end_ns, words = rest.split(" ", 5)
        past = _past(exec_id, sequence, create_ns, spec_hash)
        past.display, why = json.loads(words)
        message, past.error = _parse_why(why)
        past.result = Result(ended=End[how], message=message, end_ns=int(end_ns))
        if past.spec_hash:
            _keep(self.ended, past, self.kept)
        else:
            _keep(self.tombstones, past, self.buried)


def _past(exec_id: str, sequence: str, create_ns: str, spec_hash: str) -> Past:
    return Past(exec_id, int(sequence), int(create_ns), "" if spec_hash == _NO_HASH else spec_hash, "")


def _keep(group: OrderedDict[str, Past], past: Past, limit: int) -> None:
    group[past.exec_id] = past
    if len(group) > limit:
        group.popitem(last=False)


def _parse_why(why: Any) -> tuple[str, OrchardError | None]:
    if isinstance(why, str):
        return why, None
    message, kind, reason, metadata = why
    error = _ERRORS.get(kind, errors.InternalError)(message, reason=reason)
    error.metadata = metadata
    return message, error
