"""`orchard up`: the platform in a process of its own, with signals, a word when it is ready, and an exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from typing import Final

from services.local.runtime.linux import become_subreaper
from services.local.stores.errors import StoreError
from services.local.supervisor.errors import PlatformError, UsageError
from services.local.supervisor.output import Output
from services.local.supervisor.platform import Platform, PlatformOptions
from services.local.supervisor.report import ready_text

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_platform(options: PlatformOptions, *, ready_fd: int | None = None, lifeline_fd: int | None = None) -> int:
    """Run until a signal (or the end of `lifeline_fd`, a pipe of whoever started this); returns the exit code.

    When all is up, one line of JSON is written to `ready_fd`, which is then closed.
    """
    output = Output(log_format=options.log_format)
    try:
        become_subreaper()
        return asyncio.run(_run(options, output, ready_fd, lifeline_fd))
    finally:
        output.close()


async def _run(options: PlatformOptions, output: Output, ready_fd: int | None, lifeline_fd: int | None) -> int:
    stop = asyncio.Event()
    platform = Platform(options, output)
    loop = asyncio.get_running_loop()

    def end() -> None:
        if stop.is_set():
            output.say("hurrying")
            platform.hurry.set()
        stop.set()

    for number in _STOP_SIGNALS:
        # Started with nohup, it is to outlive its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, end)
    if lifeline_fd is not None:
        _watch_end(lifeline_fd, stop)
    try:
        code = await _run_until(platform, stop, output, ready_fd)
    except (PlatformError, StoreError) as error:
        output.shout(str(error))
        return 2 if isinstance(error, UsageError) else 1
    output.say("stopped")
    return code


async def _run_until(platform: Platform, stop: asyncio.Event, output: Output, ready_fd: int | None) -> int:
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(platform.__aenter__())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # Ends what was started already.
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        return 0
    starting.result()
    failing = asyncio.ensure_future(platform.wait_failure())
    try:
        _tell_ready(platform, output, ready_fd)
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            output.shout(f"the supervisor itself failed: {failing.result()!r}")
            return 1
        return 0
    finally:
        failing.cancel()
        await platform.stop()


def _tell_ready(platform: Platform, output: Output, ready_fd: int | None) -> None:
    if platform.profile_note:
        output.shout(platform.profile_note)
    output.say(f"all is up in {platform.start_seconds:.1f} s")
    output.block(ready_text(platform))
    if ready_fd is None:
        return
    layout = platform.layout
    facts = {
        "pid": os.getpid(),
        "endpoint": platform.endpoint,
        "data_directory": str(layout.data),
        "run_directory": str(layout.run),
        "profile": str(platform.options.profile or ""),
        "seconds": round(platform.start_seconds, 3),
    }
    with suppress(BrokenPipeError), os.fdopen(ready_fd, "w") as ready:
        ready.write(json.dumps(facts) + "\n")


def _watch_end(descriptor: int, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    os.set_inheritable(descriptor, False)

    def readable() -> None:
        if not os.read(descriptor, 64):
            loop.remove_reader(descriptor)
            stop.set()

    loop.add_reader(descriptor, readable)
