"""A worker's KV memory as an array of bytes, with every rule of who may touch what checked as it is broken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.transfer.link import Buffer
from services.worker.transfer.ports import KvPortError
from services.worker.transfer.session import Blocks, MoveSpec
from shared.layers import LayerRange

Bytes = NDArray[np.uint8]


class FakeMemory:
    """Implements `KvPort` and `BlockPort`.

    Args:
        random: fills memory and draws durations.
        is_staged: bytes are copied to and from the host, which takes time; else they are used in place.
    """

    def __init__(
        self, random: np.random.Generator, *, num_layers: int = 4, num_blocks: int = 40, is_staged: bool = False
    ) -> None:
        self.random = random
        self.is_staged = is_staged
        self.data: Bytes = np.zeros((num_layers, 2, num_blocks, 24), dtype=np.uint8)
        """[num_layers, K and V, num_blocks, bytes of a block]"""
        self.free_blocks = list(range(num_blocks))
        self.owner: dict[int, str] = {}
        """Block: request that holds it."""
        self.pins: dict[int, int] = {}
        self.held: dict[int, str] = {}
        """Block: session for which it is reserved."""
        self.freed: dict[str, list[int]] = {}
        """Session: blocks that were given back at the source."""
        self.committed: dict[str, tuple[MoveSpec, Blocks]] = {}
        self.on_commit: list[str] = []
        self.fails_ratio = 0.0
        self.num_touching = 0

    # The owner's side

    def fill(self, request_id: str, count: int) -> Blocks:
        """Give a request blocks with random contents."""
        blocks = self._take(count)
        for block in blocks:
            self.owner[block] = request_id
            self.data[:, :, block] = self.random.integers(0, 256, self.data[:, :, block].shape, dtype=np.uint8)
        return blocks

    def contents(self, blocks: Blocks, layers: LayerRange) -> bytes:
        return b"".join(bytes(view) for view in self._views(blocks, layers))

    def release(self, request_id: str) -> None:
        """The request is over: its blocks are free when nothing pins them."""
        for block in [block for block, owner in self.owner.items() if owner == request_id]:
            del self.owner[block]
            self._maybe_free(block)

    def check(self) -> None:
        used = [*self.owner, *self.held, *(block for block in self.pins if block not in self.owner)]
        assert len(used) == len(set(used)), "a block has two holders"
        assert sorted([*used, *self.free_blocks]) == list(range(self.data.shape[2])), "a block is lost or doubled"

    def _take(self, count: int) -> Blocks:
        assert count <= len(self.free_blocks)
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return tuple(taken)

    def _maybe_free(self, block: int) -> None:
        if block not in self.owner and block not in self.pins and block not in self.held:
            assert block not in self.free_blocks, "freed twice"
            self.free_blocks.append(block)
            self.data[:, :, block] = 0xDD  # nobody may read or write it any more

    # KvPort

    def _views(self, blocks: Blocks, layers: LayerRange) -> list[memoryview]:
        return [self.data[layer, side, block].data for layer in layers for side in range(2) for block in blocks]

    def read(self, blocks: Blocks, layers: LayerRange) -> Sequence[Buffer] | None:
        assert all(block in self.pins for block in blocks), "read without a pin"
        return None if self.is_staged else self._views(blocks, layers)

    async def fetch(self, blocks: Blocks, layers: LayerRange) -> Sequence[Buffer]:
        await self._touch()
        assert all(block in self.pins for block in blocks), "unpinned while it was read"
        return [self.contents(blocks, layers)]

    def zones(self, blocks: Blocks, layers: LayerRange) -> list[memoryview]:
        assert all(block in self.held for block in blocks), "a zone without a reservation"
        views = self._views(blocks, layers)
        return [memoryview(bytearray(sum(map(len, views))))] if self.is_staged else views

    async def write(self, blocks: Blocks, layers: LayerRange, zones: Sequence[memoryview]) -> None:
        await self._touch()
        assert all(block in self.held for block in blocks), "given back while it was written"
        if self.is_staged:
            data = b"".join(zones)
            for view in self._views(blocks, layers):
                view[:], data = data[: len(view)], data[len(view) :]

    async def _touch(self) -> None:
        self.num_touching += 1
        try:
            await asyncio.sleep(float(self.random.exponential(0.01)))
        finally:
            self.num_touching -= 1
        if self.random.random() < self.fails_ratio:
            raise KvPortError("the device does not answer")

    # BlockPort

    def pin(self, spec: MoveSpec, blocks: Blocks) -> None:
        for block in blocks:
            assert block in self.owner, "a free block cannot be pinned"
            self.pins[block] = self.pins.get(block, 0) + 1

    def unpin(self, spec: MoveSpec, blocks: Blocks) -> None:
        for block in blocks:
            assert self.pins[block] >= 1
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]
                self._maybe_free(block)

    def free(self, spec: MoveSpec, blocks: Blocks) -> None:
        known = self.freed.setdefault(spec.session_id, [])
        assert not set(known) & set(blocks), "freed twice"
        known += blocks
        for block in blocks:
            if self.owner.get(block) == spec.request_id:
                del self.owner[block]
                self._maybe_free(block)

    def num_reservable(self, spec: MoveSpec) -> int:
        return len(self.free_blocks)

    def reserve(self, spec: MoveSpec, num_blocks: int) -> Blocks | None:
        if num_blocks > len(self.free_blocks):
            return None
        blocks = self._take(num_blocks)
        self.held.update(dict.fromkeys(blocks, spec.session_id))
        return blocks

    def commit(self, spec: MoveSpec, blocks: Blocks) -> None:
        assert spec.session_id not in self.committed, "committed twice"
        self._unhold(spec, blocks)
        self.committed[spec.session_id] = (spec, blocks)
        self.owner.update(dict.fromkeys(blocks, spec.request_id))

    def give_back(self, spec: MoveSpec, blocks: Blocks) -> None:
        self._unhold(spec, blocks)
        for block in blocks:
            self._maybe_free(block)

    def _unhold(self, spec: MoveSpec, blocks: Blocks) -> None:
        for block in blocks:
            assert self.held.pop(block) == spec.session_id, "not reserved for this move"
