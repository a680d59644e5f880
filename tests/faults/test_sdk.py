"""What a reader with our SDK sees when dispatchers die (row 17): a pause, and the whole text once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from sluice_client import AsyncAnswer, AsyncSluiceClient, ClientLimits, RetryPolicy
from tests.faults.conftest import FORGOTTEN_S, TWO_DISPATCHERS
from tests.support.fault_checks import StagedCluster
from tests.support.fault_cluster import until
from tests.support.fault_streams import CHAT, Ask, mixed_load
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

LIMITS = ClientLimits(retry=RetryPolicy(first_backoff_s=0.1, max_backoff_s=0.5))
MODE: Any = "off"
"""The text as it arrives: when it is shown is not what this is about."""
SHAPE = TWO_DISPATCHERS


def streams() -> list[Ask]:
    """Return the streams with one choice: what an `AsyncAnswer` is."""
    return [asked for asked in mixed_load() if asked.is_streamed and "n" not in asked.body]


def start(client: AsyncSluiceClient, asked: Ask) -> AsyncAnswer:
    """Return the answer to one of them."""
    known = ("model", "stream", "stream_options", "messages", "prompt")
    params = {name: value for name, value in asked.body.items() if name not in known}
    if asked.path == CHAT:
        return client.chat(asked.body["messages"], asked.body["model"], pace=MODE, **params)
    return client.complete(asked.body["prompt"], asked.body["model"], pace=MODE, **params)


def have_begun(answers: Sequence[AsyncAnswer]) -> bool:
    return all(len(answer.text) >= 40 for answer in answers)


@pytest.mark.parametrize(
    ("way", "comes_back"),
    first_of([("http", False), ("websocket", True), ("http", True), ("websocket", False)], in_ci=2),
)
async def test_a_killed_dispatcher_is_a_pause(cluster: StagedCluster, way: Any, comes_back: bool) -> None:
    asks = streams()
    urls = [cluster.url("dispatcher-1"), *([] if comes_back else [cluster.url("dispatcher-0")])]
    async with AsyncSluiceClient(urls, limits=LIMITS, transport=way) as client:
        for _ in rounds("all were being read"):
            answers = [start(client, asked) for asked in asks]
            reading = [asyncio.create_task(answer.read()) for answer in answers]
            await until(partial(have_begun, answers), "all are being read", 60)
            if not any(task.done() for task in reading):
                break
            await asyncio.gather(*reading)
        cluster.kill("dispatcher-1")
        if comes_back:
            cluster.start("dispatcher-1")
        texts = await asyncio.gather(*reading)
    expected = [cluster.expected[asked.name] for asked in asks]
    assert texts == [answer["texts"][0] for answer in expected]
    billed = [((answer.usage or {})["prompt_tokens"], (answer.usage or {})["completion_tokens"]) for answer in answers]
    assert billed == [answer["usage"] for answer in expected]
    await cluster.restore()
    await cluster.assert_nothing_left(FORGOTTEN_S)


async def test_texts_are_whole_while_dispatchers_and_workers_are_killed_in_turn(cluster: StagedCluster) -> None:
    """Readers ask again and again; each process is ready again before the next one dies in the middle of answers."""
    urls, is_over = [cluster.url("dispatcher-1"), cluster.url("dispatcher-0")], asyncio.Event()
    answers: dict[str, AsyncAnswer] = {}
    num_read: Counter[str] = Counter()

    async def read_on(client: AsyncSluiceClient, asked: Ask) -> None:
        while not is_over.is_set():
            answers[asked.name] = start(client, asked)
            assert await answers[asked.name].read() == cluster.expected[asked.name]["texts"][0]
            num_read[asked.name] += 1

    async with AsyncSluiceClient(urls, limits=LIMITS) as client, asyncio.TaskGroup() as group:
        for asked in streams():
            group.create_task(read_on(client, asked))
        for name in ("dispatcher-1", "worker-0", "dispatcher-0", "worker-1"):
            before = num_read.copy()
            await until(
                lambda: sum(len(answer.text) >= 40 for answer in answers.values()) > 1, "two are being read", 60
            )
            cluster.kill(name)
            cluster.start(name)
            await cluster.wait_ready()
            await until(partial(_have_ended_since, num_read, before), "each answer has ended once more", 60)
        is_over.set()
    await cluster.restore()
    await cluster.assert_nothing_left(FORGOTTEN_S)


def _have_ended_since(num_read: Counter[str], before: Counter[str]) -> bool:
    return all(num_read[asked.name] > before[asked.name] for asked in streams())
