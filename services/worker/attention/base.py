"""What the runner asks of attention: plan once per step, then one call per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from services.worker.contract.arrays import I32


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of one step, on the host. Row i's tokens are `num_tokens[i]` consecutive ones of the batch, in order.

    Token j of row i stands at position start[i] + j and sees positions 0 to start[i] + j, or the last of them where the
    layer has a window. Keys and values of all of them, the step's own included, are in the cache before attention runs.
    """

    num_tokens: I32
    """[n] >= 1"""
    start: I32
    """[n] position of the first token"""
    tables: I32
    """[n, max_blocks] block tables; entries past the end of a row are not read. Below 0: ~id, a block that is filled
    from the right (`contract/table_entries.py`); the order of keys is that of their positions all the same"""

    @property
    def num_keys(self) -> I32:
        """[n] positions that the row's last token sees."""
        return np.asarray(self.start + self.num_tokens, dtype=np.int32)

    @property
    def first_token(self) -> I32:
        """[n] index in the batch of the row's first token."""
        ends = np.cumsum(self.num_tokens, dtype=np.int32)
        return np.asarray(ends - self.num_tokens, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Rows of a step, and of each row the positions that are to be folded in; of its table no other entry is read.

    Keys behind a query's own position, or before its window, are not folded, whatever the range says.
    """

    rows: RaggedRows
    first: I32
    """[n] multiples of SPLIT_KEYS."""
    end: I32
    """[n] multiples of SPLIT_KEYS; at most `first`: nothing is folded."""


PlanT = TypeVar("PlanT")


class Fold(Protocol):
    """Attention over a part of the context, prepared for all layers of a step; see `remote.py`."""

    def __call__(self, layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
        """Fold the keys and values of the ranges into the states, in place.

        Args:
            layer: numbered in the cache and in the model, whose spec says its window.
            queries: [t, num_heads, head_dim] of the ranges' rows, rotated, not scaled.
            states: [t, num_heads, head_dim + STATE_EXTRA] float32, contiguous, on the queries' device.
        """


class Attention(Protocol[PlanT]):
    """Causal attention of ragged rows over a paged cache, in each layer within its window."""

    def plan(self, rows: RaggedRows) -> PlanT:
        """Prepare what all layers of a step share."""

    def attend(self, plan: PlanT, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention's output [t, num_heads * head_dim] in the queries' dtype.

        Args:
            plan: of this step.
            layer: numbered in the cache and in the model, whose spec says its window.
            queries: [t, num_heads, head_dim], rotated, not scaled.
        """

    def plan_fold(self, ranges: KeyRanges) -> Fold:
        """Prepare what all layers of a step share that fold a part of the context into states."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTables:
    """Block tables where torch computes."""

    entries: torch.Tensor
    """[n, max_blocks] int64"""
    any_from_right: bool
    """Some entry is below 0; it may be one that nobody reads."""

    @classmethod
    def of(cls, tables: I32, device: torch.device) -> DeviceTables:
        """Return tables [n, max_blocks] on a device."""
        entries = torch.from_numpy(tables.astype(np.int64)).to(device)
        return cls(entries, any_from_right=bool(tables.min(initial=0) < 0))

    def slots_at(self, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        """Return the cache slots of positions.

        Args:
            rows: [m, 1] int64, those of the tables that are meant
            positions: [m, k] int64, each inside its row's table
            block_size: token slots of a block

        Returns:
            [m, k] int64, block * block_size + offset
        """
        entries = self.entries[rows, positions.div(block_size, rounding_mode="floor")]
        return self._slots(entries.mul_(block_size).add_(positions.remainder(block_size)))

    def first_slots(self, num_keys: int, offsets: torch.Tensor) -> torch.Tensor:
        """Return [n, num_keys] int64, the cache slots of every row's first positions.

        Args:
            num_keys: at most as many as the blocks have slots
            offsets: [block_size] int64, from 0 on
        """
        slots = (self.entries * len(offsets)).unsqueeze(-1) + offsets
        return self._slots(slots.flatten(1)[:, :num_keys])

    def _slots(self, counted: torch.Tensor) -> torch.Tensor:
        """Return the slots, in place: counted from an entry below 0, ~slot was found (`table_entries.slots_of`)."""
        return counted.bitwise_xor_(counted >> 63) if self.any_from_right else counted
