"""Whole simulated clusters in which groups come and go: at every instant no page is lost, counted twice, or made up.

Nor is a KV block, on the device or on the host.

And at every instant every layer is in two places, whether all hosts have a copy of the parameters, one, or none.

Drops, restores, plans that are abandoned or carried out by half, deaths, partitions, cut links, lost messages, clients
that leave: `draw_group_scenario` says what a seed stands for. Beside every worker lives a real memory (`page_twins`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from services.worker.engine.invariants import check_engine
from shared.messages.report import ElasticFacts
from sim.faults.campaign import run_scenario
from sim.faults.cluster import FaultCluster
from sim.faults.scenario import FaultScenario, draw_group_scenario
from tests.support.layer_watch import LayerWatch
from tests.support.page_twins import PageWatch

pytestmark = pytest.mark.slow
SEEDS = (*range(7), 9, 18)
"""The last one forms a group of three."""
NUM_READERS_FIRST = 3
"""Seeds that are lived through by readers first, too."""
PAGE_BYTES = 4096


def odd_facts(rng: np.random.Generator, num_blocks: int) -> ElasticFacts:
    """Return a model with layers of different sizes and parts outside of them; blocks do not fill whole pages.

    Of a whole instance's memory KV of some `num_blocks` is about two thirds.
    """
    num_layers, block_bytes = int(rng.integers(3, 7)), int(rng.choice([1024, 3072, 4096, 7680]))
    kv_pages = 2 * num_layers * -(-num_blocks * block_bytes // PAGE_BYTES)
    layer_bytes = rng.integers(1, kv_pages * PAGE_BYTES // num_layers, num_layers).tolist()
    outer_bytes = int(rng.integers(0, 4 * PAGE_BYTES))
    cut, other = sorted(rng.integers(0, outer_bytes + 1, 2).tolist())
    end, begin = (other, cut) if rng.random() < 0.5 else (cut, cut)  # tied or not
    parameters = sum(-(-size // PAGE_BYTES) for size in (*layer_bytes, outer_bytes))
    return ElasticFacts(
        layer_bytes=tuple(layer_bytes),
        outer_bytes=outer_bytes,
        first_stage_end=end,
        last_stage_begin=begin,
        block_bytes=block_bytes,
        page_bytes=PAGE_BYTES,
        num_pages=parameters + kv_pages,
        max_blocks=int(rng.integers(2, 8)) * num_blocks,
        has_host_copy=True,
    )


def scenario_of(seed: int, system: str | None = None) -> FaultScenario:
    """Return what the seed stands for, of its own system or another one."""
    scenario, rng = draw_group_scenario(seed), np.random.default_rng([seed, 9])
    facts = odd_facts(rng, scenario.workers[0].num_blocks)
    num_copies = int(rng.choice([0, 0, 1, len(scenario.workers)]))
    workers = tuple(
        replace(
            params,
            system=system or params.system,
            elastic=facts.model_copy(update={"has_host_copy": index < num_copies}),
        )
        for index, params in enumerate(scenario.workers)
    )
    return replace(scenario, workers=workers)


@cache
def live_through(seed: int, system: str | None = None) -> Counter[str]:
    """Each seed runs once, whichever test asks first; return what workers' memories went through."""
    watch, layers = PageWatch(), LayerWatch()

    def look(cluster: FaultCluster) -> None:
        watch(cluster)
        layers(cluster)
        for node in cluster.workers:
            if node.worker is not None:
                check_engine(node.worker.service.engine)

    try:
        report = run_scenario(scenario_of(seed, system), watch=look)
    finally:
        watch.close()
    assert not report.violations, "\n".join(report.violations)
    assert watch.num_looks > 500, "it looks at every instant"
    places = Counter({f"places {num}": count for num, count in layers.num_places.items()})
    return watch.done + report.coverage + places


@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_and_kv_and_free_pages_are_the_budget_at_every_instant(seed: int) -> None:
    live_through(seed)


def with_readers_first(seed: int) -> Counter[str]:
    return live_through(seed, "kunserve-sluice")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_READERS_FIRST))
def test_they_are_where_readers_come_first(seed: int) -> None:
    with_readers_first(seed)


@pytest.mark.long
def test_readers_first_went_through_changes_while_rows_gave_way() -> None:
    total = sum(map(with_readers_first, range(NUM_READERS_FIRST)), Counter[str]())
    wanted = ("dropped", "restored", "led", "preempted", "swapped out", "swapped in", "given up", "commit done")
    assert not [what for what in wanted if not total[what]], total


def test_memories_went_through_every_kind_of_change() -> None:
    """The seeds together; the test above would say little otherwise."""
    total = sum(map(live_through, SEEDS), Counter[str]())
    wanted = (
        *("dropped", "restored", "loads beside", "gave up", "groups of 2", "groups of 3", "groups of 4", "led"),
        *("places 2", "places 3", "places 8"),
        *("swapped out", "swapped in"),
        *("commit done", "commit failed", "abort aborted", "log group_broken"),
        *("fault change_abandoned", "fault change_by_half", "fault link_cut", "fault crash", "call left"),
    )
    assert not [what for what in wanted if not total[what]], total
    assert total["dropped"] > len(SEEDS)
    assert total["processes"] > sum(len(scenario_of(seed).workers) for seed in SEEDS), "some died"
