"""Requests come to lie where Mell has them, and dispatchers know where the next one goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from services.planner.policy.packing.by_class import LOOK_S, ByClass
from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.classes import SizeClass, least_size
from services.planner.policy.packing.mell import Mell
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import MAX_LISTED, FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerPhase, WorkerStatus
from tests.support.statuses import make_status, make_view
from tests.unit.planner.packing.checks import (
    FORMS,
    check_bins,
    check_index,
    check_properties,
    check_requests,
    check_room,
)

NUM_BLOCKS, BLOCK_SIZE = 1000, 16
GROWTH = 1
"""Blocks by which a request grows, as far as these workers say."""


def part(name: str, num_blocks: int, num_shared: int = 0) -> RunningPart:
    choices = ((RequestId(name), 1),)
    return RunningPart(
        choices=choices,
        num_tokens=BLOCK_SIZE * num_blocks,
        num_blocks=num_blocks - num_shared,
        num_held_blocks=num_blocks,
    )


@dataclass
class Cluster:
    """Requests that hold blocks at workers, and move as they are told to if they find room there."""

    num_workers: int
    form: Callable[..., ClassPacker] = Mell
    can_move: Callable[[], bool] = lambda: True
    running: dict[str, dict[str, int]] = field(default_factory=dict)
    """Sizes by request, by worker."""
    draining: set[str] = field(default_factory=set)
    num_moves: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.running = {f"w{index}": {} for index in range(self.num_workers)}
        self.rule = ByClass(self.form)

    def status(self, name: str) -> WorkerStatus:
        held = self.running[name]
        return make_status(
            name,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            model_digest="m",
            stage_address="a",
            num_used_blocks=sum(held.values()),
            num_running=len(held),
            phase=WorkerPhase.DRAINING if name in self.draining else WorkerPhase.READY,
        )

    def view(self) -> ClusterView:
        return make_view(*map(self.status, self.running))

    def free(self, name: str) -> int:
        return NUM_BLOCKS - sum(self.running[name].values())

    def tick(self) -> list[str]:
        """Do what is wanted; return who has moved."""
        self.now_s += LOOK_S
        moved: list[str] = []
        for look in self.rule(self.view(), frozenset(), self.now_s):
            held = self.running[look.source.worker_id]
            moves = look.choose([part(name, size) for name, size in held.items()], frozenset())
            for move in moves:
                (name, _), target = move.part.choices[0], move.target.worker_id
                assert look.reason is FetchReason.PACK
                assert look.tell(move) == f"by its size class it belongs on {target}"
                if self.can_move() and held[name] <= self.free(target):
                    self.running[target][name] = held.pop(name)
                    moved.append(name)
        self.num_moves += len(moved)
        return moved

    def place(self, name: str, size: int) -> str:
        """Have a request come as dispatchers place it."""
        fits = [each for each in self.rule.filling.by_size if each.min_tokens <= size * BLOCK_SIZE]
        worker = str(fits[-1].worker_id) if fits else "w0"
        if self.free(worker) < size or worker in self.draining:
            worker = max(self.running.keys() - self.draining, key=lambda each: (self.free(each), each))
        self.running[worker][name] = size
        return worker

    def rest(self) -> None:
        """Go on until nobody moves."""
        for _ in range(40):
            if not self.tick() and not self.tick():
                return
        raise AssertionError("requests move for ever")


def check(cluster: Cluster) -> None:
    """Hold the rule to the cluster at rest."""
    packer = cluster.rule._packer
    sizes = {
        RequestId(name): size + GROWTH
        for worker, held in cluster.running.items()
        for name, size in held.items()
        if worker not in cluster.draining
    }
    check_bins(packer)
    check_index(packer)
    check_room(packer)
    check_requests(packer, {name: size for name, size in sizes.items() if packer.where(name) is not None})
    for worker in cluster.running.keys() - cluster.draining:
        for name in cluster.running[worker]:
            place = cluster.rule.place_of(part(name, 1))
            assert place is None or place.worker_id == worker, "it lies where it runs"
    assert len(set(cluster.rule._worker_of.values())) == len(packer.bins), "each bin is a worker"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_grows_and_goes_and_whoever_drains_it_comes_to_rest_where_it_lies(
    form: Callable[..., ClassPacker], seed: int
) -> None:
    random = Random(seed)
    cluster = Cluster(12, form, can_move=lambda: random.random() < 0.8)
    number = 0
    for _ in range(60):
        for _ in range(random.randrange(3)):
            size = random.choice((random.randrange(5, 120), random.randrange(120, 600)))
            if max(map(cluster.free, cluster.running.keys() - cluster.draining)) > size:
                cluster.place(f"r{number}", size)
                number += 1
        for name, held in cluster.running.items():
            for request in [each for each in held if random.random() < 0.06]:
                del held[request]
            for request in held:
                held[request] += random.randrange(3) if cluster.free(name) > 10 else 0
        if random.random() < 0.05:
            drained = random.choice(sorted(cluster.running))
            cluster.draining ^= {drained}
        cluster.tick()
    assert cluster.num_moves > 10
    while sum(sum(held.values()) for held in cluster.running.values()) > 5000:
        held = max(cluster.running.values(), key=lambda each: sum(each.values()))
        del held[random.choice(sorted(held))]
    cluster.draining.clear()
    cluster.can_move = lambda: True
    cluster.rest()
    check(cluster)
    names = {name for held in cluster.running.values() for name in held}
    assert all(cluster.rule.place_of(part(name, 1)) is not None for name in names), "there is room for everybody"
    if form is Mell:
        check_properties(cluster.rule._packer)


@pytest.mark.parametrize("form", FORMS)
def test_who_is_placed_as_dispatchers_are_told_stays_there(form: Callable[..., ClassPacker]) -> None:
    random, cluster = Random(5), Cluster(30, form)
    cluster.tick()
    for number in range(40):
        name = f"r{number}"
        cluster.place(name, least_size(random.choice(list(SizeClass)), NUM_BLOCKS))
        assert name not in cluster.tick()


def test_dispatchers_are_told_by_tokens_of_each_class_and_an_unused_worker_is_next_for_the_largest() -> None:
    cluster = Cluster(3)
    cluster.tick()
    assert [each.min_tokens for each in cluster.rule.filling.by_size] == [1, 2001, 4001, 5329, 8001]
    assert {each.worker_id for each in cluster.rule.filling.by_size} == {"w0"}
    cluster.running["w1"] = {"large": 600, "small": 20}
    cluster.tick()
    told = [each.worker_id for each in cluster.rule.filling.by_size]
    assert told == ["w1", "w1", "w1", "w1", "w0"], "beside an L goes what fits, and another L in a worker of its own"
    cluster.running["w1"]["medium"] = 340
    cluster.tick()
    told = [each.worker_id for each in cluster.rule.filling.by_size]
    assert told == ["w1", "w0", "w0", "w0", "w0"], "the small one takes more of its kind"


def test_who_moves_waits_until_there_is_room() -> None:
    cluster = Cluster(3)
    cluster.running["w0"] = {"large": 600, "beside": 300}
    cluster.tick()
    cluster.running["w1"] = {"other": 700}
    cluster.tick()
    cluster.running["w0"]["large"] = 720
    (look,) = [each for each in cluster.rule(cluster.view(), frozenset(), 99.0) if each.source.worker_id == "w0"]
    running = [part(name, size) for name, size in cluster.running["w0"].items()]
    (move,) = look.choose(running, frozenset())
    assert move.part.choices[0][0] == "beside"
    assert look.choose(running, {move.target.worker_id}) == [], "that one is in another move"
    cluster.running[move.target.worker_id]["guest"] = 900
    (look,) = [each for each in cluster.rule(cluster.view(), frozenset(), 199.0) if each.source.worker_id == "w0"]
    assert look.choose(running, frozenset()) == []


def test_who_finds_no_place_at_all_stays_and_is_asked_about_again() -> None:
    """Six large ones on three workers: by class each is to have a worker for itself."""
    cluster = Cluster(3)
    cluster.running = {f"w{worker}": {f"r{worker}{n}": 500 for n in range(2)} for worker in range(3)}
    assert not cluster.tick()
    assert not cluster.rule._packer.evicted
    assert not [each for each in cluster.rule.filling.by_size if each.min_tokens > 8000], "no worker is left"
    assert num_lying(cluster) == 3
    (name, other) = cluster.running["w0"]
    del cluster.running["w0"][other if cluster.rule.place_of(part(name, 1)) is None else name]
    cluster.rest()
    assert sum(map(len, cluster.running.values())) == 5
    assert num_lying(cluster) == 3


def num_lying(cluster: Cluster) -> int:
    """Return how many requests have a place."""
    names = [name for held in cluster.running.values() for name in held]
    return sum(cluster.rule.place_of(part(name, 1)) is not None for name in names)


def test_a_worker_whose_requests_are_not_told_yet_comes_after_those_that_have_none() -> None:
    cluster = Cluster(2)
    cluster.running["w0"]["its prompt is computed"] = 100
    cluster.rule(cluster.view(), frozenset(), 1.0)
    assert {each.worker_id for each in cluster.rule.filling.by_size} == {"w1"}


@pytest.mark.parametrize(("num_blocks", "size"), [(100, 106), (998, 1000)])
def test_a_request_weighs_what_it_will_hold_when_a_move_could_be_over_and_no_more_than_a_worker(
    num_blocks: int, size: int
) -> None:
    """It gets a block per second, and that is four seconds from now."""
    status = Cluster(1).status("w0")
    report = status.report.model_copy(update={"num_running": 1, "tokens_per_s": 16.0})
    rule, view = ByClass(Mell), make_view(status.model_copy(update={"report": report}))
    (look,) = rule(view, frozenset(), 0.0)
    look.choose([part("r", num_blocks)], frozenset())
    (bin_,) = rule._packer.bins
    assert bin_.used == size


def test_all_that_runs_at_a_worker_is_asked_for_or_nothing() -> None:
    cluster = Cluster(2)
    cluster.running = {"w0": {f"r{n}": 0 for n in range(MAX_LISTED)}, "w1": {f"q{n}": 0 for n in range(MAX_LISTED + 1)}}
    (look,) = cluster.rule(cluster.view(), frozenset(), 1.0)
    assert (look.source.worker_id, look.most_requests) == ("w0", MAX_LISTED)


def test_nobody_goes_where_nothing_can_move_now_and_each_worker_is_asked_once_per_tick() -> None:
    cluster = Cluster(2)
    cluster.running["w0"] = {"a": 600, "b": 390}
    cluster.tick()
    cluster.running["w0"]["a"] = 700
    avoided = {(WorkerId("w0"), WorkerId("w1"))}
    (look,) = cluster.rule(cluster.view(), avoided, 50.0)
    assert cluster.rule(cluster.view(), avoided, 50.0 + LOOK_S / 2) == []
    running = [part(name, size) for name, size in cluster.running["w0"].items()]
    assert look.choose(running, frozenset()) == []
    (look,) = cluster.rule(cluster.view(), frozenset(), 50.0 + LOOK_S)
    assert len(look.choose(running, frozenset())) == 1


def test_workers_of_another_model_or_size_are_left_out() -> None:
    cluster = Cluster(3)
    cluster.running["w0"] = {"a": 600}
    odd = [
        make_status("x", num_blocks=500, model_digest="m", stage_address="a", num_running=1, num_used_blocks=10),
        make_status("y", num_blocks=1000, model_digest="n", stage_address="a", num_running=1, num_used_blocks=10),
    ]
    view = make_view(*cluster.view().workers, *odd)
    assert [look.source.worker_id for look in cluster.rule(view, frozenset(), 1.0)] == ["w0"]
    assert {each.worker_id for each in cluster.rule.filling.by_size} <= {"w0", "w1", "w2"}
