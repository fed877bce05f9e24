"""Signals and threads that come in the middle of something else."""

from __future__ import annotations

import atexit
import threading
from typing import Any

import pytest
from orchard import SandboxClient
from orchard._client import runtime
from orchard._client.cleanup import Registry
from orchard._client.observing import Observers


class BusySession:
    """One whose sandboxes come and go; whoever looks at them sees another session begin."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def tracked(self) -> dict[Any, str]:
        other = BusySession(self._registry)
        self._registry._held[id(other)] = other  # type: ignore[assignment]
        return {}


def test_other_threads_may_begin_and_end_sessions_while_those_that_are_left_are_looked_for() -> None:
    registry = Registry()
    atexit.unregister(registry.at_exit)
    registry._held = {number: BusySession(registry) for number in range(2)}  # type: ignore[misc]
    registry._delete_held()
    assert len(registry._held) == 4


def test_a_thread_that_a_signal_has_stopped_holds_up_nobody_who_needs_grpc() -> None:
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(runtime.grpc_module()), daemon=True)
    with runtime._PROCESS._lock:
        asking.start()
        asking.join(60)
        assert found == [runtime._PROCESS._module]


def test_what_a_client_keeps_is_changed_by_its_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def note(*_arguments: object) -> None:
        threads.append(threading.get_ident())

    with SandboxClient("127.0.0.1:1", api_key="none") as client:
        sandbox, recording = client.attach("box"), client.record("task")
        monkeypatch.setattr(client._client._session, "detach", note)
        monkeypatch.setattr(Observers, "add", note)
        monkeypatch.setattr(Observers, "remove", note)
        sandbox.detach()
        recording.attach(sandbox)
        recording.detach(sandbox)
        assert threads == 3 * [client._portal._thread_id]
