"""What `sluice up` says of a worker that is killed and of its own end, against what this test knows (row 1)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(240)

NUM_STREAMS = 24
LIMIT_S = 60.0
AGAIN = re.compile(r"^\d\d:\d\d:\d\d  (worker-\d) is ready again after [\d.]+ s; (.+)$", re.MULTILINE)
OUTCOME = re.compile(r"(\d+) answers? went on, none was lost(?:, (\d+) still waits? for a worker)?")
"""Who waits does on a machine that others use; all readers get their whole answers then, too."""


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with cluster("--workers", "2", "--memory", "64MiB", "--threads", "1") as running:
        yield running


async def stream(http: aiohttp.ClientSession, up: Cluster, number: int) -> bool:
    """Read an answer to its end; return whether it is whole."""
    body = {"model": "sluice-demo", "prompt": f"Once {number}", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with http.post(f"{up.url}/v1/completions", json=body) as response:
        return (await response.read()).endswith(b"data: [DONE]\n\n")


async def running(http: aiohttp.ClientSession, up: Cluster) -> Counter[str]:
    """Return how many answers have begun and go on, by worker."""
    async with http.get(f"{up.url}/v1/requests") as response:
        rows = (await response.json())["requests"]
    return Counter(row["worker_id"] for row in rows if row["num_output_tokens"])


async def begin(http: aiohttp.ClientSession, up: Cluster) -> list[asyncio.Task[bool]]:
    """Return streams once all have begun."""
    streams = [asyncio.create_task(stream(http, up, number)) for number in range(NUM_STREAMS)]
    async with asyncio.timeout(LIMIT_S):
        while (await running(http, up)).total() < NUM_STREAMS:
            assert not all(task.done() for task in streams), "they are too short"
            await asyncio.sleep(0.02)
    return streams


async def test_a_killed_worker_is_told_of_with_the_number_of_its_answers_that_went_on(up: Cluster) -> None:
    """It stands still when they are counted, so that none of them ends before it is killed."""
    async with aiohttp.ClientSession() as http:
        streams = await begin(http, up)
        ((victim, _),) = (await running(http, up)).most_common(1)
        os.kill(up.pids[victim], signal.SIGSTOP)
        await asyncio.sleep(0.2)
        num_lost = (await running(http, up))[victim]
        told_before = up.log.read_text()  # of a machine that stood still, too
        os.kill(up.pids[victim], signal.SIGKILL)
        await until(lambda: AGAIN.search(up.log.read_text(), len(told_before)), LIMIT_S)
        assert all(await asyncio.gather(*streams)), "every reader has a whole answer"
    said = up.log.read_text()[len(told_before) :]
    assert f"{victim} ended by SIGKILL; it starts again in 0.2 s" in said
    ((who, told),) = AGAIN.findall(said)
    assert who == victim
    outcome = OUTCOME.fullmatch(told)
    assert outcome is not None, told
    assert int(outcome[1]) + int(outcome[2] or 0) == num_lost > 0


async def test_an_end_counts_the_answers_that_it_waits_for(up: Cluster) -> None:
    """The last test: the cluster ends. The first number is that of all streams, and no later one is larger."""
    async with aiohttp.ClientSession() as http:
        streams = await begin(http, up)
        up.process.send_signal(signal.SIGINT)
        assert all(await asyncio.gather(*streams))
    assert up.process.wait(LIMIT_S) == 0
    said = up.log.read_text()
    counts = [int(count) for count in re.findall(r"stopping: waiting for (\d+) answers?, at most \d+ s; Ctrl-C", said)]
    assert counts
    assert counts[0] <= NUM_STREAMS
    assert counts == sorted(counts, reverse=True)
    assert said.endswith("stopped\n")
