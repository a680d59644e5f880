"""What holds of every packer after every operation, counted anew from the bins; and what Mell promises besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from services.planner.policy.packing.bins import Bin, BinMove, Item, Name
from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.mell import Mell
from services.planner.policy.packing.mell_printed import PrintedMell

FORMS: tuple[Callable[..., ClassPacker], ...] = (Mell, PrintedMell)
CLASSES = "tTSML"
"""In order of their size; t: at most C/8."""


def letter(size: int, capacity: int) -> str:
    """Return the class of a size."""
    return CLASSES[sum(divisor * size > capacity for divisor in (8, 4, 3, 2))]


def item_letter(item: Item, capacity: int) -> str:
    return "T" if item.is_gathered else letter(item.size, capacity)


def items_of(bin_: Bin, capacity: int, letters: str) -> list[Item]:
    return [item for item in bin_.items.values() if item_letter(item, capacity) in letters]


def kind_of(bin_: Bin, capacity: int) -> str:
    """Return the class of the largest item; of an empty bin t."""
    return max((item_letter(item, capacity) for item in bin_.items.values()), key=CLASSES.index, default="t")


def is_full(bin_: Bin) -> bool:
    return 4 * bin_.used >= 3 * bin_.capacity


def check_item(packer: ClassPacker, item: Item) -> None:
    assert item.came_from is None
    assert item.size == sum(item.members.values())
    if item.is_gathered:
        assert all(8 * size <= packer.capacity for size in item.members.values())
        assert 4 * item.size <= packer.capacity
    else:
        assert len(item.members) == 1
        assert 8 * item.size > packer.capacity


def check_bins(packer: ClassPacker) -> None:
    numbers = [bin_.number for bin_ in packer.bins]
    assert len(packer.bins) == len(numbers) == len(set(numbers))
    assert len({bin_.order for bin_ in packer.bins}) == len(numbers)
    for bin_ in packer.bins:
        assert packer.bins[bin_.number] is bin_
        assert bin_.items, "no bin is left empty"
        assert bin_.used == sum(item.size for item in bin_.items.values())


def check_room(packer: ClassPacker) -> None:
    assert all(bin_.used <= bin_.capacity or len(bin_.items) == 1 for bin_ in packer.bins), "only one item may overflow"


def check_requests(packer: ClassPacker, sizes: Mapping[Name, int]) -> None:
    """Hold items to the requests that there are."""
    found: dict[Name, int] = {}
    for bin_ in packer.bins:
        for key, item in bin_.items.items():
            check_item(packer, item)
            assert key == id(item)
            assert item.bin is bin_
            assert not found.keys() & item.members.keys(), "no request lies in two bins"
            found |= item.members
            assert all(packer.where(name) == bin_.number for name in item.members)
    evicted = set(packer.evicted)
    assert len(evicted) == len(packer.evicted), "a request is evicted once"
    assert found == {name: size for name, size in sizes.items() if name not in evicted}, "none is lost"
    assert all(packer.where(name) is None for name in evicted)


def check_index(packer: ClassPacker) -> None:
    """Hold the index to a recount."""
    index, capacity = packer._index, packer.capacity
    bins = [bin_ for bin_ in packer.bins if bin_.capacity == capacity]
    kinds = {bin_: kind_of(bin_, capacity) for bin_ in bins}
    for kind, keyed in index.by_order.items():
        expected = sorted((bin_.order, bin_.number) for bin_ in bins if kinds[bin_] == CLASSES[kind])
        assert [(order, bin_.number) for order, bin_ in keyed] == expected
    for kind, by_free in index.by_free.items():
        free = sorted((bin_.free, bin_.number) for bin_ in bins if kinds[bin_] == CLASSES[kind])
        assert [(room, number) for room, number, _ in by_free] == free
    lonely = sorted(
        (capacity - max(item.size for item in bin_.items.values()), bin_.number)
        for bin_ in bins
        if kinds[bin_] == "L" and not items_of(bin_, capacity, "SM")
    )
    assert [(room, number) for room, number, _ in index.lonely] == lonely
    companions = sorted(
        (item.size, bin_.number, id(item))
        for bin_ in bins
        if kinds[bin_] in "SM"
        for item in items_of(bin_, capacity, kinds[bin_])
    )
    assert sorted((size, number, id(item)) for size, number, _, item in index.companions) == companions


def replayed(moves: Iterable[BinMove], before: Mapping[Name, int]) -> dict[Name, int]:
    """Carry out moves, each of which has to start where its requests are; who has just come is not known before."""
    places = dict(before)
    for move in moves:
        assert move.source != move.target
        assert move.members
        for name in move.members:
            assert places.get(name, move.source) == move.source, "a move starts where the request is"
            places[name] = move.target
    return places


def places_of(packer: ClassPacker) -> dict[Name, int]:
    return {name: bin_.number for bin_ in packer.bins for item in bin_.items.values() for name in item.members}


class Exceptions(NamedTuple):
    """Bins, or items, that are not as theorem 1 has them."""

    too_few_m: int
    """M-bins with fewer than two M."""
    too_few_s: int
    """S-bins with fewer than three S."""
    light_t: int
    """T-bins that are less than 3/4 full."""
    lonely_l: int
    """L-bins without S or M although one of an S- or M-bin fits."""
    light_lm: int
    """L- and M-bins that are less than 3/4 full although there is a T-bin."""
    small_gathered: int
    """Gathered items of C/8 or less."""


ALLOWED = Exceptions(too_few_m=1, too_few_s=1, light_t=1, lonely_l=0, light_lm=0, small_gathered=1)
"""For all states of the corrected form whose bins all have one capacity."""


def exceptions(packer: ClassPacker) -> Exceptions:
    capacity = packer.capacity
    kinds: dict[str, list[Bin]] = {kind: [] for kind in CLASSES}
    for bin_ in packer.bins:
        if bin_.capacity == capacity:
            kinds[kind_of(bin_, capacity)].append(bin_)
    smallest = min(
        (item.size for kind in "SM" for bin_ in kinds[kind] for item in items_of(bin_, capacity, kind)),
        default=capacity,
    )
    lonely = [bin_ for bin_ in kinds["L"] if not items_of(bin_, capacity, "SM")]
    return Exceptions(
        too_few_m=sum(len(items_of(bin_, capacity, "M")) < 2 for bin_ in kinds["M"]),
        too_few_s=sum(len(items_of(bin_, capacity, "S")) < 3 for bin_ in kinds["S"]),
        light_t=sum(not is_full(bin_) for bin_ in kinds["T"]),
        lonely_l=sum(max(item.size for item in bin_.items.values()) + smallest <= capacity for bin_ in lonely),
        light_lm=sum(not is_full(bin_) for bin_ in kinds["L"] + kinds["M"]) if kinds["T"] else 0,
        small_gathered=sum(
            item.is_gathered and 8 * item.size <= capacity for bin_ in packer.bins for item in bin_.items.values()
        ),
    )


def check_properties(packer: ClassPacker, allowed: Exceptions = ALLOWED) -> None:
    found = exceptions(packer)
    assert all(number <= most for number, most in zip(found, allowed, strict=True)), found


def has_t_bin(packer: ClassPacker) -> bool:
    return any(kind_of(bin_, packer.capacity) == "T" for bin_ in packer.bins)
