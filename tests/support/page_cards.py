"""Memories of one device whose layers are shared out as in a group that forms, with what is in their blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from services.worker.contract.arrays import I32
from services.worker.contract.kept_kv import KeptKv
from services.worker.kv_moves.kv_table import KvOffer, KvTable
from services.worker.memory import holdings
from services.worker.memory.elastic import ElasticMemory, KvShape
from services.worker.memory.layout import MemoryFacts
from services.worker.memory.page_swap import PageSwap
from services.worker.memory.ranges import PageId, VirtualMemory
from services.worker.memory.spans import Spans
from services.worker.pages.flows import PageFlow, blocks_of, page_flows, shift_of, table_by_pages
from shared.layers import LayerRange
from tests.support.elastic_cases import Faults, open_elastic, random_facts

Bits = dict[tuple[int, bytes], bytes]
"""By layer and name of a block: its keys and values."""


class Card:
    """Workers of one device, all whole at first, who keep some blocks each.

    Args:
        seed: of sizes and contents.
        page: bytes of a page.
        make: opens a backend for a memory of this number and so many pages; None: main memory.
    """

    def __init__(self, seed: int, page: int = 4096, make: Callable[[int, int], VirtualMemory] | None = None) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.facts, self.kv = facts_with_room(rng, page)
        num_layers = self.facts.num_layers
        self.num = int(rng.integers(2, min(num_layers, 4) + 1))
        ends = sorted(int(at) for at in rng.choice(np.arange(1, num_layers), self.num - 1, replace=False))
        self.ranges = [LayerRange(first, end) for first, end in zip([0, *ends], [*ends, num_layers], strict=True)]
        self.memories: list[ElasticMemory] = []
        self.faulty: list[Faults] = []
        for number in range(self.num):
            backend = None if make is None else make(number, self.facts.num_pages)
            memory, faulty = open_elastic(self.facts, self.kv, backend)
            most = max(memory.layout.pool_pages(memory.holding), 0) * page // self.kv.block_bytes
            memory.open_kv(int(rng.integers(0, min(most, self.facts.max_blocks) + 1)), 0)
            self.memories.append(memory)
            self.faulty.append(faulty)
        self.kept = [self._some(memory) for memory in self.memories]
        self.bits: Bits = {}
        self.usable = [memory.usable for memory in self.memories]
        self.write()

    def write(self) -> None:
        """Write anew into all blocks of all layers."""
        self.bits = {}
        for memory, kept in zip(self.memories, self.kept, strict=True):
            for layer in memory.holding.layers:
                for pool in memory.kv(layer):
                    self._scribble(pool, memory.usable)
            self.bits = bits_of(memory, memory.holding.layers, kept.names, kept.ids) | self.bits

    def _some(self, memory: ElasticMemory) -> KeptKv:
        """Return some blocks, under names of which others may have the same."""
        usable = np.array(list(memory.usable), dtype=np.int32)
        count = int(self.rng.integers(0, min(len(usable), 20) + 1))
        names = self.rng.choice(40, count, replace=False)
        return KeptKv(
            tuple(int(n).to_bytes(16, "little") for n in names), self.rng.choice(usable, count, replace=False)
        )

    def _scribble(self, pool: torch.Tensor, blocks: Spans) -> None:
        for first, end in blocks.ranges:
            part = pool[first:end].view(torch.uint8)
            part.copy_(torch.from_numpy(self.rng.integers(0, 256, part.shape, dtype=np.uint8)))

    def offers(self) -> list[KvOffer]:
        """Return what each worker brings."""
        whole = LayerRange(0, self.facts.num_layers)
        room = [holdings.room(memory.layout, own) for memory, own in zip(self.memories, self.ranges, strict=True)]
        pairs = zip(room, self.kept, strict=True)
        return [KvOffer(whole, 0, num_blocks, kept=kept, card="card") for num_blocks, kept in pairs]

    def table(self) -> KvTable | None:
        """Return what moves by pages, if it can."""
        return table_by_pages(self.offers(), self.memories[0].layout)

    def leave(self, table: KvTable) -> tuple[tuple[PageFlow, ...], list[Spans]]:
        """Let everybody drop the layers of others; return what flows, and what comes to each."""
        flows = page_flows(table, self.ranges, self.memories[0].layout)
        for stage, (memory, own) in enumerate(zip(self.memories, self.ranges, strict=True)):
            lot = next((lot for lot in table.lots if stage in lot.sources), None)
            in_use, by_blocks = (Spans(), 0) if lot is None else (blocks_of(lot.ids), shift_of(lot))
            memory.leave([layer for layer in memory.holding.layers if layer not in own], in_use, by_blocks)
        taken = [Spans() for _ in self.memories]
        for flow in flows:
            for run in flow.runs:
                taken[flow.target] |= run.pages.shifted(run.shift)
        return flows, taken

    def swap(self, flows: Sequence[PageFlow], taken: Sequence[Spans], then: Callable[[list[PageSwap]], None]) -> None:
        """Let all pages go and come, and call `then` with all swaps; whatever it raises, all are undone."""
        swaps: list[PageSwap] = []

        def enter(stage: int) -> None:
            if stage == self.num:
                try:
                    carry(flows, swaps)
                    then(swaps)
                except BaseException:
                    for swap in swaps:
                        swap.undo()
                    raise
                return

            def note(swap: PageSwap) -> None:
                swaps.append(swap)
                enter(stage + 1)

            self.memories[stage].swap(taken[stage], note)

        enter(0)

    def be_whole_again(self) -> None:
        """Let everybody have all layers, and other contents in the blocks of the beginning."""
        for memory, usable in zip(self.memories, self.usable, strict=True):
            memory.fill()
            memory.restore([i for i in range(self.facts.num_layers) if i not in memory.holding.layers], 0)
            memory.shrink(0)
            memory.grow(usable.total)
        self.write()

    def check_contents(self, table: KvTable, first: int = 0) -> None:
        """Check that every worker from one on has its layers of all blocks of a table, to the bit."""
        for stage in range(first, self.num):
            memory, own = self.memories[stage], self.ranges[stage]
            kept = table.kept_at(stage)
            found = bits_of(memory, own, kept.names, kept.ids)
            assert found == {(layer, name): self.bits[layer, name] for layer in own for name in kept.names}
            assert set(kept.ids.tolist()) <= set(memory.usable)

    def close(self) -> None:
        """Give back all memory."""
        for memory in self.memories:
            memory.close()


def card_by_pages(
    num: int, seed: int = 0, page: int = 4096, make: Callable[[int, int], VirtualMemory] | None = None
) -> tuple[Card, KvTable]:
    """Return a card of so many workers whose KV goes by pages, of two of them at least; `page`, `make` as in `Card`."""
    for number in range(1000 * seed, 1000 * seed + 1000):
        card = Card(number, page, make)
        table = card.table()
        if table is not None and card.num == num and len(table.lots) > 1:
            return card, table
        card.close()
    raise AssertionError("there is none")


def facts_with_room(rng: np.random.Generator, page: int) -> tuple[MemoryFacts, KvShape]:
    """Return sizes of a model and addresses for the blocks of a group."""
    facts, kv = random_facts(rng, page)
    most = 4 * facts.num_pages * page // kv.block_bytes + 1
    return (replace(facts, max_blocks=most), kv) if rng.random() < 0.9 else (facts, kv)


def bits_of(memory: ElasticMemory, layers: Iterable[int], names: Sequence[bytes], ids: I32) -> Bits:
    """Return what blocks hold in some layers."""
    found: Bits = {}
    for layer in layers:
        pools = memory.kv(layer)
        for name, block in zip(names, ids.tolist(), strict=True):
            found[layer, name] = b"".join(pool[block].view(torch.uint8).cpu().numpy().tobytes() for pool in pools)
    return found


def carry(flows: Sequence[PageFlow], swaps: Sequence[PageSwap]) -> None:
    """Let every page go from the one to the other."""
    for flow in flows:
        for before, then in zip(flow.at_source, flow.at_target, strict=True):
            handle = swaps[flow.source].export(before)
            try:
                swaps[flow.target].adopt(then, handle)
            finally:
                os.close(handle.descriptor)


def apply_and_commit(swaps: Sequence[PageSwap]) -> None:
    """Map all, then keep all."""
    for swap in swaps:
        swap.apply()
    for swap in swaps:
        swap.commit()


def backing(memory: VirtualMemory, page: PageId) -> tuple[int, int]:
    """Return a page by what it is for the whole machine: its file and where it begins there."""
    handle = memory.export(page)
    try:
        return os.fstat(handle.descriptor).st_ino, handle.offset
    finally:
        os.close(handle.descriptor)


def pages_of_all(memories: Sequence[ElasticMemory]) -> set[tuple[int, int]]:
    """Return the pages that memories have; none has one of another's."""
    found = [
        backing(memory._memory, page)
        for memory in memories
        for page in memory._page_ids[: memory.layout.facts.num_pages]
    ]
    assert len(set(found)) == len(found), "a page is used by two"
    return set(found)
