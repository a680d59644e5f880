"""The judgement is a step function of the age, and absurd reports are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.policy.liveness import LivenessParams, judge, next_change_age_s
from services.monitor.policy.sanity import find_absurdity
from shared.messages.report import Liveness, WorkerReport
from tests.support.drop_builders import make_elastic
from tests.support.kinds import some
from tests.support.statuses import make_report

PARAMS = LivenessParams(suspect_after_s=1.5, dead_after_s=3.0, forget_after_s=60.0)
RANK = {Liveness.ALIVE: 0, Liveness.SUSPECT: 1, Liveness.DEAD: 2, None: 3}


@given(st.floats(0, 100), st.floats(0, 100))
def test_judgement_never_gets_better_with_age(first_s: float, second_s: float) -> None:
    younger, older = sorted((first_s, second_s))
    assert RANK[judge(PARAMS, younger)] <= RANK[judge(PARAMS, older)]


@given(start_s=st.floats(0, 1e6), age_s=st.floats(0, 59.9))
def test_waking_at_the_next_change_always_changes_the_judgement(start_s: float, age_s: float) -> None:
    """Oracle: sleeping until `start + next change` on a float clock shows a new judgement, whatever the rounding."""
    upcoming_s = some(next_change_age_s(PARAMS, age_s))
    woken_at_s = start_s + upcoming_s
    assert RANK[judge(PARAMS, woken_at_s - start_s)] > RANK[judge(PARAMS, age_s)]


def test_nothing_changes_after_a_worker_is_forgotten() -> None:
    assert next_change_age_s(PARAMS, 60.0) is None


def full(**fields: Any) -> WorkerReport:
    return make_report(**({"num_blocks": 10, "num_used_blocks": 10} | fields))


def tiers(*running: tuple[str, int], blocks: int = 0) -> list[dict[str, object]]:
    """Counts by tier, of which none waits."""
    return [
        {"tier": tier, "num_running": number, "num_waiting": 0, "num_used_blocks": blocks} for tier, number in running
    ]


def test_a_full_worker_is_not_absurd() -> None:
    assert find_absurdity(full(num_demanded_blocks=10**6)) is None
    assert find_absurdity(full(num_running=3, tiers=tiers(("default", 2), ("flex", 1), blocks=11))) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_running": -1}, "num_running is -1"),
        ({"num_blocks": 10**12}, "num_blocks is 1000000000000"),
        ({"num_used_blocks": 11}, "num_used_blocks is 11, of 10"),
        ({"num_host_blocks": 8, "num_used_host_blocks": 9}, "num_used_host_blocks is 9, of 8"),
        ({"num_given_up_tokens_total": -1}, "num_given_up_tokens_total is -1"),
        ({"tokens_per_s": 1e12}, "tokens_per_s"),
        ({"step_time_s": -0.1}, "step_time_s"),
        ({"token_s": -0.1}, "token_s is -0.1"),
        ({"token_s": 1e9}, "token_s is 1000000000.0"),
        ({"num_uncomputed_blocks": -1}, "num_uncomputed_blocks is -1"),
        ({"memory_bytes": 2**60}, "memory_bytes"),
        ({"sequence_number": 2**60}, "sequence_number"),
        ({"progress_text": "x" * 513}, "progress_text has more than 512"),
        ({"num_layers": 8, "layers": (2, 4), "resident": (3, 8)}, "resident is (3, 8), beside layers (2, 4) of 8"),
        ({"num_layers": 8, "layers": (2, 4), "resident": (0, 3)}, "resident is (0, 3), beside layers (2, 4) of 8"),
        ({"num_layers": 8, "layers": (2, 4), "resident": (0, 9)}, "resident is (0, 9), beside layers (2, 4) of 8"),
        ({"num_layers": 8, "layers": (2, 4), "resident": (-1, 8)}, "resident is (-1, 8)"),
        ({"resident": (0, 513)}, "resident is (0, 513)"),
        ({"layers": (3, 3), "resident": (3, 3)}, "resident is (3, 3)"),
        ({"num_running": 2, "tiers": tiers(("flex", 1), ("flex", 1))}, "it names a tier twice"),
        ({"num_running": 3, "tiers": tiers(("flex", 1), ("default", 1))}, "num_running of all tiers together is not 3"),
        ({"num_waiting": 1, "tiers": tiers(("flex", 0))}, "num_waiting of all tiers together is not 1"),
        ({"num_running": 1, "tiers": tiers(("flex", 1), blocks=10**12)}, "a tier holds too many blocks"),
    ],
)
def test_absurd_numbers_are_named(fields: dict[str, object], named: str) -> None:
    absurdity = some(find_absurdity(full(**fields)))
    assert absurdity.startswith(named)


@pytest.mark.parametrize("resident", [(0, 0), (2, 4), (0, 8), (1, 4)])
def test_layers_that_are_resident_contain_those_that_are_computed(resident: tuple[int, int]) -> None:
    assert find_absurdity(full(num_layers=8, layers=(2, 4), resident=resident)) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"layer_bytes": ()}, "the model has 0 layers, outside 1 to 512"),
        ({"layer_bytes": (1,) * 513}, "the model has 513 layers, outside 1 to 512"),
        ({"layer_bytes": (1, -1)}, f"a size of its model is outside 0 to {2**50}"),
        ({"block_bytes": 2**60}, f"a size of its model is outside 0 to {2**50}"),
        ({"num_pages": 0}, "its memory has 0 pages and up to 100 blocks"),
        ({"num_pages": 2**45}, f"its memory has {2**45} pages and up to 100 blocks"),
        ({"max_blocks": -1}, "its memory has 64 pages and up to -1 blocks"),
        ({"link_bytes_per_s": -1.0}, f"its link has -1 bytes/s, outside 0 to {2**50}"),
        ({"link_bytes_per_s": float("nan")}, f"its link has nan bytes/s, outside 0 to {2**50}"),
        ({"link_bytes_per_s": 2.0**51}, f"its link has 2.2518e+15 bytes/s, outside 0 to {2**50}"),
    ],
)
def test_memory_that_cannot_be_is_named(fields: dict[str, object], reason: str | None) -> None:
    elastic = make_elastic(num_pages=64, max_blocks=100).model_copy(update=fields)
    assert find_absurdity(make_report().model_copy(update={"elastic": elastic})) == reason
