"""What a reader with our SDK sees when dispatchers die (row 17): a pause, and the whole text once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from sluice_client import Answer, ClientLimits, RetryPolicy, SluiceClient
from tests.faults.conftest import FORGOTTEN_S, TWO_DISPATCHERS
from tests.support.fault_checks import StagedCluster
from tests.support.fault_cluster import until
from tests.support.fault_streams import CHAT, Ask, mixed_load
from tests.support.waiting import rounds

pytestmark = pytest.mark.timeout(180)

LIMITS = ClientLimits(retry=RetryPolicy(first_backoff_s=0.1, max_backoff_s=0.5))
WAYS = ["http", "websocket"]
MODE: Any = None
"""The text as it arrives: when it is shown is not what this is about."""
SHAPE = TWO_DISPATCHERS


def streams() -> list[Ask]:
    """Return the streams with one choice: what an `Answer` is."""
    return [asked for asked in mixed_load() if asked.is_streamed and "n" not in asked.body]


def start(client: SluiceClient, asked: Ask) -> Answer:
    """Return the answer to one of them."""
    known = ("model", "stream", "stream_options", "messages", "prompt")
    params = {name: value for name, value in asked.body.items() if name not in known}
    if asked.path == CHAT:
        return client.chat(asked.body["messages"], asked.body["model"], pace=MODE, **params)
    return client.complete(asked.body["prompt"], asked.body["model"], pace=MODE, **params)


def have_begun(answers: Sequence[Answer]) -> bool:
    return all(len(answer.text) >= 40 for answer in answers)


@pytest.mark.parametrize("comes_back", [False, True], ids=["another takes over", "the same comes back"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_killed_dispatcher_is_a_pause(cluster: StagedCluster, way: Any, comes_back: bool) -> None:
    asks = streams()
    urls = [cluster.url("dispatcher-1"), *([] if comes_back else [cluster.url("dispatcher-0")])]
    async with SluiceClient(urls, limits=LIMITS, transport=way) as client:
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
