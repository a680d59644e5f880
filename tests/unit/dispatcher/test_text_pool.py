"""The threads that read texts: whose wait for whom, and what is refused."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.dispatcher.text.pool import TextPool, TextPoolFullError


async def test_texts_of_best_effort_leave_a_thread_to_the_others_and_have_limits_of_their_own() -> None:
    pool, gate = TextPool(2, 3, max_flex=4, flex_memory=100), threading.Event()
    slow = [asyncio.create_task(pool.run_flex(gate.wait, 25)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(TextPoolFullError):
        await pool.run_flex(gate.wait, 0)
    assert await pool.run(lambda: 7) == 7, "nobody waits for them"
    slow[-1].cancel()
    await asyncio.sleep(0)
    with pytest.raises(TextPoolFullError):
        await pool.run_flex(gate.wait, 26)
    gate.set()
    assert await pool.run_flex(lambda: 8, 25) == 8
    assert await asyncio.gather(*slow[:-1]) == [True] * 3
    pool.close()
