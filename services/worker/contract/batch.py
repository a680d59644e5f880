"""One step's work and what it produced: plain arrays, so that a thread, a pipe or a link can carry them.

An executor keeps state per *row* (a row of the engine's sequence table): the row's block table, its sampling
parameters, and how often each token occurs in it if its sampling asks for that. It learns of rows by `Batch.admits`, of
their blocks by `Batch.table_delta`, and forgets them by `Batch.drops`. Effects happen in submit order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from services.worker.contract.arrays import EMPTY_I32, I32, Bool
from shared.hot import hot_dataclass
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams

OWN_SAMPLE: Final = -1
"""Stands for the token that the row's batch before samples, which is not back."""


@dataclass(frozen=True, slots=True)
class RowInit:
    """A row that is new to the executor. Until it is dropped, batches may name it."""

    row: int
    sampling: SamplingParams
    num_prompt: int = 0
    """Prompt tokens; outputs begin at this position."""
    tokens: I32 = field(default_factory=lambda: EMPTY_I32)
    """All tokens known so far, prompt and outputs, if `sampling.follows_tokens`; else empty."""


@hot_dataclass(frozen=True, slots=True)
class TableDelta:
    """Entries of block tables that changed since the last batch: table[row[i], index[i]] = block_id[i].

    Two rows may have one block in their tables and write it from both ends (`table_entries.py`). Nothing here notices
    when they meet: whoever fills the tables copies one of them elsewhere before.
    """

    row: I32
    """[m]"""
    index: I32
    """[m], position in the row's block table: it holds tokens [index * block_size, (index + 1) * block_size)."""
    block_id: I32
    """[m] entries: an id, or ~id (below 0) for a block that the row fills from the right."""


@dataclass(frozen=True, slots=True)
class CopyOps:
    """Blocks to copy on the device, all layers, K and V, before the step runs (copy-on-write, compaction)."""

    source: I32
    """[c] block ids, never entries: a copy has all slots, from whichever end they were filled"""
    target: I32
    """[c] block ids; disjoint from `source`"""


NO_TABLE_DELTA = TableDelta(EMPTY_I32, EMPTY_I32, EMPTY_I32)
NO_COPIES = CopyOps(EMPTY_I32, EMPTY_I32)


@hot_dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. Row i of the batch computes `num_tokens[i]` tokens from position `start[i]` on.

    Decodes (one token) come first, prefill chunks after them; within both the scheduler's order. A row is at most once
    in a batch; chunks of its prompt may be in several batches in flight, one behind the other.
    """

    step_id: int
    """Grows by one with each batch of this engine."""
    rows: I32
    """[n] rows of the table."""
    num_tokens: I32
    """[n] >= 1; 1 for a decode, else a prefill chunk."""
    start: I32
    """[n] position of the first token; KV of positions [0, start) exists."""
    tokens: I32
    """[sum(num_tokens)] input ids, row after row; `OWN_SAMPLE` in a decode that goes ahead of the batch before it."""
    sample: Bool
    """[n] False for a chunk that does not end the row's known tokens: nothing is sampled from it."""
    table_delta: TableDelta = NO_TABLE_DELTA
    copies: CopyOps = NO_COPIES
    admits: tuple[RowInit, ...] = ()
    drops: I32 = field(default_factory=lambda: EMPTY_I32)
    """[k] rows to forget, before `admits` are taken in (a row may be dropped and admitted in one batch)."""


@hot_dataclass(frozen=True, slots=True)
class BatchOutput:
    """What one step produced."""

    step_id: int
    tokens: I32
    """[n] sampled ids, -1 where nothing was sampled."""
    duration_s: float
    """By the executor's own clock, never the event loop's (uvloop caches it, in whole milliseconds)."""
    logprobs: dict[int, TokenLogprob] | None = None
    """By position in the batch, for sampled rows that ask for them; None in almost every step."""
