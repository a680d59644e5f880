"""What a worker's memory offers to those who move KV: its bytes, and the bookkeeping of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.transfer.link import Buffer
from services.worker.transfer.session import Blocks, MoveSpec
from shared.layers import LayerRange


class KvPortError(Exception):
    """The memory cannot be read or written; the move ends, and says so."""


class KvPort(Protocol):
    """KV as bytes. A chunk's bytes are, for each layer, for keys and then values, the blocks in order."""

    def read(self, blocks: Blocks, layers: LayerRange) -> Sequence[Buffer] | None:
        """Return the bytes of some blocks where they are, or None if they have to be fetched from the device.

        They do not change while the blocks are pinned.
        """
        ...

    async def fetch(self, blocks: Blocks, layers: LayerRange) -> Sequence[Buffer]:
        """Copy the bytes of some blocks to memory of the host, where `read` returns None.

        Raises:
            KvPortError: they cannot be read.
        """
        ...

    def zones(self, blocks: Blocks, layers: LayerRange) -> list[memoryview]:
        """Return where the bytes of some blocks are to be received: the blocks themselves, or memory of the host."""
        ...

    async def write(self, blocks: Blocks, layers: LayerRange, zones: Sequence[memoryview]) -> None:
        """Return when what was received into these zones is the contents of the blocks.

        Raises:
            KvPortError: it cannot be written.
        """
        ...


class BlockPort(Protocol):
    """Who holds which block. Nothing waits; the move agent calls it on the event loop."""

    def pin(self, spec: MoveSpec, blocks: Blocks) -> None:
        """Source: keep blocks from being reused or written, whatever becomes of the request."""
        ...

    def unpin(self, spec: MoveSpec, blocks: Blocks) -> None:
        """Source: end the pins of this move on these blocks."""
        ...

    def free(self, spec: MoveSpec, blocks: Blocks) -> None:
        """Source: the KV of the move's layers in these blocks lies at the target now."""
        ...

    def num_reservable(self, spec: MoveSpec) -> int:
        """Target: return how many blocks could be reserved now."""
        ...

    def reserve(self, spec: MoveSpec, num_blocks: int) -> Blocks | None:
        """Target: hold blocks for this move, all of them or, if there are too few, none."""
        ...

    def commit(self, spec: MoveSpec, blocks: Blocks) -> None:
        """Target: the blocks hold the KV of the request, in sequence order."""
        ...

    def give_back(self, spec: MoveSpec, blocks: Blocks) -> None:
        """Target: hold these blocks no more."""
        ...
