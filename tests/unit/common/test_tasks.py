import asyncio

from services.common.tasks import TaskGroup


async def test_a_task_that_dies_is_noticed() -> None:
    async def dies() -> None:
        raise ValueError("boom")

    async with TaskGroup() as tasks:
        tasks.start("dies", dies())
        assert isinstance(await asyncio.wait_for(tasks.failed, 110), ValueError)


async def test_a_task_that_should_never_end_is_noticed_when_it_does() -> None:
    async def ends() -> None:
        return

    async with TaskGroup() as tasks:
        tasks.start("ends", ends())
        assert "ended" in str(await asyncio.wait_for(tasks.failed, 110))


async def test_a_task_that_may_end_may() -> None:
    async def ends() -> None:
        return

    async with TaskGroup() as tasks:
        await tasks.start("ends", ends(), forever=False)
        assert not tasks.failed.done()


async def test_close_waits_for_clean_up() -> None:
    cleaned = asyncio.Event()
    running = asyncio.Event()

    async def works() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async with TaskGroup() as tasks:
        tasks.start("works", works())
        await running.wait()
    assert cleaned.is_set()
    assert not tasks.failed.done()
