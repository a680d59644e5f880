"""KV memory without end: what a cluster could do if memory never made anybody wait.

The engine is the live one. Before it takes a sequence it makes more blocks usable if those of the device would not
suffice for all that are there, each at its full length; so nobody waits for a block and nobody is preempted. What it
reports as its memory stays what the device has, and what is held beyond that as demanded: so ratios of used and of
demanded memory are against the real capacity. Requests that are too long for the real memory are refused as
everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.worker.cost.estimate import CostEstimate
from services.worker.engine.engine import Engine
from services.worker.scheduling.view import Scheduler
from services.worker.sequences.config import EngineConfig, NewSequence
from services.worker.sequences.table import Status

_HEADROOM_BLOCKS = 2
"""Per sequence, beyond its full length: the schedulers keep one free for each that runs and for each that comes in."""


class UnlimitedEngine(Engine):
    """An engine whose memory grows with what is asked for.

    Args:
        config: limits.
        scheduler: chooses every step.
        num_blocks: that the device has.
        cost: of a step.
        on_grow: called with the number of blocks that there have to be from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        num_blocks: int,
        cost: CostEstimate,
        *,
        on_grow: Callable[[int], None],
    ) -> None:
        super().__init__(config, scheduler, num_blocks, cost=cost)
        self._device_blocks = num_blocks
        self._on_grow = on_grow
        self.registry.before_add = self._make_room

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the device has, however many are in use."""
        return self._device_blocks

    def _make_room(self, new: NewSequence) -> None:
        """Grow until every sequence here, and a new one, fits with all its tokens at once."""
        num_tokens = int(new.prompt.size) + new.sampling.max_tokens
        table, block_size = self.table, self.config.block_size
        live = table.status != Status.FREE
        tokens = np.append((table.num_prompt + table.max_output)[live], min(num_tokens, self.config.max_model_len))
        wanted = int((-(-tokens // block_size)).sum()) + _HEADROOM_BLOCKS * tokens.size
        if wanted > self.blocks.num_usable:
            num_blocks = max(wanted, self.blocks.num_usable * 5 // 4)
            self._on_grow(num_blocks)
            self.memory.grow(self.blocks.num_usable, num_blocks)
