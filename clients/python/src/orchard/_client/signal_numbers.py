"""The signals of a sandbox, which are Linux's: other systems have other numbers for some of the names."""

from __future__ import annotations

import enum
import signal as signals
from collections.abc import Mapping
from typing import Final

from orchard._client.errors import InvalidArgument

# signal(7), of x86, ARM and most others.
_NAMES: Final = (
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU URG "
    "XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
_NUMBERS: Final[Mapping[str, int]] = {
    **{name: number for number, name in enumerate(_NAMES.split(), start=1)},
    "IOT": 6,
    "CLD": 17,
    "POLL": 29,
    "RTMIN": 34,
    "RTMAX": 64,
}


def signal_number(signal: int | str | signals.Signals) -> int:
    """The number of a signal in a sandbox; a number is one already.

    Raises:
        InvalidArgument: it is none.
    """
    if isinstance(signal, int) and not isinstance(signal, enum.Enum):
        return signal
    name = signal.name if isinstance(signal, enum.Enum) else str(signal).upper()
    number = _NUMBERS.get(name.removeprefix("SIG"))
    if number is None:
        raise InvalidArgument.of("number", f"{signal!r} is no signal; give a number or a name like 'TERM'")
    return number
