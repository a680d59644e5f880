"""Random lives of a memory that drops and restores layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.memory.holdings import NotEnoughPagesError
from services.worker.memory.layout import ceil_div
from services.worker.memory.ranges import VirtualMemory
from services.worker.memory.spans import Spans
from tests.support.elastic_cases import CPU, Contents, MadeUpError, open_elastic, random_facts, snapshot


class Story:
    """A random life of a memory, with an oracle beside it.

    Args:
        seed: of all that happens.
        page: bytes of a page.
        make: opens a backend with so many pages; None: main memory.
        device: of the backend.
    """

    def __init__(
        self,
        seed: int,
        page: int = 4096,
        make: Callable[[int], VirtualMemory] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        facts, kv = random_facts(self.rng, page)
        self.memory, self.faulty = open_elastic(facts, kv, make and make(facts.num_pages), device)
        self.faulty.on_call = lambda: self.memory._pool.check_invariants()
        room = max(self.memory.layout.pool_pages(self.memory.holding), 0) * page // kv.block_bytes
        first = int(self.rng.integers(0, min(room, facts.max_blocks) + 1))
        cache = self.memory.open_kv(first, int(self.rng.integers(0, 2 * page)) if room == 0 else 0)
        self.contents = Contents(self.memory, cache, self.rng)
        self.contents.check()
        self.num_faults = 0

    def change(self, act: Callable[[], object]) -> object:
        """Act; every now and then with a fault first, after which nothing may have changed."""
        if self.rng.random() < 0.5:
            before = snapshot(self.memory)
            self.faulty.calls_left, self.faulty.num_faults = int(self.rng.integers(0, 12)), 1
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

    def step(self) -> str:
        names = ["drop", "release", "grow", "back", "shrink", "restore", "reside", "rebase"]
        name = names[self.rng.integers(len(names))]
        getattr(self, name)()
        self.contents.fill()
        self.contents.check()
        return name

    def drop(self) -> None:
        memory, layout = self.memory, self.memory.layout
        if len(memory.held_layers) == 1:
            return
        layers = self.some(memory.held_layers)[: len(memory.held_layers) - 1]
        in_use = memory.usable if self.rng.random() < 0.5 else self.some_blocks()
        room = layout.facts.max_blocks - memory.usable.end - layout.unit_blocks
        base = int(self.rng.integers(0, max(room // layout.unit_blocks, 0) + 1)) * layout.unit_blocks
        base = min(base, 3 * layout.unit_blocks)
        usable = memory.usable
        self.change(lambda: memory.drop(layers, in_use=in_use, base=base))
        self.contents.drop(layers, usable & in_use, base)
        assert set(usable.shifted(base)) <= set(memory.usable)
        self.check_full()

    def check_full(self) -> None:
        """Check that not one more block could be backed at the tail."""
        memory, facts = self.memory, self.contents.facts
        last = memory.layout.covering(memory.usable).end
        following = memory.usable.end if memory.usable else 0
        if following == facts.max_blocks or not memory.usable:
            return
        pages = ceil_div((following + 1) * facts.block_bytes, facts.page_bytes) - last
        assert 2 * len(memory.held_layers) * pages > memory.num_free_pages

    def release(self) -> None:
        layers, blocks = self.some(tuple(range(self.contents.facts.num_layers))), self.some_blocks()
        self.change(lambda: self.memory.release(layers, blocks))
        self.contents.release(layers, blocks)

    def grow(self) -> None:
        memory, layout = self.memory, self.memory.layout
        before = memory.num_blocks
        if self.rng.random() < 0.5:
            self.change(memory.grow)
            self.check_full()
        else:
            most = int(self.rng.integers(0, 5))
            first = ceil_div(memory.usable.end, layout.unit_blocks) * layout.unit_blocks
            if first <= layout.facts.max_blocks:
                self.change(lambda: memory.grow(first_block=first, max_blocks=most))
        assert memory.num_blocks >= before

    def back(self) -> None:
        blocks = self.some_blocks().head(int(self.rng.integers(0, 6)))
        layout, held = self.memory.layout, self.memory.holding
        missing = (layout.covering(blocks) - held.kv).total
        if 2 * len(held.layers) * missing > self.memory.num_free_pages:
            with pytest.raises(NotEnoughPagesError, match=f"the budget is {layout.facts.num_pages}$"):
                self.memory.back(blocks)
            return
        self.change(lambda: self.memory.back(blocks))
        assert set(blocks) <= set(self.memory.usable)

    def shrink(self) -> None:
        usable = self.memory.usable
        count = int(self.rng.integers(0, usable.total + 1))
        self.change(lambda: self.memory.shrink(count))
        assert set(usable.head(count)) <= set(self.memory.usable) <= set(usable)

    def restore(self) -> None:
        memory = self.memory
        missing = tuple(i for i in range(self.contents.facts.num_layers) if i not in memory.held_layers)
        if not missing:
            return
        layers, usable = self.some(missing), memory.usable
        fitting = memory.blocks_with(layers)
        with pytest.raises((NotEnoughPagesError, ValueError)):
            memory.restore(layers, fitting + 1)
        if fitting < 0:
            return
        outer = self.change(lambda: memory.restore(layers, fitting))
        assert isinstance(outer, Spans)
        self.contents.restore(layers, outer)
        assert set(usable.head(fitting)) <= set(memory.usable) <= set(usable)

    def reside(self) -> None:
        memory, usable = self.memory, self.memory.usable
        others = tuple(i for i in range(self.contents.facts.num_layers) if i not in memory.held_layers)
        beside = self.some(others) if others and self.rng.random() < 0.7 else []
        with pytest.raises(ValueError, match="cannot lie beside"):
            memory.reside([*beside, memory.held_layers[0]], 0)
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

    def rebase(self) -> None:
        memory, layout = self.memory, self.memory.layout
        by = int(self.rng.integers(-2, 3)) * layout.unit_blocks
        ids = list(memory.usable)
        if ids and (ids[0] + by < 0 or ids[-1] + by >= layout.facts.max_blocks):
            with pytest.raises(ValueError, match="ids cannot be moved"):
                memory.rebase(by)
            return
        self.change(lambda: memory.rebase(by))
        self.contents.rebase(by)
