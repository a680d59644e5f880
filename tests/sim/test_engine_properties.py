"""The engine under random operations: its invariants hold after them, and no surviving text is disturbed.

Each scheduler runs without host memory and with some, to which the KV of preempted sequences may go. Turns are short,
so that round-robin has some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from services.worker.scheduling.round_robin import RoundRobinScheduler
from services.worker.scheduling.view import Scheduler
from shared.types import FinishReason
from tests.support.engine_builders import FIRST_COME, new_sequence
from tests.support.engine_chaos import Chaos, make_chaos
from tests.support.engine_harness import make_harness
from tests.support.seeds import first_of

SHAPES = ((1, True, 0), (1, False, 30), (2, False, 0), (2, True, 12))
"""Batches in flight, with prefix caching and without, and with host memory."""
CASES = first_of(
    [(0, *shape) for shape in SHAPES] + [(1, depth, *memory) for depth in (2, 1) for _, *memory in SHAPES], in_ci=4
)
"""Seeds and shapes."""
PIPELINES = [{"depth": depth, "num_lanes": num_lanes} for depth, num_lanes in ((4, 1), (2, 2), (4, 2), (3, 3))]
"""Batches in flight, and stages: as many as lanes over which the schedulers spread decodes."""
PIPELINE_CASES = [
    {"seed": 100, "prefix_caching": True, "num_host_blocks": 0},
    {"seed": 101, "prefix_caching": False, "num_host_blocks": 30},
]


ONE_BY_ONE = {"bros", "bros-whole"}
"""Where all are late, and steps as slow as here, they take one request after the other."""


def short_quanta(name: str) -> Scheduler:
    return RoundRobinScheduler(quantum_tokens=3) if name == "round-robin" else make_scheduler(name)


def chaotic_run(
    scheduler: str, depth: int, seed: int, *, prefix_caching: bool = True, num_host_blocks: int = 0, **changes: Any
) -> Chaos:
    return make_chaos(
        short_quanta(scheduler),
        [seed, depth, len(scheduler), prefix_caching, num_host_blocks],
        depth=depth,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
        **changes,
    )


overlapping_run = partial(chaotic_run, depth=2, whims=0.05, overlaps=True)


@pytest.mark.parametrize(("seed", "depth", "prefix_caching", "num_host_blocks"), CASES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_survive_any_order_of_operations(
    scheduler: str, seed: int, depth: int, *, prefix_caching: bool, num_host_blocks: int
) -> None:
    case = chaotic_run(scheduler, depth, seed, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks)
    case.live_through()


@pytest.mark.parametrize("case", first_of(PIPELINE_CASES, in_ci=1))
@pytest.mark.parametrize("lanes", first_of(PIPELINES, in_ci=2))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_survive_any_order_of_operations_in_a_pipeline(
    scheduler: str, lanes: dict[str, Any], case: dict[str, Any]
) -> None:
    chaotic_run(scheduler, **lanes, **case).live_through()


OVERLAP_CASES = first_of([(seed, num_host_blocks) for seed in range(3) for num_host_blocks in (0, 12)], in_ci=2)


@pytest.mark.parametrize(("seed", "num_host_blocks"), OVERLAP_CASES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_survive_any_order_of_operations_where_steps_overlap(
    scheduler: str, seed: int, num_host_blocks: int
) -> None:
    """Few come, so that there are steps in which nobody waits."""
    overlapping_run(scheduler, seed=seed, num_host_blocks=num_host_blocks).live_through(adds=4)


LEAVING_SHAPES: tuple[dict[str, Any], ...] = ({"depth": 1}, {"depth": 2, "overlaps": True, "whims": 0.05})
LEAVING_CASES = [(seed, 12 * (seed % 2), LEAVING_SHAPES[(seed + seed // 2) % 2]) for seed in range(4)]


@pytest.mark.parametrize(("seed", "num_host_blocks", "shape"), first_of(LEAVING_CASES, in_ci=2))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_survive_that_sequences_leave_between_any_two_steps_and_come_again(
    scheduler: str, seed: int, num_host_blocks: int, shape: dict[str, Any]
) -> None:
    chaotic_run(scheduler, seed=seed, num_host_blocks=num_host_blocks, leaves=12, **shape).live_through()


@pytest.mark.long
def test_the_random_operations_reach_every_kind_of_leaving() -> None:
    cases = ((seed, shape) for seed in range(10) for shape in LEAVING_SHAPES)
    counts = lived(chaotic_run("chunked", seed=seed, num_host_blocks=20, leaves=12, **shape) for seed, shape in cases)
    for name in (
        "leaves",
        "leaves in flight",
        "left",
        "not left",
        "stays",
        "came again",
        "reserved",
        "arrived",
        "no room",
        "bad luck",
    ):
        assert counts[name] > 3, name


def lived(runs: Iterable[Chaos], **adds: int) -> Counter[str]:
    """Live through runs; return what came to pass in them all."""
    counts: Counter[str] = Counter()
    for chaos in runs:
        chaos.live_through(**adds)
        harness, totals = chaos.harness, chaos.harness.engine.totals
        counts.update(chaos.counts)
        counts.update(story.finish.name for story in harness.stories.values())
        counts.update(
            {
                "preempted": totals.num_preemptions,
                "paused": totals.num_pauses,
                "swapped out": totals.num_swap_outs,
                "came back": totals.num_swap_ins,
                "brought": totals.num_brought_back_tokens,
                "given up": totals.num_given_up_tokens,
                "tokens": totals.num_generated_tokens,
                "found": totals.num_prefix_cache_hits,
                "copies": harness.num_copies,
                "moved": harness.num_moved,
                "extended": harness.num_extended,
                "ahead": harness.num_ahead,
                "surplus": harness.num_surplus,
                "stale": harness.num_stale,
            }
        )
    return counts


@pytest.mark.long
def test_the_random_operations_reach_every_kind_of_event() -> None:
    """Else the test above could pass because it does nothing."""
    cases = (*((seed, True) for seed in range(13)), (0, False), (1, False))
    counts = lived(chaotic_run("chunked", 2, seed, prefix_caching=prefix_caching) for seed, prefix_caching in cases)
    wanted = (
        *("fork", "fork waits", "guilty", "bad luck", "cancel", "cancel in flight", "pin", "preempted"),
        *("shrink held", "shrink free", "limit refused", "limit lifted", "limit in flight", "limit held"),
        *("STOP", "LENGTH", "CANCELLED", "ERROR"),
    )
    assert set(wanted) <= set(+counts)
    assert counts["preempted"] > 100
    assert counts["tokens"] > 1000
    assert counts["found"] > 300
    assert counts["copies"] > 8
    assert counts["moved"] > 30


@pytest.mark.long
def test_the_random_operations_let_stages_run_apart_and_steps_fail_on_all_of_them() -> None:
    counts = lived(chaotic_run("chunked", 3, seed, num_lanes=3) for seed in range(4))
    assert counts["stages apart"] > 40
    assert counts["extended"] > 40
    assert counts["stale"] > 5
    assert counts["guilty"] + counts["bad luck"] > 20
    assert {"cancel in flight", "fork", "shrink held", "pin", "limit in flight", "limit held"} <= set(counts)


@pytest.mark.long
def test_the_random_operations_reach_every_kind_of_copy() -> None:
    """Some of them with a step in flight beside them: else the copies would prove little."""
    counts = lived(chaotic_run("chunked", 2, seed, num_host_blocks=20) for seed in range(20))
    assert {"out", "back", "copy fails", "cancel in copy"} <= set(counts)
    assert {"limit in flight", "limit held", "shrink held"} <= set(counts)
    assert counts["carried"] > 100
    assert counts["carried from the host"] > 5
    assert counts["brought"] > 100
    assert counts["given up"] > 200
    assert counts["moved"] > 10
    assert counts["came back"] > 20
    assert counts["lent"] > 100
    assert counts["went again"] > 20
    assert counts["preempted"] - counts["swapped out"] > 20, "some were computed again"


ALONE_CASES = [(1, 0), (1, 40), (3, 5), (3, 0), (3, 40), (1, 5)]


@pytest.mark.parametrize(("num_stages", "num_host_blocks"), first_of(ALONE_CASES, in_ci=3))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_everything_finishes_with_kv_for_only_one_request(
    scheduler: str, num_stages: int, num_host_blocks: int
) -> None:
    """9 blocks of 4 slots; each sequence needs KV for 20 + 16 - 1 = 35 tokens, so 9 blocks: all of them."""
    harness = make_harness(short_quanta(scheduler), num_blocks=9, num_host_blocks=num_host_blocks, num_lanes=num_stages)
    harness.add_all(8, num_prompt=20, max_tokens=16)
    harness.finish(max_steps=8 * 60)
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("num_host_blocks", [0, 30, 80])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("seed", "num_stages"), first_of([(0, 1), (6, 2), (7, 3)], in_ci=1))
def test_a_small_memory_delays_but_never_changes_a_text(
    scheduler: str, seed: int, num_stages: int, num_host_blocks: int
) -> None:
    """If the host is full, who has KV there may lose it with what it holds; a host of 80 blocks is never full.

    Who preempts by gain may choose who is so short that computing is cheaper than a copy.
    """
    random = np.random.default_rng(seed)
    harness = make_harness(
        short_quanta(scheduler), num_blocks=24, max_model_len=96, num_lanes=num_stages, num_host_blocks=num_host_blocks
    )
    for name in range(16):
        num_prompt, max_tokens = int(random.integers(1, 50)), int(random.integers(1, 40))
        harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens))
    harness.finish()
    stats = take_stats(harness.engine)
    assert stats.totals.num_finished == 16
    if stats.totals.num_preemptions or scheduler not in ONE_BY_ONE:
        assert (stats.totals.num_swap_outs > 0) is (num_host_blocks > 0)
    num_lost = stats.totals.num_swap_outs - stats.totals.num_swap_ins
    assert num_lost >= 0
    assert num_lost == 0 or stats.totals.num_recomputed_tokens > 0, "nobody ended on the host"
    if num_host_blocks == 80 and scheduler in FIRST_COME:
        assert stats.totals.num_recomputed_tokens == 0, "all of it comes back"
    assert stats.totals.peak_used_blocks <= 24 < stats.totals.peak_demanded_blocks


@pytest.mark.long
def test_the_random_operations_reach_every_kind_of_event_where_steps_overlap() -> None:
    runs = (overlapping_run(scheduler, seed=seed) for scheduler in SCHEDULERS for seed in range(2))
    counts = lived(runs, adds=4)
    assert {"guilty", "bad luck", "cancel in flight", "limit in flight", "grow in flight"} <= set(counts)
    assert counts["ahead"] > 200
    assert counts["surplus"] > 5
    assert counts["stale"] > 5


@pytest.mark.long
@pytest.mark.parametrize("scheduler", ["andes", "lqsf"])
def test_who_serves_readers_first_reaches_every_way_of_giving_way_by_itself(scheduler: str) -> None:
    """Without whims: what is decided is the policy's own."""
    counts = lived(chaotic_run(scheduler, 2, seed, num_host_blocks=12, whims=0.0) for seed in range(6))
    assert counts["preempted"] - counts["swapped out"] > 50, "computed again"
    wanted = (
        "swapped out",
        "came back",
        "brought",
        "given up",
        "lent",
        "found",
        "fork",
        "copies",
        "went again",
        "paused",
    )
    assert set(wanted) <= set(+counts)
    stages = lived(chaotic_run(scheduler, 3, seed, num_lanes=3, whims=0.0) for seed in range(2))
    assert {"preempted", "paused", "stages apart"} <= set(+stages)
    ahead = lived((overlapping_run(scheduler, seed=seed) for seed in range(4)), adds=4)
    assert {"ahead", "surplus", "paused"} <= set(+ahead)
