"""What an agent keeps on its disk: no more than its commands need, and the same after it was written anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from orchard.exec.v1 import exec_pb2

from services.exec_agent import journal, service
from tests.integration.exec_agent.conftest import (
    agent_here,
    problem,
    short_folder,
    spec,
)

RESTARTED = exec_pb2.EXEC_END_AGENT_RESTARTED


def in_state(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(("output-", "journal"))}


async def test_files_go_with_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEPT_COUNT", 2)
    large = spec("head", "-c", "100000", "/dev/zero")
    with short_folder() as folder:
        async with agent_here(folder) as client:
            for number in range(4):
                await client.start(large, exec_id=f"id-{number}")
            assert in_state(folder) == {"journal", "output-id-2", "output-id-3"}
        # A kill between the end of one and the removal of another leaves a file that nobody asks for.
        (folder / "output-stale").write_bytes(b"x" * 100)
        monkeypatch.setattr(journal, "KEPT_COUNT", 1)
        async with agent_here(folder) as client:
            assert in_state(folder) == {"journal", "output-id-3"}
            for number in range(3):
                with problem() as found:
                    await client.start(large, exec_id=f"id-{number}")
                assert found[0].reason == "EXEC_EXPIRED"
        monkeypatch.setattr(service, "KEPT_SECONDS", 0.0)
        async with agent_here(folder) as client:
            assert in_state(folder) == {"journal"}
            assert await client.list() == []
            with problem() as found:
                await client.wait("id-3")
            assert found[0].reason == "EXEC_EXPIRED"


async def test_a_journal_that_was_written_anew_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_GROWTH_LIMIT", 2_000)
    monkeypatch.setattr(service, "KEPT_COUNT", 5)
    monkeypatch.setattr(journal, "KEPT_COUNT", 5)
    with short_folder() as folder:
        async with agent_here(folder) as client:
            await client.start(spec(shell="printf running; sleep 1000", concurrent=True), wait=0, exec_id="running")
            await client.until_output("running", b"running")
            await client.signal("buried", cancel=True)
            inodes = set()
            for number in range(60):
                await client.run(spec("echo", str(number)), f"id-{number}")
                inodes.add((folder / "journal").stat().st_ino)
            assert len(inodes) > 1, "it was written anew"
            before = await client.list()
            assert (folder / "journal").stat().st_size < 8_000
        async with agent_here(folder) as client:
            after = {found.exec_id: found for found in await client.list()}
            assert after["running"].result.ended == RESTARTED
            # The one that has ended just now takes the place of the one that ended first.
            assert list(after) == ["id-59", "id-58", "id-57", "id-56", "buried", "running"]
            assert [after[found.exec_id] for found in before if found.exec_id in after][:-1] == [*before[:4], before[5]]
            assert (await client.read("running")).everything == b"running"
            assert (await client.read("id-57")).everything == b"57\n"
            with problem() as found:
                await client.start(spec("echo", "3"), exec_id="id-3")
            assert found[0].reason == "EXEC_EXPIRED"
