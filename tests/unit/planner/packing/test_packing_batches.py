"""Operations of a tick as one: which moves are left of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from services.planner.policy.packing.bins import BinMove, Name
from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.packer import net_moves
from tests.support.seeds import first_of
from tests.unit.planner.packing.checks import (
    FORMS,
    check_bins,
    check_index,
    check_properties,
    check_requests,
    check_room,
    places_of,
)
from tests.unit.planner.packing.traces import draw_growth, draw_size


def move(name: Name, source: int, target: int, size: int = 5) -> BinMove:
    return BinMove({name: size}, source, target)


def test_moves_one_after_the_other_are_one_and_there_and_back_is_none() -> None:
    assert net_moves([]) == []
    assert net_moves([move("a", 0, 1)]) == [move("a", 0, 1)]
    assert net_moves([move("a", 0, 1), move("a", 1, 2)]) == [move("a", 0, 2)]
    assert net_moves([move("a", 0, 1), move("a", 1, 0)]) == []
    assert net_moves([move("a", 0, 1), move("a", 1, 2), move("a", 2, 0), move("a", 0, 3)]) == [move("a", 0, 3)]


def test_a_net_move_has_the_last_size_and_the_place_of_the_last_move() -> None:
    moves = [move("a", 0, 1, 5), move("b", 3, 4), move("a", 1, 2, 7)]
    assert net_moves(moves) == [move("b", 3, 4), move("a", 0, 2, 7)]


def test_what_has_moved_as_one_is_netted_one_by_one() -> None:
    moves = [BinMove({"a": 1, "b": 2}, 0, 1), BinMove({"b": 2, "c": 3}, 1, 0), move("c", 0, 2, 3)]
    assert net_moves(moves) == [move("a", 0, 1, 1), move("c", 1, 2, 3)]


@dataclass
class Tick:
    """What happens at once."""

    removed: list[Name] = field(default_factory=list)
    resized: dict[Name, int] = field(default_factory=dict)
    placed: dict[Name, int] = field(default_factory=dict)


def draw_ticks(seed: int, capacity: int, count: int, most: int = 40) -> list[Tick]:
    random = Random(seed)
    sizes: dict[Name, int] = {}
    ticks: list[Tick] = []
    for number in range(count):
        tick = Tick(removed=random.sample(list(sizes), min(len(sizes), random.randint(0, 4))))
        for name in tick.removed:
            del sizes[name]
        grown = random.sample(list(sizes), min(len(sizes), random.randint(0, 8)))
        tick.resized = {name: draw_growth(random, sizes[name], capacity) for name in grown}
        if len(sizes) < most:
            tick.placed = {(number, n): draw_size(random, capacity) for n in range(random.randint(0, 5))}
        sizes |= tick.resized | tick.placed
        ticks.append(tick)
    return ticks


def carry_out(packer: ClassPacker, tick: Tick) -> list[BinMove]:
    return packer.batch(tick.removed, tick.resized, tick.placed)


def carry_out_one_by_one(packer: ClassPacker, tick: Tick, random: Random | None = None) -> list[BinMove]:
    """Return all moves; the operations are in the order of a batch, or in any order."""
    operations: list[Callable[[], None]] = [partial(packer.remove, name) for name in tick.removed]
    operations += [partial(packer.resize, name, size) for name, size in tick.resized.items()]
    operations += [partial(packer.place, name, size) for name, size in tick.placed.items()]
    if random is not None:
        random.shuffle(operations)
    for operation in operations:
        operation()
    return packer.bins.take_moves()


def num_moved(moves: list[BinMove]) -> int:
    """Return how many requests move, or how often."""
    return sum(len(each.members) for each in moves)


@pytest.mark.parametrize("seed", first_of(range(12), 4))
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_ends_with_the_same_requests_in_the_same_bins_as_its_operations_and_moves_no_more(
    form: Callable[..., ClassPacker], seed: int
) -> None:
    batches, singles = form(1000), form(1000)
    sizes: dict[Name, int] = {}
    for tick in draw_ticks(seed, 1000, 50):
        moves = carry_out(batches, tick)
        assert num_moved(moves) <= num_moved(carry_out_one_by_one(singles, tick))
        assert places_of(batches) == places_of(singles)
        sizes = {name: size for name, size in sizes.items() if name not in tick.removed} | tick.resized | tick.placed
        check_requests(batches, sizes)
        check_bins(batches)
        check_room(batches)
        check_index(batches)
        if isinstance(batches, Mell):
            check_properties(batches)


@pytest.mark.parametrize("form", FORMS)
def test_over_many_ticks_batches_move_fewer_than_the_same_operations_in_any_order(
    form: Callable[..., ClassPacker],
) -> None:
    batched = single = 0
    for seed in range(5):
        random, batches, singles = Random(seed), form(1000), form(1000)
        for tick in draw_ticks(seed, 1000, 60):
            batched += num_moved(carry_out(batches, tick))
            single += num_moved(carry_out_one_by_one(singles, tick, random))
    assert 100 < batched < 0.9 * single


@pytest.mark.parametrize("seed", first_of(range(12), 4))
@pytest.mark.parametrize("form", FORMS)
def test_who_stays_through_a_batch_moves_at_most_once_from_where_it_was_to_where_it_is(
    form: Callable[..., ClassPacker], seed: int
) -> None:
    packer = form(1000)
    num_moves = 0
    for tick in draw_ticks(seed, 1000, 50):
        before = places_of(packer)
        moves = carry_out(packer, tick)
        after = places_of(packer)
        moved = [name for each in moves for name in each.members]
        assert len(moved) == len(set(moved))
        ends = {name: (each.source, each.target) for each in moves for name in each.members}
        stays = before.keys() & after.keys()
        differs = {name: (before[name], after[name]) for name in stays if before[name] != after[name]}
        assert {name: places for name, places in ends.items() if name in stays} == differs
        num_moves += len(differs)
    assert num_moves > 10


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_returns_its_own_moves_only(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000)
    assert packer.batch([], {}, {"l": 600, "s": 300, "m": 400}) == []
    assert packer.batch(["s"], {}, {}) == [move("m", 1, 0, 400)]
    assert packer.batch([], {}, {}) == []
    assert packer.bins.take_moves() == []


@pytest.mark.parametrize("form", FORMS)
def test_who_was_evicted_within_a_batch_is_not_resized_any_more(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000, max_bins=1)
    packer.batch([], {}, {"l": 600, "m": 350})
    assert packer.batch([], {"l": 900, "m": 360}, {}) == []
    assert packer.evicted == ["m"]
    assert places_of(packer) == {"l": 0}


# net_moves() knows moves only: not who had no place before them, nor who has none any more
@pytest.mark.parametrize("form", FORMS)
def test_who_ends_within_a_batch_does_not_move(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000)
    packer.batch([], {}, {"l": 600, "s": 300, "m": 400})
    assert packer.batch(["s", "m"], {}, {}) == []


@pytest.mark.parametrize("form", FORMS)
def test_who_comes_within_a_batch_begins_where_it_is_in_the_end(form: Callable[..., ClassPacker]) -> None:
    packer = form(1000)
    assert packer.batch([], {}, {"m": 400, "l": 600}) == []
    assert packer.where("m") == packer.where("l")


# the M goes to the bin of the S, as there is no other; after that to one with an L, which ends: it goes back to the S
# and the other M, where it does not fit. Mell evicts it at once, and removes it again.
def test_who_was_evicted_within_a_batch_is_not_removed_again() -> None:
    packer = Mell(1000, max_bins=2)
    packer.batch([], {}, {"s": 300, "l": 900, "m": 400})
    packer.batch(["l"], {}, {"l2": 610, "m2": 380})
    packer.batch(["l2", "m2"], {}, {})
    assert set(places_of(packer)) == {"s", "m"}
