"""Groups form with live exchange while processes, links and messages fail: every text as undisturbed.

Splits are of two blocks here, since the prompts of these seeds are short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.worker.blocks import remote_kv
from services.worker.kv_moves import exchange_modes
from services.worker.kv_moves.kv_table import AreLive
from services.worker.modelled.shadow_kv import ShadowKv
from shared.systems import KvExchange
from sim.faults.campaign import SeedReport, run_scenario
from sim.faults.cluster import FaultCluster
from sim.faults.scenario import BLOCK_SIZE, Scenario, draw_group_scenario
from tests.support.seeds import first_of

SEEDS = (*range(56), 137, 152, 159, 163)
"""The last ones lose a group while KV is on its way."""
_remote_steps: Counter[int] = Counter()
_reports: dict[int, SeedReport] = {}


@pytest.fixture(autouse=True)
def _short_splits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (remote_kv, exchange_modes):
            patch.setattr(module, "SPLIT_KEYS", 2 * BLOCK_SIZE)
        yield


def live_scenario(seed: int) -> Scenario:
    """Return a seed of `draw_group_scenario` whose KV travels slowly, and is attended meanwhile."""
    scenario = draw_group_scenario(seed)
    rate = min(scenario.link_bytes_per_s, 2e4)
    return replace(scenario, kv_exchange=KvExchange.LIVE, link_bytes_per_s=rate)


def mixed(*_: object, **__: object) -> AreLive:
    """Let every other lot be live, whatever the links are like."""
    return lambda lots: [index % 2 == 0 for index in range(len(lots))]


@pytest.mark.parametrize("first", first_of(range(0, 24, 6), 1))
def test_lots_of_both_modes_move_in_one_exchange(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_modes, "modes_of", mixed)
    networks: dict[int, FaultCluster] = {}
    total: Counter[str] = Counter()
    num_remote, wrong = 0, []
    for seed in (*range(first, first + 6), *SEEDS[-4:]):
        report = run_scenario(live_scenario(seed), watch=lambda cluster: networks.update({0: cluster}))
        wrong += [f"seed {seed}: {said}" for said in report.violations]
        total.update(report.coverage)
        num_remote += networks[0].network.num_remote_steps
    assert not wrong, "\n".join(wrong)
    assert num_remote
    assert total["log kv_arrived"]


def test_by_price_a_link_that_costs_little_is_asked_over() -> None:
    networks: dict[int, FaultCluster] = {}
    num_remote = 0
    for seed in range(6):
        scenario = replace(live_scenario(seed), kv_exchange=KvExchange.BY_PRICE)
        report = run_scenario(scenario, watch=lambda cluster: networks.update({0: cluster}))
        assert not report.violations
        num_remote += networks[0].network.num_remote_steps
    assert num_remote


def report_of(seed: int) -> SeedReport:
    if seed not in _reports:
        networks: dict[int, FaultCluster] = {}
        _reports[seed] = run_scenario(live_scenario(seed), watch=lambda cluster: networks.update({0: cluster}))
        _remote_steps[seed] = networks[0].network.num_remote_steps
    return _reports[seed]


@pytest.mark.parametrize("first", first_of(range(0, len(SEEDS), 5), 2))
def test_the_invariants_hold_while_kv_is_attended_where_it_lies(first: int) -> None:
    wrong = [f"seed {seed}: {said}" for seed in SEEDS[first : first + 5] for said in report_of(seed).violations]
    assert not wrong, "\n".join(wrong)


@pytest.mark.seeds
@pytest.mark.timeout(600)  # by itself it runs all seeds
def test_seeds_attend_elsewhere_and_lose_what_they_attend() -> None:
    total: Counter[str] = Counter()
    for seed in SEEDS:
        total.update(report_of(seed).coverage)
    assert sum(_remote_steps[seed] > 0 for seed in SEEDS) > len(SEEDS) // 3
    assert total["log kv_given_up"], "no group ended while KV was on its way"
    assert total["log kv_arrived"] > total["log kv_given_up"]


def test_one_seed_gives_one_trace() -> None:
    assert run_scenario(live_scenario(4)).digest == report_of(4).digest


def test_keys_that_are_read_in_the_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that texts depend on what lies elsewhere: read here, other words are said."""
    monkeypatch.setattr(ShadowKv, "attend_elsewhere", lambda *_: None)
    found = [said for seed in range(12) for said in run_scenario(live_scenario(seed)).violations]
    assert any("I2" in said for said in found)


def test_without_live_exchange_nobody_attends_elsewhere() -> None:
    networks: dict[int, FaultCluster] = {}
    scenario = replace(live_scenario(4), kv_exchange=KvExchange.COORDINATED)
    run_scenario(scenario, watch=lambda cluster: networks.update({0: cluster}))
    assert report_of(4).coverage["log kv_arrived"], "this seed exchanges KV"
    assert not networks[0].network.num_remote_steps
