"""The ladder's decisions and their reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.levers.ladder import (
    ClusterSnapshot,
    Decision,
    LadderParams,
    MemoryLoad,
    Situation,
    decide,
)
from shared.ids import WorkerId
from tests.support.levers import FakeLever

PARAMS = LadderParams(max_view_age_s=1.5, pressure_ratio=1.0)


def make_snapshot(used: int = 0, demanded: int = 0, *, age_s: float | None = 0.1, blocks: int = 100) -> ClusterSnapshot:
    load = MemoryLoad(WorkerId("w"), num_blocks=blocks, num_used_blocks=used, num_demanded_blocks=demanded)
    return ClusterSnapshot(age_s, (load,) if blocks else (), num_unavailable=2)


@pytest.mark.parametrize(
    ("snapshot", "situation", "reason"),
    [
        (make_snapshot(age_s=None), Situation.BLIND, "no view of the cluster has come yet"),
        (make_snapshot(90, 90, age_s=1.6), Situation.BLIND, "the last view is 1.6 s old, the limit is 1.5 s"),
        (make_snapshot(blocks=0), Situation.EMPTY, "no worker can take work (2 known)"),
        (make_snapshot(60, 40), Situation.CALM, "100 of 100 KV blocks wanted on 1 workers"),
        (
            make_snapshot(60, 41),
            Situation.PRESSURE,
            "101 of 100 KV blocks wanted on 1 workers; the ladder has no lever yet, so requests wait",
        ),
    ],
)
def test_an_empty_ladder_does_nothing_and_says_why(
    snapshot: ClusterSnapshot, situation: Situation, reason: str
) -> None:
    assert decide(PARAMS, (), snapshot) == Decision("none", situation, reason)


@pytest.mark.parametrize(
    ("levers", "pulled", "said"),
    [
        ({"preempt": 0.4, "move": 0.1, "drop": None}, "move", "; move helps 1, at 0.10 s, against preempt 0.40 s"),
        ({"drop": None, "preempt": 0.1, "move": 0.1}, "preempt", "; preempt helps 1, at 0.10 s, against move 0.10 s"),
        ({"drop": None}, "none", "; none of drop can help now"),
    ],
    ids=["the cheapest", "the earlier rung wins a tie", "none that helps"],
)
def test_the_lever_that_is_pulled_and_the_others_prices_are_told(
    levers: dict[str, float | None], pulled: str, said: str
) -> None:
    decision = decide(PARAMS, [FakeLever(*lever) for lever in levers.items()], make_snapshot(90, 20))
    assert (decision.lever, decision.reason) == (pulled, f"110 of 100 KV blocks wanted on 1 workers{said}")


@given(
    used=st.integers(0, 200),
    demanded=st.integers(0, 200),
    age_s=st.none() | st.floats(0, 10),
    rungs=st.lists(st.tuples(st.none() | st.floats(0, 10), st.booleans()), max_size=4),
    blocks=st.sampled_from([0, 100]),
)
def test_a_lever_is_pulled_only_under_pressure_that_is_seen_a_standing_one_also_in_calm(
    used: int, demanded: int, age_s: float | None, rungs: list[tuple[float | None, bool]], blocks: int
) -> None:
    levers = [FakeLever(str(index), *rung) for index, rung in enumerate(rungs)]
    decision = decide(PARAMS, levers, make_snapshot(used, demanded, age_s=age_s, blocks=blocks))
    is_seen = age_s is not None and age_s <= 1.5 and blocks > 0
    is_short = used + demanded > blocks
    offered = [cost_s for cost_s, is_standing in rungs if cost_s is not None and (is_short or is_standing)]
    if is_seen and offered:
        assert rungs[int(decision.lever)][0] == min(offered)
    else:
        assert decision.lever == "none"


def test_newer_figures_are_not_another_decision() -> None:
    first = decide(PARAMS, (), make_snapshot(1))
    assert not decide(PARAMS, (), make_snapshot(2)).differs_from(first)
    assert decide(PARAMS, (), make_snapshot(101)).differs_from(first)
    assert first.differs_from(None)
