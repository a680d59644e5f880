"""Which ranges a model has, and how pages and KV blocks convert into each other.

    outer        | what the first stage needs ... | ... what the last one needs |          parameters outside the layers
    layer i      | parameters |
    keys i       | b0 b1 | b2 b3 | b4 b. | .. |   pages from 0 on are mapped; b5 needs the next page: it is no block yet
    values i     | b0 b1 | b2 b3 | b4 b. | .. |   always the same pages as its keys

A block is usable if all pages that it touches are mapped, in the keys and the values of every layer that is held.
Arithmetic only: no memory, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import lcm
from typing import NamedTuple

from services.worker.memory.spans import Spans


class Kind(IntEnum):
    """What a range is for."""

    OUTER = 0
    """Parameters outside the layers; there is one such range."""
    PARAMETERS = 1
    """Parameters of a layer."""
    KEYS = 2
    """Keys of a layer, all blocks."""
    VALUES = 3
    """Values of a layer, all blocks."""


class Region(NamedTuple):
    """A range of addresses, by what it is for."""

    kind: Kind
    layer: int
    """0 for the outer parameters."""


OUTER = Region(Kind.OUTER, 0)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Sizes of a model and of its memory."""

    layer_bytes: tuple[int, ...]
    """By layer: its parameters."""
    outer_bytes: int
    """Parameters outside the layers."""
    first_stage_end: int
    """The stage that has the first layer needs the outer bytes [0, first_stage_end)."""
    last_stage_begin: int
    """The stage that has the last layer needs the outer bytes [last_stage_begin, outer_bytes)."""
    block_bytes: int
    """Keys of one block in one layer; its values take as much."""
    page_bytes: int
    num_pages: int
    """The budget."""
    max_blocks: int
    """Block ids are below this: addresses are reserved for so many, in every layer."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ValueError: one is not possible.
        """
        sizes = (*self.layer_bytes, self.block_bytes, self.page_bytes, self.num_pages, self.max_blocks)
        if not self.layer_bytes or min(sizes) < 1:
            raise ValueError(f"there is a size below 1 in {self}")
        if not 0 <= self.first_stage_end <= self.outer_bytes or not 0 <= self.last_stage_begin <= self.outer_bytes:
            raise ValueError(f"the outer parameters of the first and the last stage lie outside of them in {self}")

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class PageHolding:
    """What the pages of a worker are for, at one time."""

    layers: tuple[int, ...]
    """That are held: whose parameters are there, and whose KV, ascending; never none."""
    kv: Spans
    """Pages that are mapped in the keys, and in the values, of each of these layers."""
    leaving: tuple[tuple[int, Spans], ...] = ()
    """Layer and blocks, ascending: KV of layers that are not held. Not any more, and somebody still reads it; or not
    yet, and it comes ahead of them."""
    beside: tuple[int, ...] = ()
    """Other layers whose parameters are there, ascending: nobody computes them here, so they have no KV."""

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers whose parameters are there, computed here or not, ascending."""
        return tuple(sorted((*self.layers, *self.beside)))

    def left(self, layer: int) -> Spans:
        """Return the blocks of a layer that is not held which are there all the same."""
        return dict(self.leaving).get(layer, Spans())


class MemoryLayout:
    """Pages and blocks of one model in one memory.

    Args:
        facts: the sizes.
    """

    def __init__(self, facts: MemoryFacts) -> None:
        self.facts = facts
        self.unit_blocks = lcm(facts.block_bytes, facts.page_bytes) // facts.block_bytes
        """Fewest blocks that fill whole pages: KV can be moved to other ids, by mapping, by multiples of this."""
        self.max_pages = ceil_div(facts.max_blocks * facts.block_bytes, facts.page_bytes)
        """Pages that are reserved for the keys of a layer, and for its values."""
        layers = range(facts.num_layers)
        self.regions: tuple[Region, ...] = tuple(
            region
            for region in (OUTER, *(Region(kind, layer) for kind in list(Kind)[1:] for layer in layers))
            if region != OUTER or facts.outer_bytes
        )
        """All ranges there are, in a fixed order."""

    def reserved_pages(self, region: Region) -> int:
        """Return for how many pages a range has addresses."""
        if region.kind == Kind.OUTER:
            return ceil_div(self.facts.outer_bytes, self.facts.page_bytes)
        if region.kind == Kind.PARAMETERS:
            return self.layer_pages(region.layer)
        return self.max_pages

    def layer_pages(self, layer: int) -> int:
        """Return the pages of a layer's parameters."""
        return ceil_div(self.facts.layer_bytes[layer], self.facts.page_bytes)

    def outer_pages(self, layers: Sequence[int]) -> Spans:
        """Return the pages of the outer parameters that a stage with these layers needs."""
        facts = self.facts
        needed = []
        if 0 in layers:
            needed.append((0, ceil_div(facts.first_stage_end, facts.page_bytes)))
        if facts.num_layers - 1 in layers and facts.last_stage_begin < facts.outer_bytes:
            end = ceil_div(facts.outer_bytes, facts.page_bytes)
            needed.append((facts.last_stage_begin // facts.page_bytes, end))
        return Spans.of(*needed)

    def new_outer_bytes(self, before: Sequence[int], after: Sequence[int]) -> Spans:
        """Return the bytes of the outer parameters whose pages a stage needs after a change of layers, not before."""
        page, end = self.facts.page_bytes, self.facts.outer_bytes
        new = self.outer_pages(after) - self.outer_pages(before)
        return Spans.of(*((first * page, min(last * page, end)) for first, last in new.ranges))

    def covering(self, blocks: Spans) -> Spans:
        """Return the pages that some blocks touch, in the keys of a layer; in its values they are the same."""
        block, page = self.facts.block_bytes, self.facts.page_bytes
        return Spans.of(*((first * block // page, ceil_div(end * block, page)) for first, end in blocks.ranges))

    def within(self, pages: Spans) -> Spans:
        """Return the blocks that lie wholly in some pages, and below `max_blocks`."""
        block, page = self.facts.block_bytes, self.facts.page_bytes
        found = []
        for first, end in pages.ranges:
            begin, stop = ceil_div(first * page, block), min(end * page // block, self.facts.max_blocks)
            found.append((min(begin, stop), stop))
        return Spans.of(*found)

    def usable(self, holding: PageHolding) -> Spans:
        """Return the blocks whose keys and values are backed in every layer that is held."""
        return self.within(holding.kv)

    def mapped(self, holding: PageHolding) -> dict[Region, Spans]:
        """Return, in the order of `regions`, what is mapped in each range; a range of which nothing is, is left out."""
        spans = {OUTER: self.outer_pages(holding.resident)}
        for layer in holding.resident:
            spans[Region(Kind.PARAMETERS, layer)] = Spans.of((0, self.layer_pages(layer)))
        kv = {**dict.fromkeys(holding.layers, holding.kv), **{i: self.covering(left) for i, left in holding.leaving}}
        for layer, pages in kv.items():
            spans[Region(Kind.KEYS, layer)] = spans[Region(Kind.VALUES, layer)] = pages
        return {region: found for region in self.regions if (found := spans.get(region))}

    def num_pages(self, holding: PageHolding) -> int:
        """Return how many pages a holding takes."""
        return self.fixed_pages(holding) + 2 * len(holding.layers) * holding.kv.total

    def fixed_pages(self, holding: PageHolding) -> int:
        """Return how many pages a holding takes besides the KV of the layers that are held."""
        resident = holding.resident
        parameters = self.outer_pages(resident).total + sum(self.layer_pages(i) for i in resident)
        return parameters + 2 * sum(self.covering(left).total for _, left in holding.leaving)

    def pool_pages(self, holding: PageHolding) -> int:
        """Return how many pages the keys of each held layer could have, if the others stayed; below 0: none."""
        return (self.facts.num_pages - self.fixed_pages(holding)) // (2 * len(holding.layers))

    def group_bases(self, num_blocks: Iterable[int]) -> tuple[int, ...]:
        """Return where the block ids of each member begin when the ids of a group are made from theirs.

        Member m's block b becomes base[m] + b. Every base is a multiple of `unit_blocks`, so that each member can move
        its KV there by mapping whole pages, and no page holds blocks of two members.

        Args:
            num_blocks: of each member, in the group's order: its block ids are below this.

        Returns:
            One more than there are members: the last is where ids begin that are nobody's.
        """
        return tuple(self._bases(num_blocks))

    def _bases(self, num_blocks: Iterable[int]) -> Iterator[int]:
        base = 0
        yield base
        for count in num_blocks:
            base = ceil_div(base + count, self.unit_blocks) * self.unit_blocks
            yield base


def ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)
