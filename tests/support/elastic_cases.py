"""Small elastic memories of odd sizes, what is in them, and faults in the middle of their changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.layout import MemoryFacts, Region, ceil_div
from services.worker.memory.posix import PosixMemory
from services.worker.memory.ranges import PageId, VirtualMemory
from services.worker.memory.spans import Spans

CPU = torch.device("cpu")
SHAPES = (
    KvShape(16, 2, 16, torch.float32),  # 2048 bytes: two to a page of 4 KiB
    KvShape(16, 3, 40, torch.float32),  # 7680: less than two pages
    KvShape(1, 3, 5, torch.float32),  # 60: 68 and a bit
    KvShape(8, 1, 512, torch.float32),  # 16384: four pages
    KvShape(4, 3, 128, torch.bfloat16),  # 3072: four blocks in three pages
    KvShape(16, 2, 32, torch.float32),  # 4096: one page
)


class MadeUpError(Exception):
    """What `Faults` raise."""


class Faults:
    """Lets a memory's calls of the system fail when it is told to.

    Attributes:
        calls_left: calls of put and take_away that go well before one fails, which then counts as made up; None:
            all go well.
        num_faults: how many fail from then on.
        on_call: called before each of them.
    """

    def __init__(self, memory: VirtualMemory) -> None:
        self.calls_left: int | None = None
        self.num_faults = 1
        self.on_call: Callable[[], None] = lambda: None
        for name in ("put", "take_away"):
            setattr(memory, name, self._counted(getattr(memory, name)))

    def fail_after(self, num_calls: int, num_faults: int = 1) -> None:
        """Let one call, or more, fail after so many that go well."""
        self.calls_left, self.num_faults = num_calls, num_faults

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(address: int, pages: Sequence[PageId]) -> None:
            self._count()
            call(address, pages)

        return counted

    def _count(self) -> None:
        self.on_call()
        if self.calls_left is None:
            return
        if self.calls_left > 0:
            self.calls_left -= 1
            return
        self.num_faults -= 1
        if self.num_faults <= 0:
            self.calls_left = None
        raise MadeUpError


def random_facts(rng: np.random.Generator, page_bytes: int) -> tuple[MemoryFacts, KvShape]:
    """Return sizes with every kind of odd remainder; blocks are the larger the larger pages are."""
    kv = SHAPES[rng.integers(len(SHAPES))]
    kv = replace(kv, block_size=kv.block_size * page_bytes // 4096)
    num_layers = int(rng.integers(2, 6))
    layer_bytes = tuple(int(size) for size in rng.integers(1, 4 * page_bytes, num_layers))
    outer_bytes = int(rng.integers(1, 6 * page_bytes))
    cut, other = sorted(int(at) for at in rng.integers(0, outer_bytes + 1, 2))
    end, begin = (other, cut) if rng.random() < 0.5 else (cut, cut)  # tied or not
    parameters = ceil_div(outer_bytes, page_bytes) + sum(ceil_div(size, page_bytes) for size in layer_bytes)
    num_pages = parameters + int(rng.integers(2 * num_layers, 30 * num_layers))
    max_blocks = max(2 * num_pages * page_bytes // kv.block_bytes // int(rng.integers(1, 5)), 1)
    facts = MemoryFacts(layer_bytes, outer_bytes, end, begin, kv.block_bytes, page_bytes, num_pages, max_blocks)
    return facts, kv


def open_elastic(facts: MemoryFacts, kv: KvShape, backend: VirtualMemory | None = None) -> tuple[ElasticMemory, Faults]:
    """Return a memory over main memory, or another, and what makes it fail."""
    backend = backend or PosixMemory(facts.page_bytes, facts.num_pages)
    faults = Faults(backend)
    return ElasticMemory(facts, kv, backend), faults


class Contents:
    """What is written in a memory and must stay: parameters of resident layers, KV of usable and leaving blocks.

    Knows nothing of pages, except where it measures which blocks are really backed.
    """

    def __init__(self, memory: ElasticMemory, cache: KVCache, rng: np.random.Generator) -> None:
        self.memory, self.cache, self._rng = memory, cache, rng
        self.facts = memory.layout.facts
        self.parameters: dict[int, torch.Tensor] = {}
        self.outer: torch.Tensor = self._random((self.facts.outer_bytes,), torch.uint8)
        self.kv: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        """By layer and block: keys and values."""
        self.leaving: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        pools = [memory.kv(layer) for layer in range(self.facts.num_layers)]
        self._keys, self._values = ([pair[which] for pair in pools] for which in (0, 1))
        self.addresses = self._addresses()
        memory.parameters(None, self.facts.outer_bytes).copy_(self.outer)
        self.load(memory.holding.layers)
        self.fill()

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        seed = int(self._rng.integers(2**31))
        generator = torch.Generator().manual_seed(seed)
        if dtype == torch.uint8:
            return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
        return torch.randn(shape, generator=generator).to(dtype)

    def _addresses(self) -> list[int]:
        pools = (*self._keys, *self._values)
        layers = range(self.facts.num_layers)
        parts = [self.memory.parameters(layer, self.facts.layer_bytes[layer]) for layer in layers]
        return [tensor.data_ptr() for tensor in (*pools, *parts)]

    def load(self, layers: Sequence[int]) -> None:
        """Give some layers new parameters."""
        for layer in layers:
            size = self.facts.layer_bytes[layer]
            self.parameters[layer] = self._random((size,), torch.uint8)
            self.memory.parameters(layer, size).copy_(self.parameters[layer])

    def load_outer(self, part: Spans) -> None:
        for first, end in part.ranges:
            self.memory.parameters(None, self.facts.outer_bytes)[first:end] = self.outer[first:end]

    def fill(self) -> None:
        """Write every usable block that holds nothing yet, and forget the blocks that are not usable any more."""
        usable = list(self.memory.usable)
        for layer in self.memory.holding.layers:
            known = self.kv.setdefault(layer, {})
            self.kv[layer] = {block: known[block] for block in usable if block in known}
            for block in usable:
                if block not in known:
                    pair = tuple(self._random(tuple(pool.shape[1:]), pool.dtype) for pool in (self._keys[layer],) * 2)
                    self._keys[layer][block], self._values[layer][block] = pair
                    self.kv[layer][block] = (pair[0], pair[1])

    def leave(self, layers: Sequence[int], in_use: Spans, by: int) -> None:
        """Layers go, and all KV but that in use; that of the others has other ids then."""
        for layer in layers:
            del self.parameters[layer]
            self.leaving[layer] = {block: pair for block, pair in self.kv.pop(layer).items() if block in in_use}
        for layer, blocks in self.kv.items():
            self.kv[layer] = {block + by: pair for block, pair in blocks.items() if block in in_use}

    def drop(self, layers: Sequence[int]) -> None:
        """Layers go with all of their KV."""
        for layer in layers:
            del self.parameters[layer], self.kv[layer]

    def restore(self, layers: Sequence[int], outer: Spans) -> None:
        for layer in layers:
            self.kv[layer] = self.leaving.pop(layer, {})
        self.load([layer for layer in layers if layer not in self.parameters])
        self.load_outer(outer)

    def reside(self, beside: Sequence[int], outer: Spans) -> None:
        resident = {*self.memory.holding.layers, *beside}
        self.load([layer for layer in beside if layer not in self.parameters])
        self.parameters = {layer: given for layer, given in self.parameters.items() if layer in resident}
        self.load_outer(outer)

    def check(self) -> None:
        """Check that everything that should be there is, where it was."""
        memory, facts = self.memory, self.facts
        memory.check_invariants()
        assert sorted(self.parameters) == list(memory.holding.resident)
        for layer, expected in self.parameters.items():
            assert torch.equal(memory.parameters(layer, facts.layer_bytes[layer]).cpu(), expected)
        outer, resident = memory.parameters(None, facts.outer_bytes), memory.holding.resident
        last = facts.num_layers - 1
        ends = ((0, 0, facts.first_stage_end), (last, facts.last_stage_begin, facts.outer_bytes))
        for first, end in [(first, end) for layer, first, end in ends if layer in resident]:
            assert torch.equal(outer[first:end].cpu(), self.outer[first:end])
        for blocks_of in (self.kv, self.leaving):
            for layer, blocks in blocks_of.items():
                if blocks:
                    ids = torch.tensor(list(blocks), device=memory.device)
                    for pool, which in ((self._keys[layer], 0), (self._values[layer], 1)):
                        expected = torch.stack([pair[which] for pair in blocks.values()])
                        assert torch.equal(pool.index_select(0, ids).cpu(), expected)
        assert self._addresses() == self.addresses
        assert list(memory.usable) == self.measured()

    def measured(self) -> list[int]:
        """Return the blocks of which every byte is backed, by looking at the ranges themselves."""
        facts, page, held = self.facts, self.facts.page_bytes, self.memory.holding.layers
        sides = [
            reserved for region, reserved in self.memory._ranges.items() if region.kind >= 2 and region.layer in held
        ]
        backed = [
            all(side.page_at(at * page) is not None for side in sides)
            for at in range(ceil_div(facts.max_blocks * facts.block_bytes, page))
        ]
        return [
            block
            for block in range(facts.max_blocks)
            if all(backed[block * facts.block_bytes // page : ceil_div((block + 1) * facts.block_bytes, page)])
        ]


def snapshot(memory: ElasticMemory) -> tuple[Any, ...]:
    """Return what a failed change must leave as it was."""
    pages: dict[Region, list[int]] = {region: memory._pool.pages(region).tolist() for region in memory._ranges}
    mapped = {
        region: [reserved.page_at(at * memory.layout.facts.page_bytes) for at in range(len(pages[region]))]
        for region, reserved in memory._ranges.items()
    }
    return memory.holding, memory._pool.num_free, pages, mapped
