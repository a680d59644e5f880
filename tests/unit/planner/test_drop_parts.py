"""A drop that is dearer than what it saves: the part that is worth most beyond its price, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from services.planner.policy.plans.drop import NUM_PARTS, plan_drop
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.drop_plan import DropPlan, DropRefusal, RefusalKind
from tests.support.drop_builders import make_facts, make_instance
from tests.support.seeds import first_of

SEEDS = range(60)
REQUIRED = 120
"""Tokens: pairs give 16 of these, groups of four 48."""
WORTHS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0, 1.5)
"""In multiples of the price of all the room."""


def busy_facts(seed: int) -> ClusterFacts:
    """Up to twelve instances with requests: the larger a group, the dearer."""
    rng = np.random.default_rng(seed)
    instances = [
        make_instance(
            number,
            num_running=int(rng.integers(1, 30)),
            num_queued=int(rng.integers(0, 5)),
            used_tokens=int(rng.integers(10, 80)),
            link_bytes_per_s=float(rng.uniform(10, 100)),
        )
        for number in range(int(rng.integers(2, 13)))
    ]
    return make_facts(instances)


def whole_of(facts: ClusterFacts, required: int) -> DropPlan | None:
    plan = plan_drop(facts, DropParams(), required)
    return plan if isinstance(plan, DropPlan) and plan.price.total_s > 0 else None


def net_s(plan: DropPlan, whole: DropPlan, worth_s: float) -> float:
    """Return what a plan saves beyond its price, if the room of the whole one saves so much."""
    return worth_s * min(plan.gained_tokens / min(REQUIRED, whole.gained_tokens), 1.0) - plan.price.total_s


@pytest.mark.parametrize("seed", first_of(SEEDS, 20))
def test_a_part_is_made_only_if_it_is_worth_its_price_and_the_best_one_is(seed: int) -> None:
    facts = busy_facts(seed)
    whole = whole_of(facts, REQUIRED)
    if whole is None:
        return
    parts = [
        plan_drop(facts, DropParams(), min(REQUIRED, whole.gained_tokens) >> halvings)
        for halvings in range(1, NUM_PARTS + 1)
    ]
    made = [replace(part, required_tokens=REQUIRED) for part in parts if isinstance(part, DropPlan)]
    for factor in WORTHS:
        worth_s = factor * whole.price.total_s
        found = plan_drop(facts, DropParams(), REQUIRED, worth_s=worth_s)
        if factor >= 1:
            assert found == whole
            continue
        best_s = max((net_s(part, whole, worth_s) for part in made), default=-1.0)
        if isinstance(found, DropRefusal):
            assert found.kind is RefusalKind.NOT_WORTH_IT
            assert "no part of it is worth its price" in found.reason
            assert best_s < 0
            continue
        found.check_invariants(facts)
        assert found.groups, "it gains something"
        assert found.price.total_s <= worth_s
        assert found.required_tokens == REQUIRED, "what is lacking still is lacking"
        assert net_s(found, whole, worth_s) == pytest.approx(best_s)
        assert best_s >= 0
        assert f"of {REQUIRED}: that saves" in found.reason


@pytest.mark.slow
def test_the_clusters_above_have_parts() -> None:
    found = 0
    for seed in SEEDS:
        facts = busy_facts(seed)
        whole = whole_of(facts, REQUIRED)
        if whole is not None:
            plans = (
                plan_drop(facts, DropParams(), REQUIRED, worth_s=factor * whole.price.total_s) for factor in WORTHS[:-2]
            )
            found += any(isinstance(plan, DropPlan) for plan in plans)
    assert found >= 15, found


@pytest.mark.parametrize("seed", first_of(SEEDS, 12))
def test_where_more_is_saved_no_less_is_done(seed: int) -> None:
    facts = busy_facts(seed)
    whole = whole_of(facts, REQUIRED)
    if whole is None:
        return
    worths = [factor * whole.price.total_s for factor in np.linspace(0.02, 1.2, 25).tolist()]
    plans = [plan_drop(facts, DropParams(), REQUIRED, worth_s=worth_s) for worth_s in worths]
    for less, more in pairwise(plans):
        assert isinstance(more, DropPlan) or isinstance(less, DropRefusal)
        if isinstance(less, DropPlan) and isinstance(more, DropPlan):
            assert less.gained_tokens <= more.gained_tokens
