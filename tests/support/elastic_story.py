"""Random lives of a memory that drops and restores layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.layout import PageHolding, ceil_div
from services.worker.memory.ranges import VirtualMemory
from services.worker.memory.spans import Spans
from tests.support.elastic_cases import Contents, MadeUpError, open_elastic, random_facts, snapshot

CHANGES = ("drop", "grow", "shrink", "restore", "reside", "leave", "fill")


class Story:
    """A random life of a memory, with an oracle beside it.

    Args:
        seed: of all that happens.
        page: bytes of a page.
        make: opens a backend with so many pages; None: main memory.
    """

    def __init__(self, seed: int, page: int = 4096, make: Callable[[int], VirtualMemory] | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        facts, kv = random_facts(self.rng, page)
        self.memory, self.faulty = open_elastic(facts, kv, make and make(facts.num_pages))
        self.faulty.on_call = lambda: self.memory._pool.check_invariants()
        room = max(self.memory.layout.pool_pages(self.memory.holding), 0) * page // kv.block_bytes
        first = int(self.rng.integers(0, min(room, facts.max_blocks) + 1))
        cache = self.memory.open_kv(first, int(self.rng.integers(0, 2 * page)) if room == 0 else 0)
        self.contents = Contents(self.memory, cache, self.rng)
        self.contents.check()
        self.num_faults = self.most_leaving = 0
        self.done: set[str] = set()
        """Changes that changed something."""

    def change(self, act: Callable[[], object]) -> object:
        """Act; every now and then with a fault first, after which nothing may have changed."""
        if self.rng.random() < 0.5:
            before = snapshot(self.memory)
            self.faulty.fail_after(int(self.rng.integers(0, 12)))
            try:
                return act()
            except MadeUpError:
                self.num_faults += 1
                assert snapshot(self.memory) == before
                self.contents.check()
            finally:
                self.faulty.calls_left = None
        return act()

    def some(self, numbers: tuple[int, ...]) -> list[int]:
        count = int(self.rng.integers(1, len(numbers) + 1))
        return sorted(int(i) for i in self.rng.choice(numbers, count, replace=False))

    def some_blocks(self) -> Spans:
        ends = sorted(int(at) for at in self.rng.integers(0, self.contents.facts.max_blocks + 1, 4))
        return Spans.of((ends[0], ends[1]), (ends[2], ends[3]))

    def live(self, num_steps: int) -> None:
        """Change so many times, and give the memory back."""
        for _ in range(num_steps):
            name, before = CHANGES[self.rng.integers(len(CHANGES))], self.memory.holding
            getattr(self, name)()
            self.contents.fill()
            self.contents.check()
            if self.memory.holding != before:
                self.done.add(name)
            self.most_leaving = max(self.most_leaving, len(self.memory.holding.leaving))
        self.memory.close()

    def some_held(self) -> list[int]:
        held = self.memory.holding.layers
        return self.some(held)[: len(held) - 1]

    def drop(self) -> None:
        memory, usable = self.memory, self.memory.usable
        if layers := self.some_held():
            self.change(lambda: memory.drop(layers))
            self.contents.drop(layers)
            assert set(usable) <= set(memory.usable)
            self.check_full()

    def leave(self) -> None:
        memory, layout = self.memory, self.memory.layout
        layers = self.some_held()
        in_use = memory.usable if self.rng.random() < 0.5 else memory.usable & self.some_blocks()
        by = int(self.rng.integers(0, 4)) * layout.unit_blocks
        if in_use and in_use.end + by > layout.facts.max_blocks:
            with pytest.raises(ValueError, match="ids cannot be moved"):
                memory.leave(layers, in_use, by + layout.facts.max_blocks * layout.unit_blocks)
            return
        self.change(lambda: memory.leave(layers, in_use, by))
        self.contents.leave(layers, in_use, by)
        assert set(in_use.shifted(by)) <= set(memory.usable)

    def fill(self) -> None:
        memory, before = self.memory, self.memory.usable
        try:
            self.change(memory.fill)
        except ValueError as error:
            if "lies beyond" not in str(error):
                raise
            return
        self.contents.leaving.clear()
        assert set(before) <= set(memory.usable) == set(range(memory.usable.end))
        self.check_full()

    def grow(self) -> None:
        memory, before = self.memory, self.memory.num_blocks
        if self.rng.random() < 0.5:
            self.change(memory.grow)
            self.check_full()
        else:
            most = int(self.rng.integers(0, 5))
            self.change(lambda: memory.grow(most))
        assert memory.num_blocks >= before

    def restore(self) -> None:
        memory = self.memory
        missing = tuple(i for i in range(self.contents.facts.num_layers) if i not in memory.holding.layers)
        if not missing:
            return
        layers, usable = self.some(missing), memory.usable
        fitting = self.fitting_with(layers)
        with pytest.raises((NotEnoughPagesError, ValueError)):
            memory.restore(layers, fitting + 1)
        if fitting < 0:
            return
        outer = self.change(lambda: memory.restore(layers, fitting))
        assert isinstance(outer, Spans)
        self.contents.restore(layers, outer)
        assert set(usable.head(fitting)) <= set(memory.usable) <= set(usable)

    def fitting_with(self, layers: list[int]) -> int:
        """Return how many of the first blocks fit beside all else if layers come back; below 0: not even all else."""
        layout, held = self.memory.layout, self.memory.holding
        for count in range(layout.usable(held).total, -1, -1):
            kv = layout.covering(layout.usable(held).head(count))
            leaving = tuple((layer, left) for layer, left in held.leaving if layer not in layers)
            beside = tuple(layer for layer in held.beside if layer not in layers)
            with_layers = PageHolding(tuple(sorted((*held.layers, *layers))), kv, leaving, beside)
            if layout.num_pages(with_layers) <= layout.facts.num_pages:
                return count
        return -1

    def check_full(self) -> None:
        """Check that not one more block could be backed at the tail."""
        memory, facts = self.memory, self.contents.facts
        last = memory.layout.covering(memory.usable).end
        following = memory.usable.end if memory.usable else 0
        if following == facts.max_blocks or not memory.usable:
            return
        pages = ceil_div((following + 1) * facts.block_bytes, facts.page_bytes) - last
        assert 2 * len(memory.holding.layers) * pages > memory._pool.num_free

    def shrink(self) -> None:
        usable = self.memory.usable
        count = int(self.rng.integers(0, usable.total + 1))
        self.change(lambda: self.memory.shrink(count))
        assert set(usable.head(count)) <= set(self.memory.usable) <= set(usable)

    def reside(self) -> None:
        memory, usable = self.memory, self.memory.usable
        others = tuple(i for i in range(self.contents.facts.num_layers) if i not in memory.holding.layers)
        beside = self.some(others) if others and self.rng.random() < 0.7 else []
        with pytest.raises(ValueError, match="cannot lie beside"):
            memory.reside([*beside, memory.holding.layers[0]], 0)
        try:
            outer = self.change(lambda: memory.reside(beside, usable.total))
            assert memory.usable == usable
        except NotEnoughPagesError:
            if memory.layout.num_pages(replace(memory.holding, kv=Spans(), beside=tuple(beside))) > memory._pool.budget:
                return
            outer = self.change(lambda: memory.reside(beside, 0))
            assert memory.usable == usable.head(memory.usable.total)
            self.check_full()
        assert isinstance(outer, Spans)
        self.contents.reside(beside, outer)
