from __future__ import annotations

import os
from pathlib import Path

from services.exec_agent.oom import OomCounter


def test_counter_files_of_both_cgroup_versions(tmp_path: Path) -> None:
    for name, text in (("v1", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"), ("v2", "low 0\noom 9\noom_kill 7\n")):
        file = tmp_path / name
        file.write_text(text)
        descriptor = os.open(file, os.O_RDONLY)
        counter = OomCounter(descriptor, None)
        assert counter.read() == 7
        file.write_text(text.replace("7", "8"))
        assert counter.read() == 8
        os.close(descriptor)


def test_an_event_descriptor_adds_up() -> None:
    descriptor = os.eventfd(0)
    counter = OomCounter(None, descriptor)
    assert counter.read() == 0
    os.eventfd_write(descriptor, 2)
    assert counter.read() == 2
    os.eventfd_write(descriptor, 1)
    assert counter.read() == 3
    os.close(descriptor)


def test_without_a_source_it_never_moves() -> None:
    assert OomCounter(None, None).read() == 0
