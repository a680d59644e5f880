"""Between whom requests move so that memory is used alike, and that they come to rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from services.planner.policy.load_balance import MAX_TARGET_USAGE, MIN_GAP, Pair, choose, find_pairs, usage
from shared.api_keys import Tier
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import RunningPart
from shared.messages.report import BestEffortPart, ClusterView, Liveness, WorkerPhase, WorkerStatus
from shared.systems import Migrates
from tests.support.statuses import make_status, make_view


def worker(name: str, used: int, **fields: Any) -> WorkerStatus:
    """100 blocks, of a model that others have, too."""
    common: dict[str, Any] = {"num_blocks": 100, "num_used_blocks": used, "model_digest": "m", "stage_address": "a"}
    return make_status(name, **(common | fields))


def running(name: str, num_blocks: int, tier: Tier = Tier.DEFAULT) -> RunningPart:
    key = RequestId(name), 1
    return RunningPart(
        choices=(key,), tier=tier, num_tokens=16 * num_blocks, num_blocks=num_blocks, num_held_blocks=num_blocks
    )


def pairs_of(view: ClusterView, migrates: Migrates = Migrates.TO_BALANCE) -> list[tuple[str, str]]:
    return [(pair.source.worker_id, pair.target.worker_id) for pair in find_pairs(view, migrates)]


def only_pair(view: ClusterView) -> Pair:
    (pair,) = find_pairs(view, Migrates.TO_BALANCE)
    return pair


def test_the_fullest_gives_to_the_emptiest_and_the_second_fullest_to_the_second_emptiest() -> None:
    view = make_view(worker("a", 70), worker("b", 10), worker("c", 90), worker("d", 30), worker("e", 50))
    assert pairs_of(view) == [("c", "b"), ("a", "d")]


def test_where_nothing_could_move_the_next_one_takes_its_place() -> None:
    view = make_view(worker("a", 70), worker("b", 10), worker("c", 90), worker("d", 30), worker("e", 50))

    def pairs(*avoided: tuple[str, str]) -> list[tuple[str, str]]:
        named = {(WorkerId(source), WorkerId(target)) for source, target in avoided}
        found = find_pairs(view, Migrates.TO_BALANCE, named)
        return [(pair.source.worker_id, pair.target.worker_id) for pair in found]

    assert pairs(("c", "b")) == [("c", "d"), ("a", "b")]
    assert pairs(("c", "b"), ("c", "d")) == [("a", "b"), ("c", "e")]
    assert pairs(("b", "c"), ("a", "b")) == [("c", "b"), ("a", "d")]
    assert pairs(*(("c", name) for name in "abde")) == [("a", "b"), ("e", "d")]


def test_who_is_not_short_gives_nothing_where_requests_move_in_need_only() -> None:
    view = make_view(worker("a", 99), worker("b", 10))
    assert pairs_of(view, Migrates.WHEN_SHORT) == []
    assert pairs_of(view, Migrates.NEVER) == []
    short = worker("a", 80, num_queued_for_memory=1, num_demanded_blocks=30)
    assert pairs_of(make_view(short, worker("b", 10)), Migrates.WHEN_SHORT) == [("a", "b")]
    throttled = worker("a", 80, throttled=True)
    assert pairs_of(make_view(throttled, worker("b", 10)), Migrates.WHEN_SHORT) == [("a", "b")]


@pytest.mark.parametrize(
    "fields",
    [
        {"liveness": Liveness.SUSPECT},
        {"liveness": Liveness.DEAD},
        {"phase": WorkerPhase.DRAINING},
        {"model_digest": "another"},
        {"model_digest": ""},
        {"stage_address": ""},
        {"num_blocks": 0},
        {"num_queued_for_memory": 1},
        {"throttled": True},
        {"held": "a plan is under way"},
        {"group": "g"},
    ],
)
def test_nobody_is_sent_to_a_worker_that_takes_no_part(fields: dict[str, Any]) -> None:
    assert pairs_of(make_view(worker("a", 90), worker("b", 10))) == [("a", "b")]
    assert ("a", "b") not in pairs_of(make_view(worker("a", 90), worker("b", 10, **fields)))


def test_what_waits_counts_but_for_best_effort_that_gives_way() -> None:
    assert usage(worker("a", 40, num_demanded_blocks=70).report) == pytest.approx(1.1)
    for gives_way in (False, True):
        flex = BestEffortPart(num_used_blocks=30, num_demanded_blocks=20, gives_way=gives_way)
        report = worker("a", 40, num_demanded_blocks=70, best_effort=flex).report
        assert usage(report) == pytest.approx(0.9 if gives_way else 1.1)


def test_best_effort_goes_first_then_who_has_least_and_nobody_too_large() -> None:
    pair = only_pair(make_view(worker("a", 90), worker("b", 10)))
    assert pair.most_blocks == 40
    parts = [running("large", 41, Tier.FLEX), running("b", 7), running("c", 3), running("flex", 9, Tier.FLEX)]
    for wanted in ("flex", "c", "b"):
        chosen = choose(pair, parts)
        assert chosen is not None
        assert chosen.choices == ((wanted, 1),)
        parts.remove(chosen)
    assert choose(pair, parts) is None
    assert choose(pair, [running("nothing", 0)]) is None


def test_between_workers_of_two_sizes_neither_becomes_the_fuller_one() -> None:
    pair = only_pair(make_view(worker("a", 90), worker("b", 0, num_blocks=1000)))
    assert 90 - pair.most_blocks >= pair.most_blocks / 10
    assert 90 - (pair.most_blocks + 1) < (pair.most_blocks + 1) / 10


@dataclass
class Cluster:
    """Requests that hold blocks at workers, and move as they are told to."""

    sizes: dict[str, int]
    held: dict[str, list[RunningPart]] = field(default_factory=dict)
    moves: int = 0

    def view(self) -> ClusterView:
        return make_view(*(worker(name, self.used(name), num_blocks=size) for name, size in self.sizes.items()))

    def used(self, name: str) -> int:
        return sum(part.num_blocks for part in self.held[name])

    def shares(self) -> list[float]:
        return [self.used(name) / size for name, size in self.sizes.items()]

    def move(self) -> bool:
        """Do what is said once; return whether anybody moved."""
        before = self.moves
        for pair in find_pairs(self.view(), Migrates.TO_BALANCE):
            source, target = pair.source.worker_id, pair.target.worker_id
            part = choose(pair, self.held[source])
            if part is not None:
                self.held[source].remove(part)
                self.held[target].append(part)
                self.moves += 1
        return self.moves > before


@pytest.mark.parametrize("seed", range(60))
def test_moves_come_to_rest_and_each_makes_usage_more_even(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = [f"w{index}" for index in range(random.integers(2, 9))]
    cluster = Cluster({name: int(random.integers(50, 400)) for name in names})
    for name in names:
        cluster.held[name] = []
        fill = random.random() * cluster.sizes[name]
        while (size := int(random.integers(1, 12))) + cluster.used(name) < fill:
            cluster.held[name].append(
                running(f"{name}-{len(cluster.held[name])}", size, Tier(int(random.integers(0, 3))))
            )
    total = sum(map(cluster.used, names))
    for _ in range(1000):
        view, before = cluster.view(), cluster.shares()
        pairs = find_pairs(view, Migrates.TO_BALANCE)
        taken = [name for pair in pairs for name in (pair.source.worker_id, pair.target.worker_id)]
        assert len(taken) == len(set(taken)), "each is in one pair"
        assert all(usage(pair.source) - usage(pair.target) >= MIN_GAP for pair in pairs)
        assert all(usage(pair.target) < MAX_TARGET_USAGE for pair in pairs)
        assert pairs == find_pairs(make_view(*view.workers[::-1]), Migrates.TO_BALANCE)
        if not cluster.move():
            break
        after = cluster.shares()
        assert max(after) <= max(before) + 1e-9
        assert min(after) >= min(before) - 1e-9
    else:
        pytest.fail("they move for ever")
    assert sum(map(cluster.used, names)) == total
    largest = max((part.num_blocks for parts in cluster.held.values() for part in parts), default=0)
    spread, smallest = max(cluster.shares()) - min(cluster.shares()), min(cluster.sizes.values())
    assert spread < MIN_GAP + 2 * largest / smallest
