"""Two workers on one device that drop and restore under load, where numbers depend on the batch: bfloat16, any kernels.

A text may go another way there where two tokens are nearly as likely. So texts are held to those of an undisturbed run
by their margin: where they first differ, the undisturbed run must have called the other token nearly as likely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.peers_model import make_checkpoint
from tests.support.fault_cluster import Cluster, Shape, running
from tests.support.fault_streams import COMPLETIONS, Ask, answers, ask, reading, seen
from tests.support.group_changes import change_until_done

MARGIN: Final = 0.15
"""Between the log-probabilities of two tokens of which either may be chosen."""
ENV: Final = {
    "SLUICE_PLANNER_COOLDOWN_S": "0.1",
    "SLUICE_PLANNER_DROP_WAIT_S": "0",
    "SLUICE_PLANNER_RESTORE_RATIO": "0",
}
"""Dropped and restored by hand only."""
LASTING_TOKENS, SHORT_TOKENS = 1200, 60


@dataclass
class Lived:
    """What was seen."""

    num_texts: int = 0
    flips: list[float] = field(default_factory=list)
    """Margins where texts went another way."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """What the workers say of each role that they took."""
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    """What they say of each exchange of KV by copies."""
    hand_overs: list[dict[str, Any]] = field(default_factory=list)
    """What they say of each one by pages."""
    free_bytes: list[int] = field(default_factory=list)
    """Of the device: with the workers ready, then after each restore."""


def load(seed: int) -> list[Ask]:
    """Return requests whose answers last, with some that begin in the middle of a change."""
    rng = np.random.default_rng(seed)
    lasting = [ask(f"story-{i}", COMPLETIONS, max_tokens=LASTING_TOKENS, logprobs=5) for i in range(6)]
    prompts = [rng.integers(3, 4000, int(rng.integers(50, 700))).tolist() for _ in range(6)]
    short = [
        ask(f"prompt-{i}", COMPLETIONS, prompt=prompt, max_tokens=SHORT_TOKENS, logprobs=5)
        for i, prompt in enumerate(prompts)
    ]
    return [*lasting, *short]


def margin_of(found: dict[str, Any], expected: dict[str, Any]) -> float | None:
    """Return how much less likely the first other token of a text was in the undisturbed run; None: all are the same.

    Raises:
        AssertionError: it was not among the likeliest, or the answers differ in how they ended.
    """
    assert (found["status"], found["error"], found["finish"]) == (200, None, expected["finish"])
    assert found["usage"] == expected["usage"]
    ours, theirs = found["logprobs"][0], expected["logprobs"][0]
    assert len(ours["tokens"]) == len(theirs["tokens"])
    for place, (token, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if token != other:
            likeliest = theirs["top_logprobs"][place]
            assert token in likeliest, f"token {place} {token!r} is none of {likeliest}"
            return float(likeliest[other] - likeliest[token])
    return None


async def drop_and_restore(
    folder: Path,
    model: Path,
    *,
    system: str,
    flags: tuple[str, ...],
    env: dict[str, str],
    num_rounds: int,
    free_bytes: Callable[[], int],
) -> Lived:
    """Let two workers with the same flags drop and restore so many times while requests run."""
    make_checkpoint("small", model)
    named = ("--system", system)
    shape = Shape(
        num_workers=2,
        model=model,
        env={**ENV, **env},
        flags={"worker": (*named, *flags), "planner": named, "dispatcher": named},
    )
    lived = Lived()
    with running(Cluster(folder, shape)) as cluster:
        async with cluster.bus() as bus:
            for number in range(num_rounds):
                asks = load(number)
                async with reading(cluster, asks) as readers:
                    expected = await answers(readers)
                if not lived.free_bytes:
                    lived.free_bytes.append(free_bytes())
                async with reading(cluster, asks[:6]) as lasting:
                    await seen(lasting, 20)
                    async with reading(cluster, asks[6:]) as others:
                        await change_until_done(cluster, bus, "drop")
                        await asyncio.sleep(0.1)
                        found = await answers(others)
                    await change_until_done(cluster, bus, "restore")
                    found |= await answers(lasting)
                lived.free_bytes.append(free_bytes())
                for name, answer in found.items():
                    lived.num_texts += 1
                    margin = margin_of(answer, expected[name])
                    if margin is not None:
                        lived.flips.append(margin)
        lived.changes = cluster.told("role_changed")
        lived.exchanges = cluster.told("kv_exchange_ended")
        lived.hand_overs = cluster.told("kv_handed_over")
    return lived
