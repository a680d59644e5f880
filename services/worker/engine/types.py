"""What the engine and an executor say to each other: plain arrays, so that a thread, a pipe or a link can carry them.

An executor keeps state per *row* (a row of the engine's sequence table): the row's block table, its sampling
parameters, and how often each token occurs in it if its sampling asks for that. It learns of rows by `Batch.admits`, of
their blocks by `Batch.table_delta`, and forgets them by `Batch.drops`. Effects happen in submit order.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.hot import hot_dataclass
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]

SPLIT_KEYS: Final = 256
"""Positions of a split of the context, counted from 0: what one side attends by itself (`attention/remote.py`)."""
OWN_SAMPLE: Final = -1
"""Stands for the token that the row's batch before samples, which is not back."""
EMPTY_I32: I32 = np.zeros(0, dtype=np.int32)
EMPTY_I32.flags.writeable = False


@dataclass(frozen=True, slots=True)
class RowInit:
    """A row that is new to the executor. Until it is dropped, batches may name it."""

    row: int
    sampling: SamplingParams
    num_prompt: int = 0
    """Prompt tokens; outputs begin at this position."""
    tokens: I32 = field(default_factory=lambda: EMPTY_I32)
    """All tokens known so far, prompt and outputs, if `sampling.counts_tokens`; else empty."""


@hot_dataclass(frozen=True, slots=True)
class TableDelta:
    """Entries of block tables that changed since the last batch: table[row[i], index[i]] = block_id[i]."""

    row: I32
    """[m]"""
    index: I32
    """[m], position in the row's block table: it holds tokens [index * block_size, (index + 1) * block_size)."""
    block_id: I32
    """[m]"""


@dataclass(frozen=True, slots=True)
class CopyOps:
    """Blocks to copy on the device, all layers, K and V, before the step runs (copy-on-write, compaction)."""

    source: I32
    """[c] block ids"""
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


@hot_dataclass(frozen=True, slots=True)
class Flight:
    """A batch that the executor has not answered."""

    batch: Batch
    rows: NDArray[np.intp]
    """[n] as `batch.rows`."""
    end: I32
    """[n] tokens of each row whose KV exists once the batch is done."""


class BatchFailedError(Exception):
    """A step did not finish. KV of the positions that it was to compute is garbage; everything else is as before."""

    def __init__(self, step_id: int, cause: str, rows: tuple[int, ...] = (), *, is_lost: bool = False) -> None:
        super().__init__(f"step {step_id} failed: {cause}")
        self.step_id = step_id
        self.cause = cause
        self.rows = rows
        """Rows known to be guilty; empty if the executor cannot tell."""
        self.is_lost = is_lost
        """The executor is gone, so no row is to blame and no other step will succeed."""


class RemoteLostError(Exception):
    """Keys that lie elsewhere cannot be attended any more: whoever has them is gone, or has failed."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Blocks to copy between device and host memory, all layers, K and V, beside the steps.

    The engine keeps the blocks on both sides as they are until the copy is done.
    """

    copy_id: int
    """Grows by one with each copy of this engine."""
    device: I32
    """[c] ids of device blocks"""
    host: I32
    """[c] ids of host blocks"""
    to_host: bool
    """From the device to the host, or back."""


@dataclass(frozen=True, slots=True)
class KeptKv:
    """Blocks whose KV sequences can go on with at another executor: full ones, by what they hold."""

    names: tuple[bytes, ...] = ()
    """[n] of `blocks/prefix.py`, each once."""
    ids: I32 = field(default_factory=lambda: EMPTY_I32)
    """[n] block ids."""
    tails: I32 = field(default_factory=lambda: EMPTY_I32)
    """[m] places, ascending, of those in the last split of their sequence, if it is not whole: the sequence needs them
    before it can go on while the others are attended where they lie."""
    ends: I32 = field(default_factory=lambda: EMPTY_I32)
    """[q] places, ascending, of the last block of each sequence."""

    def __len__(self) -> int:
        return len(self.names)

    def only(self, places: Sequence[int]) -> KeptKv:
        """Return the blocks at some places, in the order given; tails and ends are those that are among them."""
        at = np.array(places, dtype=np.int64)
        tails, ends = (np.flatnonzero(np.isin(at, marked)).astype(np.int32) for marked in (self.tails, self.ends))
        return KeptKv(tuple(self.names[place] for place in places), self.ids[at], tails, ends)


NOTHING_KEPT = KeptKv()


class CopyFailedError(Exception):
    """A copy did not finish: the blocks that it was to fill hold garbage; those it read are as they were."""

    def __init__(self, copy_id: int, cause: str) -> None:
        super().__init__(f"copy {copy_id} failed: {cause}")
        self.copy_id = copy_id
        self.cause = cause


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of an executor for KV that left the device."""

    num_blocks: int
    """Ids are 0 to num_blocks - 1."""
    block_bytes: int
    """Bytes of one block, all layers, K and V."""
    block_copy_s: float
    """Seconds that one block takes over the link, one way."""


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """KV memory of an executor."""

    num_blocks: int
    """Blocks with memory behind them; ids are 0 to num_blocks - 1 at the start."""
    block_size: int
    """Token slots of one block."""
    host: HostMemory | None = None
    """None: `Executor.copy` is not to be called."""


class Executor(Protocol):
    """What the engine's driver calls: hardware, or a model of it."""

    @property
    def depth(self) -> int:
        """How many batches may be in flight: one for each lane, and one more where steps overlap."""
        ...

    @property
    def num_lanes(self) -> int:
        """Batches in flight with other rows each: 1, or the number of pipeline stages."""
        ...

    @property
    def capacity(self) -> KvCapacity:
        """KV memory now; it changes only while the step gate is held."""
        ...

    def submit(self, batch: Batch) -> Future[BatchOutput]:
        """Queue a step behind those submitted before. Raises nothing: the future fails with `BatchFailedError`.

        After a failure the executor has applied the batch's `drops`, `admits`, `table_delta` and `copies`.
        """
        ...

    def copy(self, copy: HostCopy) -> Future[None]:
        """Begin to copy blocks, beside the steps or between them; copies of one direction end in order.

        Raises nothing: the future fails with `CopyFailedError`. It is done when source and target may change.
        """
        ...

    async def close(self) -> None:
        """Finish what is queued and release threads and memory. Idempotent."""
        ...


def overlaps(executor: Executor) -> bool:
    """Return whether a step may be submitted behind the one that samples its first tokens."""
    return executor.depth > executor.num_lanes
