from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator

import pytest
import structlog

from shared.process.log import configure, flush_log
from shared.process.tasks import TaskOwner


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure("probe", "p0", "info", "json", stream=stream)
    yield stream
    flush_log(30.0)
    structlog.reset_defaults()


async def forever() -> None:
    await asyncio.Event().wait()


async def test_close_cancels_in_the_order_of_starts_and_awaits_all() -> None:
    ended: list[int] = []

    async def job(number: int) -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    owner = TaskOwner()
    tasks = [owner.start(job(i), name=f"job {i}") for i in range(20)]
    await asyncio.sleep(0)
    await owner.close()
    assert all(task.cancelled() for task in tasks)
    assert ended == list(range(20))
    assert len(owner) == 0
    await owner.close()


async def test_a_task_that_is_done_leaves_the_owner() -> None:
    async def answer() -> int:
        return 42

    async with TaskOwner() as owner:
        task = owner.start(answer(), name="answer")
        assert len(owner) == 1
        assert await task == 42
        await asyncio.sleep(0)
        assert len(owner) == 0


async def test_a_task_that_dies_is_logged_and_reported_once(log_lines: io.StringIO) -> None:
    async def die() -> None:
        raise KeyError("lost")

    failures: list[tuple[str, BaseException]] = []
    async with TaskOwner(lambda name, error: failures.append((name, error))) as owner:
        owner.start(die(), name="reader")
        other = owner.start(forever(), name="other")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [(name, type(error)) for name, error in failures] == [("reader", KeyError)]
        assert not other.done()
    flush_log(30.0)
    (event,) = [json.loads(line) for line in log_lines.getvalue().splitlines()]
    assert (event["event"], event["task"]) == ("task died", "reader")
    assert "KeyError: 'lost'" in event["exception"]
    assert len(failures) == 1


async def test_a_task_that_dies_while_it_is_cancelled_is_reported_too(log_lines: io.StringIO) -> None:
    async def die_late() -> None:
        try:
            await forever()
        finally:
            raise OSError("disk full")

    failures: list[str] = []
    owner = TaskOwner(lambda name, _error: failures.append(name))
    owner.start(die_late(), name="writer")
    await asyncio.sleep(0)
    await owner.close()
    assert failures == ["writer"]
    flush_log(30.0)
    assert "disk full" in log_lines.getvalue()


async def test_closing_goes_on_when_the_closer_is_cancelled() -> None:
    gate = asyncio.Event()

    async def slow_to_stop() -> None:
        try:
            await forever()
        finally:
            await gate.wait()

    owner = TaskOwner()
    task = owner.start(slow_to_stop(), name="slow")
    await asyncio.sleep(0)
    closer = asyncio.ensure_future(owner.close())
    await asyncio.sleep(0)
    closer.cancel()
    await asyncio.sleep(0)
    assert not closer.done(), "it must not leave the task behind"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closer
    assert task.done()


async def test_nothing_starts_beyond_the_limit_or_after_the_close() -> None:
    owner = TaskOwner(max_tasks=1)
    owner.start(forever(), name="first")
    late = forever()
    with pytest.raises(RuntimeError, match="already has 1 tasks"):
        owner.start(late, name="second")
    assert late.cr_frame is None, "the coroutine is closed, so that it does not warn"  # type: ignore[attr-defined]
    await owner.close()
    with pytest.raises(RuntimeError, match="owner is closed"):
        owner.start(forever(), name="third")


@pytest.mark.usefixtures("log_lines")
async def test_a_task_cannot_close_its_own_owner() -> None:
    owner = TaskOwner()

    async def suicide() -> None:
        await owner.close()

    task = owner.start(suicide(), name="suicide")
    with pytest.raises(AssertionError, match="await itself"):
        await task
    await owner.close()
