"""A live group holds exactly the tokens that its plan claimed: requests fill it to the last block, one more waits.

Separate processes, real requests over HTTP, counters of the reports. Row 28, from the side of the room.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from shared.messages.plan import FormGroup
from shared.transport.nats_bus import NatsBus
from tests.support.fault_cluster import MODEL_NAME, Cluster, Shape, http_session, running, until
from tests.support.fault_streams import COMPLETIONS
from tests.support.group_changes import SYSTEM, change_until_done, group_env, plan_now

pytestmark = pytest.mark.timeout(120)

BLOCK_SIZE: Final = 16
NUM_SMALL: Final = 14
"""Requests beside the large one, which takes the rest."""
LEAST_LARGE: Final = 36
"""Blocks of the large one at least: more than all that admission sets aside for the growth of the others."""
MAX_TOKENS: Final = 8192
"""Of one step: all prompts at once, so that the answers begin within a few steps of each other."""
PLACE_LIMIT_S: Final = 2.0
"""For all prompts to be there: less than a worker may stand still before it is given up."""
FLAGS: Final = {"worker": (*SYSTEM, "--memory", "92MiB"), "planner": SYSTEM, "dispatcher": SYSTEM}
"""Most of it is set aside for steps of that size; the rest is a few hundred blocks for a group."""

Order = list[tuple[int, int, bool]]
"""Of the events of one stream: choice, how many tokens of it have come so far, whether it has ended."""


async def stream(cluster: Cluster, lengths: Sequence[int], num_output: int) -> Order:
    """Send one request with a prompt of each length, no two alike, and read all choices to their ends."""
    rng = np.random.default_rng(sum(lengths))
    body = {
        "model": MODEL_NAME,
        "prompt": [rng.integers(10, 250, length).tolist() for length in lengths],
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
    }
    order: Order = []
    counts: Counter[int] = Counter()
    data, headers = io.BytesIO(json.dumps(body).encode()), {"content-type": "application/json"}
    async with (
        http_session(60.0) as http,
        http.post(cluster.url() + COMPLETIONS, data=data, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        async for raw in response.content:
            if not raw.startswith(b"data: {"):
                continue
            for choice in json.loads(raw[6:])["choices"]:
                counts[choice["index"]] += len((choice.get("logprobs") or {}).get("tokens", ()))
                order.append((choice["index"], counts[choice["index"]], choice["finish_reason"] is not None))
    assert sorted(counts.values()) == [num_output] * len(lengths)
    return order


async def stream_at_once(cluster: Cluster, bus: NatsBus, lengths: Sequence[int], num_output: int) -> Order:
    """As `stream`, but the group computes only when it has got all prompts: its last stage stands still until then."""
    (step,) = (await plan_now(cluster, bus)).steps
    leader, last = step.workers[0].worker_id, step.workers[-1].worker_id

    async def is_placed() -> bool:
        return len((await cluster.dump(bus, leader))["sequences"]) == len(lengths)

    async with asyncio.TaskGroup() as tasks:
        cluster.freeze(last)
        try:
            asking = tasks.create_task(stream(cluster, lengths, num_output))
            await until(is_placed, "the leader has all prompts", PLACE_LIMIT_S)
        finally:
            cluster.thaw(last)
    return asking.result()


def counts_at_first_end(order: Order) -> dict[int, int]:
    """Return how many tokens of each choice had come when the first choice ended."""
    counts: dict[int, int] = dict.fromkeys((index for index, _, _ in order), 0)
    for index, count, has_ended in order:
        counts[index] = count
        if has_ended:
            break
    return counts


async def leader_of(cluster: Cluster, bus: NatsBus) -> tuple[int, dict[str, Any]]:
    """Return what the plan claims, and the report of the group's leader once it shows the group and nothing runs."""
    (group,) = (await plan_now(cluster, bus)).steps
    assert isinstance(group, FormGroup)
    found: dict[str, Any] = {}

    async def is_shown() -> bool:
        _, view = await cluster.get("/v1/cluster")
        reports = {worker["report"]["worker_id"]: worker["report"] for worker in view["workers"]}
        found.update(reports[group.stages[0].worker_id])
        return bool(found["num_stages"] == 2 and not found["num_used_blocks"])

    await until(is_shown, "the leader reports an empty group")
    return group.num_blocks, found


async def test_as_many_tokens_as_claimed_fit_at_once_and_one_block_more_waits(
    tmp_path: Path,
) -> None:
    """Of C blocks 14 requests take e each in the end, and a large one the r that are left: 14 e + r = C.

    First every prompt is three blocks short of that, and every answer has 49 tokens, the last of which has no KV. When
    34 tokens have come, the KV of 33 is there, and the request is in its last block: (e - 3) · 16 + 33 = (e - 1) · 16
    + 1. So if all are as far before the first one ends, all C blocks are in use.

    Then the prompts of the 14 have e - 1 blocks, that of the large one r + 1. Each that runs has one more to grow into,
    so whichever comes last finds one block too few: r for the large one, or e - 2 for another.

    Without host memory: where there is some, one gives way a step before the last block is taken.
    """
    env = {**group_env(max_batch_tokens=MAX_TOKENS), "SLUICE_WORKER_HOST_MEMORY": "0"}
    with running(Cluster(tmp_path, Shape(env=env, flags=FLAGS))) as cluster:
        async with cluster.bus() as bus:
            answer = await change_until_done(cluster, bus, "drop")
            claimed, before = await leader_of(cluster, bus)
            assert f"have {claimed} KV blocks, as claimed" in answer["reason"]
            assert claimed == before["num_blocks"]
            each = (claimed - LEAST_LARGE) // NUM_SMALL
            rest = claimed - NUM_SMALL * each
            assert each > 3
            assert claimed * BLOCK_SIZE < MAX_TOKENS

            fits = [(blocks - 3) * BLOCK_SIZE for blocks in (*[each] * NUM_SMALL, rest)]
            counts = counts_at_first_end(await stream_at_once(cluster, bus, fits, 3 * BLOCK_SIZE + 1))
            assert min(counts.values()) >= 34, counts
            claimed_still, full = await leader_of(cluster, bus)
            assert claimed_still == claimed
            assert full["num_preemptions_total"] == before["num_preemptions_total"]

            more = [*[(each - 1) * BLOCK_SIZE] * NUM_SMALL, rest * BLOCK_SIZE + 1]
            counts = counts_at_first_end(await stream_at_once(cluster, bus, more, BLOCK_SIZE + 1))
            assert sum(not count for count in counts.values()) == 1, f"all but one began before one ended: {counts}"
            _, after = await leader_of(cluster, bus)
            assert after["num_preemptions_total"] == before["num_preemptions_total"]
            num_prompt_tokens = after["num_prompt_tokens_total"] - before["num_prompt_tokens_total"]
            assert num_prompt_tokens == sum(fits) + sum(more), "each prompt was computed once"
            await change_until_done(cluster, bus, "restore")
