"""Operations on a packer, each checked, and random sequences of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from services.planner.policy.packing.bins import BinMove, Name
from services.planner.policy.packing.class_packer import ClassPacker
from services.planner.policy.packing.mell import Mell
from tests.unit.planner.packing.checks import (
    check_bins,
    check_index,
    check_properties,
    check_requests,
    check_room,
    has_t_bin,
    places_of,
    replayed,
)

CAPACITIES = (7, 8, 12, 100, 997, 1000)
MAX_MOVES = 20
"""Of items in one operation of the corrected form whose bins all have one capacity. The paper proves 10; here each bin
that loses something is filled up again, and those that are filled from as well. 13 is the most that was seen at random,
17 by a search for the worst."""
MORE_BINS = 2
"""Than 4/3 of the sum of all sizes, where there is a T-bin: then all bins but a T-bin and an S-bin are 3/4 full; the
S-bin has an S of more than C/4, so that less than 3/4 + 2/4 of C is lacking, and 4/3 of that is less than 2."""


@dataclass
class Trace:
    """A packer, and the requests that it was told of."""

    packer: ClassPacker
    sizes: dict[Name, int] = field(default_factory=dict)
    evicted: list[Name] = field(default_factory=list)
    places: dict[Name, int] = field(default_factory=dict)
    """Where each was after the last operation."""
    moves: list[BinMove] = field(default_factory=list)
    """Of all operations."""
    checks_promises: bool = True
    """Whether the corrected form has to keep what it promises, while all bins have one capacity."""
    name_of: Callable[[int], Name] = lambda number: number
    """Of the request that comes as so many-eth."""
    num_placed: int = 0

    @classmethod
    def of(cls, form: Callable[..., ClassPacker], capacity: int, **how: Any) -> Trace:
        return cls(form(capacity, **how))

    @property
    def capacity(self) -> int:
        return self.packer.capacity

    def place(self, size: int) -> None:
        self.num_placed += 1
        name = self.name_of(self.num_placed)
        self.sizes[name] = size
        self.packer.place(name, size)
        self._after(MAX_MOVES)

    def remove(self, name: Name) -> None:
        del self.sizes[name]
        del self.places[name]
        self.packer.remove(name)
        self._after(MAX_MOVES)

    def grow(self, name: Name, size: int) -> None:
        assert size >= self.sizes[name], "sizes only grow"
        self.sizes[name] = size
        self.packer.resize(name, size)
        self._after(MAX_MOVES)

    def change_capacity(self, number: int, capacity: int) -> None:
        self.packer.change_capacity(number, capacity)
        self._after()

    def restore(self) -> None:
        """Let all bins hold as much as in the beginning."""
        for bin_ in list(self.packer.bins):
            if bin_.items and bin_.capacity != self.capacity:
                self.change_capacity(bin_.number, self.capacity)

    def _after(self, most_moves: int | None = None) -> None:
        moves = self.packer.bins.take_moves()
        places = places_of(self.packer)
        self._check(moves, places)
        if self.checks_promises and isinstance(self.packer, Mell) and not self.evicted and not self.packer.evicted:
            self._check_promises(moves, most_moves)
        for name in self.packer.evicted:
            del self.sizes[name]
        self.evicted += self.packer.evicted
        self.packer.evicted.clear()
        self.moves += moves
        self.places = places

    def _check(self, moves: list[BinMove], places: dict[Name, int]) -> None:
        check_bins(self.packer)
        check_requests(self.packer, self.sizes)
        check_index(self.packer)
        check_room(self.packer)
        replay = replayed(moves, self.places)
        assert all(replay.get(name, place) == place for name, place in places.items())

    def _check_promises(self, moves: list[BinMove], most_moves: int | None) -> None:
        if any(bin_.capacity != self.capacity for bin_ in self.packer.bins):
            return
        assert most_moves is None or len(moves) <= most_moves
        check_properties(self.packer)
        if has_t_bin(self.packer):
            total, capacity = sum(self.sizes.values()), self.capacity
            assert 3 * capacity * (len(self.packer.bins) - MORE_BINS) <= 4 * total


def fitting(size: int, capacity: int) -> int:
    return min(max(size, 1), capacity)


def draw_size(random: Random, capacity: int) -> int:
    """Draw a class, or where one ends, or anything."""
    at_edge = capacity // random.choice((1, 2, 3, 4, 8)) + random.choice((-1, 0, 0, 1))
    low, high = random.choice(((0.0, 0.125), (0.125, 0.25), (0.25, 0.33), (0.33, 0.5), (0.5, 1.0)))
    within = int(random.uniform(low, high) * capacity)
    return fitting(random.choice((at_edge, within, within, random.randint(1, capacity))), capacity)


def draw_growth(random: Random, size: int, capacity: int) -> int:
    """Draw what a request grows to."""
    step = random.randint(1, max(1, capacity // random.choice((3, 10, 40))))
    return min(random.choice((size + step, size + step, max(size, draw_size(random, capacity)))), capacity)


@dataclass
class Draw:
    """Draws operations."""

    random: Random
    most: int = 60
    """Requests at a time."""
    share_placed: float = 0.5
    share_capacities: float = 0.0

    @classmethod
    def of(cls, seed: int, **how: Any) -> Draw:
        random = Random(seed)
        return cls(random, share_placed=random.choice((0.35, 0.5, 0.65)), **how)

    def step(self, trace: Trace) -> None:
        """Carry out one operation."""
        random, names = self.random, list(trace.sizes)
        drawn = random.random()
        if trace.places and random.random() < self.share_capacities:
            self._change_capacity(trace)
        elif not names or (drawn < self.share_placed and len(names) < self.most):
            trace.place(draw_size(random, trace.capacity))
        elif drawn < (1 + self.share_placed) / 2:
            trace.remove(random.choice(names))
        else:
            name = random.choice(names)
            trace.grow(name, draw_growth(random, trace.sizes[name], trace.capacity))

    def steps(self, trace: Trace, count: int) -> None:
        for _ in range(count):
            self.step(trace)

    def _change_capacity(self, trace: Trace) -> None:
        number, capacity = self.random.choice(list(trace.places.values())), trace.capacity
        low, high = self.random.choice(((0, capacity), (capacity // 2, capacity), (capacity, 2 * capacity)))
        changed = self.random.randint(low, high)
        trace.change_capacity(number, self.random.choice((capacity, changed)))
