"""The memory of a worker that can drop layers: one budget of pages for parameters and KV.

    outer     | 0 1 |                     | 0 1 |
    layer 0   | 2 3 |                     | 2 3 |
    layer 1   | 4 5 |        drop(1)      | . . |
    keys 0    | 6 | . . . .  ───────►     | 6 | 4 5 . .       with two blocks to a page: 2 blocks ──► 6
    values 0  | 7 | . . . .               | 7 | 8 9 . .
    keys 1    | 8 | . . . .               | . . . . .
    values 1  | 9 | . . . .               | . . . . .

Tensors lie over the ranges and never move; only which of their slots have memory behind them changes. Nothing here
copies a byte. Used by one thread at a time, while no step runs; see `holdings.py` for what each change does to blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from services.worker.memory import holdings
from services.worker.memory.change import MemoryLostError, apply, plan_change
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.layout import OUTER, Kind, MemoryFacts, MemoryLayout, PageHolding, Region, ceil_div
from services.worker.memory.page_swap import PageSwap
from services.worker.memory.pool import NOTHING, PagePool
from services.worker.memory.ranges import PageId, VirtualMemory
from services.worker.memory.spans import Spans


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a block's keys (and its values) are, in one layer."""

    block_size: int
    """Tokens."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Size of them."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def over(self, memory: torch.Tensor, max_blocks: int) -> torch.Tensor:
        """Return [max_blocks, block_size, num_kv_heads, head_dim] over the first of some bytes."""
        flat = memory[: max_blocks * self.block_bytes].view(self.dtype)
        return flat.view(max_blocks, self.block_size, self.num_kv_heads, self.head_dim)


class ElasticMemory:
    """Parameters and KV of one model in one budget.

    When it opens, all parameters have their pages and KV has none (`open_kv`).

    Args:
        facts: sizes; `num_pages` and `page_bytes` are the memory's.
        kv: of which the facts' `block_bytes` follow.
        memory: whose pages nobody else uses; closed with this.

    Raises:
        NotEnoughPagesError: the budget does not hold the parameters.
        ValueError: facts, shape and memory do not fit together.
        OSError, MemoryError: the system refuses.
    """

    def __init__(self, facts: MemoryFacts, kv: KvShape, memory: VirtualMemory) -> None:
        if (facts.page_bytes, facts.num_pages) != (memory.page_bytes, memory.num_pages):
            raise ValueError("the facts are not those of the memory")
        if facts.block_bytes != kv.block_bytes:
            raise ValueError(f"blocks of {kv.block_bytes} bytes are not of {facts.block_bytes}")
        self.device = memory.device
        self.layout = MemoryLayout(facts)
        """Arithmetic of pages and blocks."""
        self._kv = kv
        self._memory = memory
        self.holding = PageHolding((), Spans())
        """What the pages are for now."""
        self._caches: list[KVCache] = []
        self._is_sound = True
        regions = {region: self.layout.reserved_pages(region) for region in self.layout.regions}
        self._pool = PagePool(facts.num_pages, regions)
        self._page_ids = [PageId(page) for page in range(facts.num_pages)]
        """The memory's page that stands for each of the ledger's; another one after a swap."""
        self._ranges = {region: memory.reserve(count * facts.page_bytes) for region, count in regions.items()}
        self._change(holdings.whole(self.layout, 0))

    @property
    def usable(self) -> Spans:
        """Ids of the blocks whose keys and values are backed in every layer that is held."""
        return self.layout.usable(self.holding)

    @property
    def num_blocks(self) -> int:
        """How many blocks are usable."""
        return self.usable.total

    def parameters(self, layer: int | None, num_bytes: int) -> torch.Tensor:
        """Return [num_bytes] uint8 for the parameters of a layer, or (None) for those outside the layers.

        It lies at one address for good. While the layer is not resident it must not be touched; what it holds when it
        is so again is arbitrary.
        """
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        facts = self.layout.facts
        expected = facts.outer_bytes if layer is None else facts.layer_bytes[layer]
        if num_bytes != expected:
            raise ValueError(f"{num_bytes} bytes are not the {expected} of these parameters")
        region = OUTER if layer is None else Region(Kind.PARAMETERS, layer)
        return self._ranges[region].tensor()[:num_bytes]

    def open_kv(self, num_blocks: int, reserve_bytes: int) -> KVCache:
        """Return a cache over the KV ranges, with blocks [0, num_blocks) backed, and more if their pages hold more.

        Every change of this memory changes the cache: its layers are those that are held, its `num_blocks` is one more
        than the last usable id.

        Args:
            num_blocks: to be backed.
            reserve_bytes: not for pages: taken from the budget for good.

        Raises:
            NotEnoughPagesError: the budget does not hold them.
        """
        facts = self.layout.facts
        num_pages = facts.num_pages - ceil_div(reserve_bytes, facts.page_bytes)
        if num_pages < (needed := self.layout.num_pages(self.holding)):
            raise holdings.NotEnoughPagesError(needed, num_pages)
        self._pool.set_budget(num_pages)
        self.layout = MemoryLayout(replace(facts, num_pages=num_pages))
        self._change(holdings.backed(self.layout, self.holding, Spans.of((0, num_blocks))))
        keys, values = zip(*(self.kv(layer) for layer in range(facts.num_layers)), strict=True)
        cache = KVCache.over(keys, values, self.usable.end)
        self._caches.append(cache)
        return cache

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of any layer, held or not: [max_blocks, block_size, num_kv_heads, head_dim] each.

        Only blocks that are backed may be touched: `usable` ones of a layer that is held, `holding.left` ones of one
        that is not.
        """
        keys, values = (self._ranges[Region(kind, layer)].tensor() for kind in (Kind.KEYS, Kind.VALUES))
        max_blocks = self.layout.facts.max_blocks
        return self._kv.over(keys, max_blocks), self._kv.over(values, max_blocks)

    def drop(self, layers: Iterable[int]) -> None:
        """Give up parameters and KV of some layers for more blocks in the others, as one change.

        Args:
            layers: held now.

        Raises:
            ValueError: as in `holdings.dropped`; nothing was changed.
        """
        self._change(holdings.grown(self.layout, holdings.dropped(self.layout, self.holding, layers, Spans())))

    def grow(self, max_blocks: int | None = None) -> None:
        """Back more blocks at the tail with free pages; see `holdings.grown`."""
        self._change(holdings.grown(self.layout, self.holding, max_blocks))

    def shrink(self, num_blocks: int) -> None:
        """Give back the pages behind the first blocks; see `holdings.shrunk`. Their contents are lost."""
        self._change(holdings.shrunk(self.layout, self.holding, num_blocks))

    def restore(self, layers: Iterable[int], min_blocks: int) -> Spans:
        """Take some layers back: room for their parameters and KV comes from blocks at the tail.

        What is in their parameters is arbitrary until somebody loads them, unless they were resident before; their KV
        holds what was left of it, and is arbitrary elsewhere.

        Args:
            layers: not held now.
            min_blocks: that have to stay; all others with higher ids are free.

        Returns:
            Bytes of the outer parameters that have to be loaded too.

        Raises:
            ValueError, NotEnoughPagesError: as in `holdings.restored`; nothing was changed.
        """
        return self._with_outer(holdings.restored(self.layout, self.holding, layers, min_blocks))

    def reside(self, beside: Iterable[int], min_blocks: int, ahead: Spans | None = None) -> Spans:
        """Have pages for the parameters of exactly these layers beside those that are held.

        Room for what is new comes from blocks at the tail, and its contents are arbitrary; the pages of what is not
        named any more become free, and `grow` uses them. Nothing else is touched: layers that are held can be computed
        as before, with the blocks that are left.

        Args:
            beside: not held; none: only those that are held stay resident.
            min_blocks: that have to stay; all others with higher ids are free.
            ahead: blocks that the layers beside are to have memory for, see `holdings.resided`; `restore` leaves what
                they hold there.

        Returns:
            Bytes of the outer parameters that have to be loaded too.

        Raises:
            ValueError, NotEnoughPagesError: as in `holdings.resided`; nothing was changed.
        """
        return self._with_outer(holdings.resided(self.layout, self.holding, beside, min_blocks, ahead))

    def leave(self, layers: Iterable[int], in_use: Spans, by_blocks: int) -> None:
        """Give up parameters of some layers, and all KV but that in use; what is free then stays free until `fill`.

        Args:
            layers: held now. Their KV stays under its ids, until it is swapped or `fill`.
            in_use: blocks.
            by_blocks: added to the ids of blocks of the layers that stay: a multiple of `layout.unit_blocks`: their
                KV moves there by mapping.

        Raises:
            ValueError: as in `holdings.left`; nothing was changed.
        """
        after = holdings.left(self.layout, self.holding, layers, in_use, by_blocks)
        self._change(after, holdings.page_shift(self.layout, by_blocks))

    def swap(self, taken: Spans, carry_out: Callable[[PageSwap], None]) -> None:
        """Hand over all KV of layers that are not held, against KV of those that are.

        Args:
            taken: pages of keys and values of every layer that is held.
            carry_out: commits the swap that it is called with, or raises after it was undone; `MemoryLostError` if it
                cannot know which of both the other side has done.

        Raises:
            ValueError, NotEnoughPagesError: as in `holdings.handed_over`; nothing was changed.
            BaseException: what `carry_out` raised.
        """
        self._check_sound()
        after = holdings.handed_over(self.layout, self.holding, taken)
        prepared = self._pool.prepare(plan_change(self.layout, self.holding, after).moves)

        def commit(page_ids: list[PageId]) -> None:
            self._pool.commit(prepared)
            self._page_ids = page_ids
            self._take(after)

        try:
            carry_out(PageSwap(self._memory, self._ranges, self._page_ids, prepared, commit))
        except MemoryLostError:
            self._is_sound = False
            raise

    def fill(self) -> None:
        """Have as many blocks as there is memory for, from the first on; those that are there keep what they hold.

        Raises:
            ValueError: as in `holdings.filled`; nothing was changed.
        """
        self._change(holdings.filled(self.layout, self.holding))

    def close(self) -> None:
        """Give back everything; tensors must not be touched any more. Idempotent."""
        self._memory.close()

    def check_invariants(self) -> None:
        """Check that holding, ledger and mappings say the same, and that every page is at exactly one place."""
        self._pool.check_invariants()
        mapped, page_bytes = self.layout.mapped(self.holding), self.layout.facts.page_bytes
        assert self._pool.budget == self.layout.facts.num_pages, "ledger and layout have different budgets"
        for region, reserved in self._ranges.items():
            assert self._pool.places(region) == mapped.get(region, Spans()), f"{region} holds what nobody wants"
            for place, page in enumerate(self._pool.pages(region).tolist()):
                found = reserved.page_at(place * page_bytes)
                expected = None if page == NOTHING else self._page_ids[page]
                assert found == expected, f"{region}: {found} is mapped at {place}, not {expected}"
        known = self._page_ids[: self._pool.budget]
        assert len(set(known)) == len(known), "a page stands for two of the ledger's"
        for cache in self._caches:
            assert cache.num_blocks == self.usable.end, "a cache has another size than the memory"
            assert cache.layers == self.holding.layers, "a cache has other layers than the memory"

    def _with_outer(self, after: PageHolding) -> Spans:
        """Change to a holding, and return the bytes of the outer parameters that have new pages."""
        before = self.holding
        self._change(after)
        return self.layout.new_outer_bytes(before.resident, after.resident)

    def _change(self, after: PageHolding, shift: int = 0) -> None:
        self._check_sound()
        change = plan_change(self.layout, self.holding, after, shift)
        try:
            apply(change, self._pool, self._ranges, self.layout.facts.page_bytes, self._page_ids)
        except MemoryLostError:
            self._is_sound = False
            raise
        self._take(after)

    def _check_sound(self) -> None:
        assert self._is_sound, "an earlier change of memory could not be undone; the worker must start anew"

    def _take(self, after: PageHolding) -> None:
        """Hold what is mapped now."""
        self.holding = after
        for cache in self._caches:
            cache.resize(self.usable.end, self.holding.layers)
