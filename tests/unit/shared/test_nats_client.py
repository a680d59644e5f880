from __future__ import annotations

import asyncio

import pytest

from shared.transport.nats_client import cancellable, end_tasks

pytestmark = pytest.mark.virtual_time


async def swallow() -> str:
    try:
        await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        return "swallowed"
    return "slept"


async def test_a_swallowed_cancellation_is_raised_after_all() -> None:
    task = asyncio.create_task(cancellable(swallow()))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await cancellable(swallow())


async def test_without_a_cancellation_the_result_is_returned() -> None:
    cleaned: list[str] = []

    async def clean_up_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(await cancellable(swallow()))  # an old cancellation is not this operation's

    task = asyncio.create_task(clean_up_when_cancelled())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [await cancellable(swallow()), *cleaned] == ["slept", "slept"]


async def test_a_task_that_swallows_one_cancellation_is_ended_by_the_next() -> None:
    async def stubborn() -> None:
        await swallow()
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0.1)
    await end_tasks([task, None])
    assert task.cancelled()
