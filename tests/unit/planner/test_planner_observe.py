"""What the planner makes of a view: who can work, what memory there is, what waits, and who is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.observe import ObserveParams, find_loss, linear_profile, observe
from services.planner.policy.plans.drop_facts import InstanceFacts
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.report import BestEffortPart, Liveness, WaitingRequests, WorkerPhase, WorkerStatus
from tests.support.drop_builders import (
    make_elastic,
    make_model,
)
from tests.support.kinds import some
from tests.support.statuses import make_status, make_view

OBSERVE = ObserveParams((1.0, 1.8), horizon_s=2.0)
ELASTIC = make_elastic(make_model(), num_pages=64, max_blocks=50)


def status(name: str, **fields: Any) -> WorkerStatus:
    """An elastic worker with 100 blocks of 16 tokens."""
    common: dict[str, Any] = {
        "host": "h",
        "incarnation": Incarnation(3),
        "block_size": 16,
        "num_blocks": 100,
        "num_layers": 8,
        "layers": (0, 8),
        "elastic": ELASTIC,
        "token_s": 0.25,
    }
    return make_status(name, **(common | fields))


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9), st.sampled_from("mn")), min_size=1, max_size=6),
    st.integers(0, 2000),
    st.integers(0, 50_000),
)
def test_what_waits_in_dispatchers_waits_at_workers_of_its_model_in_proportion_to_their_memory(
    workers: list[tuple[int, int, str]], num_requests: int, num_tokens: int
) -> None:
    """It is neither lost nor doubled, but for a block of each worker; as queued it counts where some are queued."""
    statuses = [
        status(f"w{i}", num_blocks=blocks, num_queued_for_memory=queued, model=model, num_demanded_blocks=2 * queued)
        for i, (blocks, queued, model) in enumerate(workers)
    ]
    waiting = WaitingRequests(model="m", tier="default", num_requests=num_requests, num_tokens=num_tokens)
    best_effort = waiting.model_copy(update={"tier": "flex"})
    before, after, beside = (
        observe(make_view(*statuses).model_copy(update={"waiting": rows}), 0.1, OBSERVE).snapshot
        for rows in ((), (waiting,), (best_effort,))
    )
    assert beside == before, "best effort that waits asks for nothing"
    added = [
        new.num_demanded_blocks - old.num_demanded_blocks
        for old, new in zip(before.workers, after.workers, strict=True)
    ]
    mine = [model == "m" for _, _, model in workers]
    if any(mine) and num_requests:
        assert num_tokens / 16 - len(workers) <= sum(added) <= num_tokens / 16
        sizes = sum(blocks for blocks, _, model in workers if model == "m")
        for (blocks, _, model), more in zip(workers, added, strict=True):
            assert more == (num_tokens * blocks // (16 * sizes) if model == "m" else 0)
    else:
        assert not any(added)
    if before.facts is None or after.facts is None:
        return
    old, new = before.facts.instances, after.facts.instances
    queued = [b.num_queued - a.num_queued for a, b in zip(old, new, strict=True)]
    assert 0 <= sum(queued) <= num_requests
    assert all(more == 0 for more, each in zip(queued, old, strict=True) if not each.num_queued)


COUNTS = st.tuples(*[st.integers(0, 50)] * 5)
"""Blocks that are held, asked for and to be computed; sequences that run and that wait."""


def counts_of(held: int, asked: int, uncomputed: int, running: int, waiting: int) -> dict[str, Any]:
    return {
        "num_used_blocks": held,
        "num_demanded_blocks": asked,
        "num_uncomputed_blocks": uncomputed,
        "num_running": running,
        "num_waiting": waiting,
    }


@given(COUNTS, COUNTS, st.integers(0, 2), st.booleans())
def test_best_effort_that_gives_way_is_as_if_it_were_not_there(
    others: tuple[int, ...], flex: tuple[int, ...], num_queued: int, gives_way: bool
) -> None:
    """Where it does not, it is as everybody's. A row of best effort decodes as fast as one of the others."""
    said = counts_of(*(a + b for a, b in zip(others, flex, strict=True)))
    common: dict[str, Any] = {"num_queued_for_memory": num_queued}
    slack = {"num_slack_blocks": flex[0], "num_slack_demanded_blocks": flex[1]} if gives_way else {}
    part = BestEffortPart(**counts_of(*flex), gives_way=gives_way)
    rate = 10.0 * (others[3] + flex[3])
    mixed = status("w", best_effort=part, tokens_per_s=rate, **said, **common, **slack)
    alone = status("w", tokens_per_s=10.0 * others[3], **counts_of(*others), **common)
    every = status("w", tokens_per_s=rate, **said, **common)
    found, expected = (
        observe(make_view(each), 0.1, OBSERVE).snapshot for each in (mixed, alone if gives_way else every)
    )
    assert found.workers == expected.workers
    (found_facts,), (expected_facts,) = some(found.facts).instances, some(expected.facts).instances
    rounded = replace(expected_facts, tokens_per_s=found_facts.tokens_per_s, growth_tokens=found_facts.growth_tokens)
    assert found_facts == rounded
    assert found_facts.tokens_per_s == pytest.approx(expected_facts.tokens_per_s)


def instances(*statuses: WorkerStatus) -> tuple[InstanceFacts, ...]:
    facts = some(observe(make_view(*statuses), 0.1, OBSERVE).snapshot.facts)
    return facts.instances


def test_rows_with_slack_are_no_demand_of_the_cluster() -> None:
    """A plan that is made nevertheless counts them: they come back."""
    said: dict[str, Any] = {"num_used_blocks": 90, "num_demanded_blocks": 30}
    slack = {"num_slack_blocks": 40, "num_slack_demanded_blocks": 25}
    snapshot = observe(make_view(status("w", **said, **slack)), 0.1, OBSERVE).snapshot
    (load,) = snapshot.workers
    assert (load.num_used_blocks, load.num_demanded_blocks) == (50, 5)
    assert some(snapshot.facts) == some(observe(make_view(status("w", **said)), 0.1, OBSERVE).snapshot.facts)


# --- from a view to facts --------------------------------------------------------------------------------------------


def test_every_figure_of_a_report_has_its_place() -> None:
    busy: dict[str, Any] = {
        "num_used_blocks": 40,
        "num_demanded_blocks": 7,
        "tokens_per_s": 12.5,
        "num_running": 5,
        "num_queued_for_memory": 2,
        "num_waiting": 9,
        "max_model_len": 900,
    }
    (facts,) = instances(status("w", throttled=True, **busy))
    assert facts == InstanceFacts(
        instance_id=WorkerId("w"),
        layers=LayerRange(0, 8),
        num_pages=64,
        host="h",
        used_tokens=40 * 16,
        demanded_tokens=7 * 16,
        growth_tokens=25,
        tokens_per_s=12.5,
        max_request_tokens=900,
        num_running=5,
        num_queued=2,
        throttled=True,
        token_s=0.25,
        host_copy=LayerRange(0, 8),
        max_blocks=50,
        num_blocks=100,
    )


def test_a_leader_speaks_for_its_group_and_is_the_one_that_takes_requests() -> None:
    common: dict[str, Any] = {"group": "w1", "num_stages": 2, "num_used_blocks": 30}
    seen = observe(
        make_view(
            status("w0", layers=(4, 8), stage=1, throttled=True, **common),
            status("w1", layers=(0, 4), throttled=True, **common),
            status("w2"),
            status("w3", elastic=None, num_used_blocks=9),
            status("w4", liveness=Liveness.SUSPECT),
            status("w5", phase=WorkerPhase.LOADING),
        ),
        0.3,
        OBSERVE,
    )
    assert [(load.worker_id, load.throttled) for load in seen.snapshot.workers] == [
        ("w1", True),
        ("w2", False),
        ("w3", False),
    ]
    assert (seen.snapshot.num_unavailable, seen.snapshot.view_age_s, seen.left_out) == (2, 0.3, ())
    member, leader, alone = some(seen.snapshot.facts).instances
    assert (member.group, member.used_tokens, member.throttled) == ("w1", 0, False)
    assert (leader.group, leader.used_tokens, leader.throttled) == ("w1", 480, True)
    assert (alone.group, alone.group_id) == ("w2", "")


def test_without_elastic_workers_there_are_no_facts() -> None:
    assert observe(make_view(status("w", elastic=None)), 0.1, OBSERVE).snapshot.facts is None
    assert observe(make_view(), 0.1, OBSERVE).snapshot.facts is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 32}, "the sizes of its model are not those of most workers"),
        ({"model": "other"}, "the sizes of its model are not those of most workers"),
        ({"model_digest": "0f"}, "the parameters of its model are not those of most workers"),
        ({"block_size": 0}, "block_bytes, block_size and page_bytes are positive"),
        ({"layers": (0, 0)}, "layers [0, 0) are no range"),
        ({"layers": (0, 9)}, "it holds the layers (0, 9) of a model of 8"),
        ({"elastic": ELASTIC.model_copy(update={"num_pages": 0})}, "its budget cannot be"),
        ({"token_s": -1.0}, "its budget cannot be"),
        ({"tokens_per_s": -1.0}, "its budget cannot be"),
        ({"resident": (1, 8)}, "it has parameters of the layers (1, 8), and holds (0, 8)"),
        ({"layers": (0, 4), "resident": (0, 9)}, "it has parameters of the layers (0, 9), and holds (0, 4)"),
    ],
)
def test_workers_that_no_plan_can_count_on_are_left_out_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    seen = observe(make_view(status("w0", **fields), status("w1"), status("w2")), 0.1, OBSERVE)
    assert seen.left_out == (("w0", reason),)
    assert [each.instance_id for each in some(seen.snapshot.facts).instances] == ["w1", "w2"]
    assert len(seen.snapshot.workers) == 3, "requests are placed on it all the same"


def test_what_is_resident_beside_is_no_layer_that_is_held() -> None:
    says_nothing, has_none, loads = instances(
        status("w0", layers=(0, 4)),
        status("w1", layers=(0, 4), resident=(0, 4)),
        status("w2", layers=(0, 4), resident=(0, 8), loaded_ratio=0.5),
    )
    assert [each.layers for each in (says_nothing, has_none, loads)] == [LayerRange(0, 4)] * 3
    assert [each.resident for each in (says_nothing, has_none, loads)] == [None, LayerRange(0, 4), LayerRange(0, 8)]
    assert [each.is_beside for each in (says_nothing, has_none, loads)] == [False, False, True]
    assert (loads.loaded_ratio, loads.loaded) == (0.5, LayerRange(0, 4))


def test_the_time_of_a_token_and_the_budget_may_differ() -> None:
    other = ELASTIC.model_copy(update={"num_pages": 80, "max_blocks": 7, "has_host_copy": False})
    first, second = instances(status("w0"), status("w1", elastic=other, token_s=1.0))
    assert (first.num_pages, second.num_pages, second.host_copy) == (64, 80, None)
    assert (first.token_s, second.token_s) == (0.25, 1.0)


def test_a_process_is_lost_when_it_is_dead_or_stopped_or_another_one_and_not_when_nobody_has_heard_of_it() -> None:
    seen = make_view(
        status("w0"),
        status("w1", liveness=Liveness.SUSPECT),
        status("w2", liveness=Liveness.DEAD),
        status("w3", phase=WorkerPhase.STOPPED),
        status("w4", incarnation=4),
    )
    losses = [find_loss(seen, WorkerId(f"w{number}"), Incarnation(3)) for number in range(6)]
    assert losses == [None, None, "it is gone", "it is gone", "it was started anew", None]


@given(st.integers(1, 64), st.floats(0, 1))
def test_a_linear_profile_is_concave_and_positive_or_refused(size: int, loss: float) -> None:
    try:
        profile = linear_profile(size, loss)
    except ValueError:
        assert loss * (size - 1) >= 1
        return
    assert len(profile) == size
    assert profile[0] == 1.0
    assert min(profile) > 0
    steps = np.diff(profile)
    assert (np.diff(steps) <= 1e-9).all()


# --- patience --------------------------------------------------------------------------------------------------------
