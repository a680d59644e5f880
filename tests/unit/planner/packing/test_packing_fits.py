"""Best fit, worst fit, load balancing and `pack`: what holds after every second of random loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

import pytest

from services.planner.policy.load_balance import MIN_GAP
from services.planner.policy.packing.bins import Bin, Bins, Item, Name
from services.planner.policy.packing.fits import BestFit, FitPacker, FreeIndex, LoadBalance, WorstFit
from services.planner.policy.packing.pack import EMPTY_PERIOD_S, Elsewhere, Pack

CAPACITY = 2048
"""Twice as many as an index has buckets."""
ROOM = 100
PACK = partial(Pack, room_for_growth=ROOM / CAPACITY)
PACKERS = (BestFit, WorstFit, LoadBalance, PACK)


def run_load(
    make: Callable[..., FitPacker], seed: int, each_second: Callable[[FitPacker], None], max_bins: int | None = None
) -> tuple[FitPacker, dict[int, int]]:
    """Have requests come, grow and go for two minutes, and everything that holds of all packers checked."""
    random, packer, sizes = Random(seed), make(CAPACITY, max_bins=max_bins), dict[int, int]()
    places: dict[int, int | None] = {}
    for second in range(120):
        for name in [name for name in sizes if random.random() < 0.03]:
            del sizes[name]
            packer.remove(name)
        for name in list(sizes):
            if name not in packer.evicted:
                sizes[name] = min(sizes[name] + random.randrange(20), CAPACITY)
                packer.resize(name, sizes[name])
        for number in range(random.randrange(4)):
            name = 10 * second + number
            sizes[name] = random.randrange(1, CAPACITY // 2)
            packer.place(name, sizes[name])
        packer.tick(float(second))
        sizes = {name: size for name, size in sizes.items() if name not in packer.evicted}
        check_moves(packer, places)
        packer.evicted.clear()
        check_bins(packer.bins, sizes)
        each_second(packer)
        places = {name: packer.where(name) for name in sizes}
    return packer, sizes


def check_bins(bins: Bins, sizes: dict[int, int]) -> None:
    held = {name: size for bin_ in bins for item in bin_.items.values() for name, size in item.members.items()}
    assert held == sizes
    assert sum(len(bin_.items) for bin_ in bins) == len(sizes), "each lies in one bin"
    for bin_ in bins:
        assert 0 < bin_.used == sum(item.size for item in bin_.items.values())
        assert bin_.free >= 0


def check_moves(packer: FitPacker, before: Mapping[int, int | None]) -> None:
    """Whoever was there is where the moves have brought it, unless it began again elsewhere."""
    now: dict[Name, int | None] = dict(before.items())
    for move in packer.bins.take_moves():
        for name in move.members:
            assert name not in now or now[name] == move.source
            now[name] = move.target
    if not packer.num_restarts:
        for name in before:
            place = packer.where(name)
            assert place is None or place == now[name]


@pytest.mark.parametrize("make", PACKERS)
@pytest.mark.parametrize("max_bins", [None, 6])
def test_every_request_lies_in_one_bin_and_no_bin_holds_more_than_it_can(
    make: Callable[..., FitPacker], max_bins: int | None
) -> None:
    for seed in range(4):
        packer, _ = run_load(make, seed, lambda packer: None, max_bins)
        assert max_bins is None or len(packer.bins) <= max_bins


@pytest.mark.parametrize("seed", range(10))
def test_an_index_finds_the_fullest_and_the_emptiest_bin_to_a_bucket(seed: int) -> None:
    random, index, capacity = Random(seed), FreeIndex(CAPACITY), CAPACITY
    bins = [Bin(number, number, capacity) for number in range(40)]
    for _ in range(300):
        bin_ = random.choice(bins)
        bin_.used = random.choice([0, capacity, random.randrange(-5, capacity + 20)])
        index.update(bin_)
        if random.random() < 0.1:
            index.discard(bin_)
            bin_.used = capacity + 1
        size = random.randrange(1, capacity)
        known = [each for each in bins if each.filed is not None]
        fitting = sorted(each.free for each in known if each.free >= size)
        found = index.fullest(size)
        assert (found is None) == (not fitting)
        if found is not None:
            assert size <= found.free <= fitting[0] + 2, "a bucket is two wide"
        most = max((each.free for each in known), default=0)
        emptiest = index.emptiest(size)
        assert (emptiest is None) == (most < size)
        if emptiest is not None:
            assert emptiest.free > most - 2


def test_without_room_for_growth_pack_is_best_fit_until_something_overflows_or_can_be_emptied() -> None:
    random = Random(1)
    best, pack = BestFit(CAPACITY), Pack(CAPACITY, room_for_growth=0.0)
    for name in range(100):
        size = random.randrange(1, CAPACITY)
        best.place(name, size)
        pack.place(name, size)
        assert best.where(name) == pack.where(name)


def test_pack_puts_nothing_where_no_room_for_growth_is_left_and_empties_what_it_can() -> None:
    def emptiest_stays(packer: FitPacker) -> None:
        """Nothing but single moves is left to find: no bin of the emptiest can go where others have room."""
        by_free = packer.by_free()
        source = by_free[-1]
        others = [(bin_.free, bin_.number, bin_) for bin_ in by_free if bin_ is not source]
        assert Elsewhere(others, ROOM).plan(source.items.values()) is None

    def look(packer: FitPacker) -> None:
        if next(seconds) % EMPTY_PERIOD_S == 0 and len(packer.bins):
            emptiest_stays(packer)

    for seed in range(3):
        seconds = iter(range(1_000))
        run_load(PACK, seed, look)


@pytest.mark.parametrize("seed", range(200))
def test_what_is_planned_for_a_bin_fits_with_room_for_growth_in_the_order_in_which_it_is_told(seed: int) -> None:
    random = Random(seed)
    bins = [Bin(number, number, CAPACITY) for number in range(random.randrange(2, 8))]
    for bin_ in bins:
        while bin_.free > ROOM and random.random() < 0.9:
            item = Item({random.random(): 0}, random.randrange(1, bin_.free + 1), bin=bin_)
            bin_.items[id(item)] = item
            bin_.used += item.size
    source, *rest = bins
    others = sorted((bin_.free, bin_.number, bin_) for bin_ in rest)
    plan = Elsewhere(others, ROOM).plan(source.items.values())
    free = {bin_.number: bin_.free for bin_ in bins}
    for item, target in plan or ():
        assert item.bin is not None
        assert target is not item.bin
        free[item.bin.number] += item.size
        free[target.number] -= item.size
        assert free[target.number] >= ROOM
    if plan is not None:
        assert len({id(item) for item, _ in plan}) == len(plan), "each moves once"
        assert free[0] == CAPACITY, "the source is empty"


def test_a_smaller_request_makes_place_for_one_that_fits_nowhere() -> None:
    """60 fits beside 40 once 30 has gone to the bin that holds 70."""
    pack = Pack(100, room_for_growth=0.0)
    for name, size in {"40": 40, "30": 30, "70": 70, "60": 60}.items():
        pack.place(name, size)
    assert [pack.where(name) for name in ("40", "30", "70", "60")] == [0, 0, 1, 2]
    pack.tick(0.0)
    assert [pack.where(name) for name in ("40", "30", "70", "60")] == [0, 1, 1, 0]
    assert [set(move.members) for move in pack.bins.take_moves()] == [{"30"}, {"60"}]


def test_a_bin_that_overflows_gives_away_the_smallest_request_that_leaves_it_room_for_growth() -> None:
    pack = Pack(100, room_for_growth=0.05)
    for name, size in {"a": 3, "b": 20, "c": 40, "d": 30}.items():
        pack.place(name, size)
    pack.resize("c", 48)
    [move] = pack.bins.take_moves()
    assert set(move.members) == {"b"}, "without a, 98 would be left"


def test_a_bin_that_overflows_starts_the_youngest_again_where_nothing_moves() -> None:
    fit = BestFit(100)
    for name, size in {"old": 50, "young": 45}.items():
        fit.place(name, size)
    fit.resize("old", 60)
    assert fit.where("old") == 0
    assert fit.where("young") == 1
    assert (fit.num_restarts, fit.bins.take_moves()) == (1, [])


def test_load_balancing_moves_until_bins_are_as_full() -> None:
    balance = LoadBalance(100)
    for name in range(40):
        balance.place(name, 5)
    for name in range(0, 40, 2):
        if balance.where(name) == 0:
            balance.remove(name)
    gaps: list[float] = []
    for second in range(20):
        balance.tick(float(second))
        used = [bin_.used for bin_ in balance.bins]
        gaps.append((max(used) - min(used)) / 100)
    assert balance.bins.take_moves()
    assert gaps[0] > MIN_GAP > gaps[-1]
