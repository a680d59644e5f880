"""Groups form with live exchange while processes, links and messages fail: every text as undisturbed.

Splits are of two blocks here, since the prompts of these seeds are short.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from services.worker.blocks import remote_kv
from services.worker.kv_moves import exchange_modes
from services.worker.kv_moves.kv_table import AreLive
from services.worker.modelled.shadow_kv import ShadowKv
from shared.systems import KvExchange
from sim.faults.campaign import SeedReport, run_scenario
from sim.faults.cluster import FaultCluster
from sim.faults.scenario import BLOCK_SIZE, FaultScenario, draw_group_scenario
from tests.support.seeds import first_of

pytestmark = pytest.mark.slow
SEEDS = (*range(14), 137, 152, 159, 163)
"""The last ones lose a group while KV is on its way."""


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote_kv, exchange_modes):
        monkeypatch.setattr(module, "SPLIT_KEYS", 2 * BLOCK_SIZE)


def live_scenario(seed: int) -> FaultScenario:
    """Return a seed of `draw_group_scenario` whose KV travels slowly, and is attended meanwhile."""
    scenario = draw_group_scenario(seed)
    rate = min(scenario.link_bytes_per_s, 2e4)
    return replace(scenario, kv_exchange=KvExchange.LIVE, link_bytes_per_s=rate)


def mixed(*_: object, **__: object) -> AreLive:
    """Let every other lot be live, whatever the links are like."""
    return lambda lots: [index % 2 == 0 for index in range(len(lots))]


def run_watched(scenario: FaultScenario) -> tuple[SeedReport, int]:
    """Return what came of a scenario, and in how many steps keys were attended that lay elsewhere."""
    seen: deque[FaultCluster] = deque(maxlen=1)
    report = run_scenario(scenario, watch=seen.append)
    return report, seen[0].network.num_remote_steps


@pytest.mark.parametrize("first", first_of(range(0, 24, 6), in_ci=1))
def test_lots_of_both_modes_move_in_one_exchange(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_modes, "modes_of", mixed)
    seeds = (*range(first, first + 6), *SEEDS[-4:])
    found = check_attended(map(live_scenario, seeds))
    assert any(report.coverage["log kv_arrived"] for report in found)


def test_by_price_a_link_that_costs_little_is_asked_over() -> None:
    check_attended(replace(live_scenario(seed), kv_exchange=KvExchange.BY_PRICE) for seed in range(6))


def check_attended(scenarios: Iterable[FaultScenario]) -> list[SeedReport]:
    """Check that all goes well, and that somewhere keys were attended that lay elsewhere; return what came of each."""
    found = [run_watched(scenario) for scenario in scenarios]
    reports = [report for report, _ in found]
    check_none_violated(reports)
    assert any(num_remote for _, num_remote in found)
    return reports


def check_none_violated(reports: Iterable[SeedReport]) -> None:
    wrong = [f"seed {report.seed}: {said}" for report in reports for said in report.violations]
    assert not wrong, "\n".join(wrong)


@cache
def lived(seed: int) -> tuple[SeedReport, int]:
    """As `run_watched`, of a seed: each is lived once."""
    return run_watched(live_scenario(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_while_kv_is_attended_where_it_lies(seed: int) -> None:
    check_none_violated([lived(seed)[0]])


@pytest.mark.timeout(600)  # by itself it runs all seeds
def test_seeds_attend_elsewhere_and_lose_what_they_attend() -> None:
    found = [lived(seed) for seed in SEEDS]
    total = sum((report.coverage for report, _ in found), Counter[str]())
    assert sum(num_remote > 0 for _, num_remote in found) > len(SEEDS) // 3
    assert total["log kv_given_up"], "no group ended while KV was on its way"
    assert total["log kv_arrived"] > total["log kv_given_up"]


def test_one_seed_gives_one_trace() -> None:
    assert run_scenario(live_scenario(4)).digest == lived(4)[0].digest


@pytest.mark.long
def test_keys_that_are_read_in_the_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on what lies elsewhere: read here, other words are said."""
    monkeypatch.setattr(ShadowKv, "attend_elsewhere", lambda *_: None)
    found = [said for seed in range(12) for said in run_scenario(live_scenario(seed)).violations]
    assert any("I2" in said for said in found)


def test_without_live_exchange_nobody_attends_elsewhere() -> None:
    _, num_remote = run_watched(replace(live_scenario(4), kv_exchange=KvExchange.COORDINATED))
    assert lived(4)[0].coverage["log kv_arrived"], "this seed exchanges KV"
    assert not num_remote
