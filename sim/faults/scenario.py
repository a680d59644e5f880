"""One seed's cluster, workload and faults. Pure: a number in, everything that a run is made of out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shared.api_keys import Tier
from shared.cost import CostModel
from shared.messages.report import ElasticFacts
from shared.systems import DEFAULT_SYSTEM, KvExchange
from shared.types import ReaderTarget
from sim.faults.kinds import GROUP_KINDS, FaultPlan, FaultSpace, draw_faults, draw_merging, draw_moves
from sim.faults.nodes import POISON_SEED
from sim.requests import DAY_S, SimRequest
from sim.worker import SimWorkerParams

READER = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.8)
MONITOR = "monitor"
BLOCK_SIZE = 4
ORPHAN_S = 7.0
"""Shorter than live, so that a run sees it."""
FIRST_TOKEN, VOCABULARY = 256, 4096
COST = CostModel(g0_s=0.06, b0_s=0.0002, g1_s=0.0, b1_s=0.002, d_s=0.0, a_s=0.0)
"""Steps of 60 ms: an answer lasts long enough to be struck by a fault or two."""
KV_BYTES, HOST_BLOCKS, BLOCK_COPY_S = 1024, 24, 0.005
"""Of a token; of a worker, fewer than are asked for now and then; of a block over the host link: a sequence takes some
100 ms, long enough to be struck too."""

LINK_BYTES_PER_S = (5e3, 2e5)
"""A worker's KV takes a fraction of a second to change hands, or some seconds."""

MIGRATION_BYTES_PER_S = (2e4, 2e6)
"""A sequence's takes from a few hundredths of a second to some seconds."""

PREFIX_BYTES_PER_S = (2e5, 5e6)
"""A prompt's takes from a hundredth of a second to some tenths: less, or more, than computing it."""

MERGING_RATIO = 0.45
"""Of the seeds in which groups come and go: those in which groups of two become one of four."""

DEFAULT_RATIO = 0.4
"""Of all seeds: those with the default system, or the one that joins it with drops."""
MOVING_RATIO = 0.4
"""Of the seeds in which requests are moved and no groups form: those in which the planner moves some as well."""
MOVING_SYSTEMS = ("migrate", "load-balance", "pack", "mell", "mell-printed")
CLOSING_RATIO, CLOSES_S = 0.3, (0.2, 8.0)
"""Of the moves: those before which the source is closed, and for how long, from the shortest to the longest."""
TIER_RATIOS = {Tier.FLEX: 0.25, Tier.PRIORITY: 0.1, Tier.DEFAULT: 0.65}
"""Of the requests, in whatever system."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one client wants, and how it behaves.

    If the request is resumable, it asks again under the same name when its connection breaks, and gets the same answer
    from its beginning.
    """

    at_s: float
    request: SimRequest
    num_choices: int
    first_dispatcher: int
    """Index of the one that it asks first; then the next ones."""
    leaves_s: float | None
    """Seconds after which the client leaves; None: it stays."""


@dataclass(frozen=True, slots=True)
class FaultScenario:
    """All of a run that chance decides before it begins."""

    seed: int
    workers: tuple[SimWorkerParams, ...]
    dispatchers: tuple[str, ...]
    planners: tuple[str, ...]
    asks: tuple[Ask, ...]
    plan: FaultPlan
    link_bytes_per_s: float = float("inf")
    """Of each worker's KV, each way, when groups form or dissolve."""
    kv_exchange: KvExchange = KvExchange.COORDINATED
    """How it comes to a group that forms."""


def draw_scenario(seed: int) -> FaultScenario:
    """Return what this seed stands for."""
    random = np.random.default_rng(seed)
    workers = _with_host_memory(_draw_workers(random, seed), np.random.default_rng([seed, 5]))
    dispatchers = tuple(f"d{i}" for i in range(int(random.integers(1, 3))))
    planners = tuple(f"planner{i}" for i in range(int(random.integers(1, 3))))
    names = tuple(worker.worker_id for worker in workers)
    plan = draw_faults(FaultSpace(names, dispatchers, (MONITOR, *planners)), random)
    asks = [_draw_ask(f"r{i}", len(dispatchers), random) for i in range(int(random.integers(8, 18)))]
    asks += [_draw_poison(f"poison{i}", len(dispatchers), random) for i in range(plan.num_poisonous)]
    scenario = FaultScenario(seed, workers, dispatchers, planners, tuple(asks), plan)
    return _with_tiers(scenario, np.random.default_rng([seed, 7]))


def draw_group_scenario(seed: int) -> FaultScenario:
    """As `draw_scenario`, with workers that form groups and dissolve them, whatever else fails."""
    random = np.random.default_rng([seed, 3])
    scenario, num_workers = draw_scenario(seed), int(random.integers(2, 5))
    params, has_others = scenario.workers[0], random.random() < 0.7
    system = _system_or(
        str(random.choice(["fcfs", "fcfs-chunked", "round-robin", "kunserve"])), "kunserve-sluice", seed
    )
    elastic = _elastic_facts(params.num_blocks)
    workers = tuple(
        replace(params, worker_id=f"w{i}", system=system, elastic=elastic, remap_s=0.02) for i in range(num_workers)
    )
    names = tuple(worker.worker_id for worker in workers)
    others = (MONITOR, *scenario.planners)
    space = FaultSpace(names, scenario.dispatchers, others, max_faults=3, num_changes=int(random.integers(2, 9)))
    plan = draw_faults(space, random)
    if not has_others:  # nothing but changes
        plan = FaultPlan(tuple(fault for fault in plan.faults if fault.kind in GROUP_KINDS), 0)
    asks = [ask for ask in scenario.asks if ask.request.seed != POISON_SEED]
    asks += [_draw_poison(f"poison{i}", len(scenario.dispatchers), random) for i in range(plan.num_poisonous)]
    link_bytes_per_s = (
        float("inf") if random.random() < 0.2 else float(np.exp(random.uniform(*np.log(LINK_BYTES_PER_S))))
    )
    scenario = replace(scenario, workers=workers, asks=tuple(asks), plan=plan, link_bytes_per_s=link_bytes_per_s)
    merging = np.random.default_rng([seed, 4])
    return _draw_merging(scenario, merging) if merging.random() < MERGING_RATIO else scenario


def draw_migration_scenario(seed: int) -> FaultScenario:
    """As `draw_scenario` or `draw_group_scenario`, with requests that go from worker to worker, whatever else fails."""
    random = np.random.default_rng([seed, 8])
    scenario = draw_group_scenario(seed) if random.random() < 0.4 else draw_scenario(seed)
    params, count = scenario.workers[0], max(len(scenario.workers), int(random.integers(2, 5)))
    more = (replace(params, worker_id=f"w{i}") for i in range(len(scenario.workers), count))
    caching = bool(random.random() < 0.95)
    workers = tuple(replace(worker, prefix_caching=caching) for worker in (*scenario.workers, *more))
    moving = np.random.default_rng([seed, 9])  # of its own, so that all else of a seed stays as it is
    if not params.elastic and moving.random() < MOVING_RATIO:
        system = str(moving.choice(MOVING_SYSTEMS))
        workers = tuple(replace(worker, system=system) for worker in workers)
    names, others = tuple(worker.worker_id for worker in workers), (MONITOR, *scenario.planners)
    link_bytes_per_s = float(np.exp(random.uniform(*np.log(MIGRATION_BYTES_PER_S))))
    space = FaultSpace(names, scenario.dispatchers, others)
    longest_s = min(100 * KV_BYTES / link_bytes_per_s, 4.0)
    fault_ratio = float(random.choice([0.0, 0.2, 0.5]))
    moves, struck = draw_moves(space, random, longest_s, fault_ratio)
    least, most = np.log(CLOSES_S)
    closes_s = np.exp(moving.uniform(least, most, len(moves))) * (moving.random(len(moves)) < CLOSING_RATIO)
    moves = tuple(replace(move, closes_s=round(float(each), 3)) for move, each in zip(moves, closes_s, strict=True))
    faults = [fault for fault in scenario.plan.faults if fault.kind in GROUP_KINDS] + list(struck)
    faults.sort(key=lambda fault: (fault.at_s, fault.kind, fault.target))
    plan = FaultPlan(tuple(faults), scenario.plan.num_poisonous, moves)
    return replace(scenario, workers=workers, plan=plan, link_bytes_per_s=link_bytes_per_s)


def draw_prefix_scenario(seed: int) -> FaultScenario:
    """As `draw_scenario`, with long prompts that begin alike, and workers that bring their KV from each other.

    Every third seed is as `draw_group_scenario` instead.
    """
    random = np.random.default_rng([seed, 10])
    has_groups = seed % 3 == 2
    scenario = draw_group_scenario(seed) if has_groups else draw_scenario(seed)
    documents = [random.integers(FIRST_TOKEN, VOCABULARY, int(random.integers(24, 44))) for _ in range(2)]

    def ask_about(ask: Ask) -> Ask:
        own = ask.request.prompt[: int(random.integers(1, 11))]
        document = documents[int(random.integers(2))]
        return replace(ask, request=replace(ask.request, prompt=np.concatenate([document, own])))

    asks = tuple(ask_about(ask) if random.random() < 0.9 else ask for ask in scenario.asks)
    system = "kunserve-sluice" if has_groups else DEFAULT_SYSTEM
    workers = tuple(replace(worker, system=system, prefix_caching=True) for worker in scenario.workers)
    link_bytes_per_s = float(np.exp(random.uniform(*np.log(PREFIX_BYTES_PER_S))))
    return replace(scenario, workers=workers, asks=asks, link_bytes_per_s=link_bytes_per_s)


def _with_tiers(scenario: FaultScenario, random: np.random.Generator) -> FaultScenario:
    """Return the scenario with requests of all tiers."""
    tiers = random.choice(list(TIER_RATIOS), len(scenario.asks), p=list(TIER_RATIOS.values()))
    asks = tuple(
        replace(ask, request=replace(ask.request, tier=Tier(tier), qoe=None if tier == Tier.FLEX else ask.request.qoe))
        for ask, tier in zip(scenario.asks, tiers, strict=True)
    )
    return replace(scenario, asks=asks)


def _draw_merging(scenario: FaultScenario, random: np.random.Generator) -> FaultScenario:
    """Return the scenario with four workers, whose two groups of two become one while something fails."""
    workers = tuple(replace(scenario.workers[0], worker_id=f"w{i}") for i in range(4))
    names = tuple(worker.worker_id for worker in workers)
    space = FaultSpace(names, scenario.dispatchers, (MONITOR, *scenario.planners))
    asks = tuple(ask for ask in scenario.asks if ask.request.seed != POISON_SEED)
    return replace(scenario, workers=workers, asks=asks, plan=FaultPlan(draw_merging(space, random), 0))


def _elastic_facts(num_blocks: int) -> ElasticFacts:
    """Return a model of 4 layers: of a whole instance's memory they take a third, KV of so many blocks the rest."""
    num_layers, page_bytes = 4, BLOCK_SIZE * KV_BYTES // 8
    return ElasticFacts(
        layer_bytes=(num_blocks * page_bytes,) * num_layers,
        outer_bytes=0,
        first_stage_end=0,
        last_stage_begin=0,
        block_bytes=page_bytes,
        page_bytes=page_bytes,
        num_pages=3 * num_layers * num_blocks,
        max_blocks=8 * num_blocks,
        has_host_copy=True,
    )


def _system_or(drawn: str, own: str, seed: int) -> str:
    """Return the system that was drawn, or in some seeds the one that tells tiers apart."""
    return own if np.random.default_rng([seed, 6]).random() < DEFAULT_RATIO else drawn


def _draw_workers(random: np.random.Generator, seed: int) -> tuple[SimWorkerParams, ...]:
    system = _system_or(str(random.choice(["fcfs", "fcfs-chunked", "round-robin", "swap"])), DEFAULT_SYSTEM, seed)
    num_blocks, caching = int(random.integers(36, 90)), bool(random.random() < 0.7)
    return tuple(
        SimWorkerParams(
            worker_id=f"w{i}",
            cost=COST,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            system=system,
            max_model_len=160,
            prefix_caching=caching,
            max_sequences=int(random.integers(5, 12)),
            max_batch_rows=8,
            max_batch_tokens=64,
            vocab_size=VOCABULARY,
            first_token_id=FIRST_TOKEN,
            orphan_s=ORPHAN_S,
            kv_bytes_per_token=KV_BYTES,
            host_link_bytes_per_s=BLOCK_SIZE * KV_BYTES / BLOCK_COPY_S,
        )
        for i in range(int(random.integers(2, 4)))
    )


def _with_host_memory(workers: tuple[SimWorkerParams, ...], random: np.random.Generator) -> tuple[SimWorkerParams, ...]:
    """Let most workers have memory for KV that leaves the device, and all whose system is named after that."""
    num_bytes = HOST_BLOCKS * BLOCK_SIZE * KV_BYTES
    has_some = [worker.system == "swap" or random.random() < 0.7 for worker in workers]
    return tuple(
        replace(worker, host_memory_bytes=num_bytes if some else 0)
        for worker, some in zip(workers, has_some, strict=True)
    )


def _draw_ask(name: str, num_dispatchers: int, random: np.random.Generator) -> Ask:
    num_output = int(random.integers(1, 90))
    is_resumable = bool(random.random() < 0.3)
    request = SimRequest(
        name,
        _draw_prompt(random),
        num_output,
        seed=int(random.integers(1000, 2**31)),
        qoe=READER if random.random() < 0.7 else None,
        stop_after=int(random.integers(1, num_output + 1)) if random.random() < 0.15 else None,
        logprobs=int(random.integers(0, 3)) if random.random() < 0.2 else None,
        is_resumable=is_resumable,
        limit_s=round(float(random.uniform(2.0, 10.0)), 3) if random.random() < 0.12 else DAY_S,
    )
    return Ask(
        at_s=round(float(random.random()) * 9.0, 3),
        request=request,
        num_choices=1 if is_resumable else int(random.choice([1, 1, 1, 2, 3])),
        first_dispatcher=int(random.integers(num_dispatchers)),
        leaves_s=float(random.exponential(2.5)) if random.random() < 0.12 else None,
    )


def _draw_prompt(random: np.random.Generator) -> np.ndarray:
    """Return some tokens; half of the prompts begin with one of two texts, so that they share KV."""
    own = random.integers(FIRST_TOKEN, VOCABULARY, int(random.integers(1, 40)))
    if random.random() < 0.5:
        return own
    text = np.random.default_rng(int(random.integers(2))).integers(FIRST_TOKEN, VOCABULARY, 30)
    return np.concatenate([text[: int(random.integers(4, 30))], own[:25]])


def _draw_poison(name: str, num_dispatchers: int, random: np.random.Generator) -> Ask:
    request = SimRequest(name, _draw_prompt(random), 20, seed=POISON_SEED)
    at_s = round(float(random.random()) * 9.0, 3)
    return Ask(at_s, request, 1, int(random.integers(num_dispatchers)), None)
