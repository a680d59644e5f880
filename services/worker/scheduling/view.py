"""What a scheduling policy sees and answers. Read-only columns, no copies; no asyncio, clock, torch or bus.

A policy is deterministic in its inputs; it may keep private state (moving averages, a batch-size search).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import AnyRows
from shared.cost import CostModel
from shared.hot import hot_dataclass

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]

EMPTY_ROWS: I32 = np.zeros(0, dtype=np.int32)
EMPTY_ROWS.flags.writeable = False
NO_WAYS: U8 = np.zeros(0, dtype=np.uint8)
"""How nobody gives way."""
NO_WAYS.flags.writeable = False


class PreemptHow(IntEnum):
    """What happens to the KV that a preempted sequence loses: all of it, or that behind its first blocks."""

    RECOMPUTE = 0  # freed now, and what is on the host of it too; computed again when the sequence resumes
    SWAP = 1  # copied to host memory beside the steps, freed when it is there; copied back before it resumes


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the sequence table, one value per row of the table (not per sequence that runs); read-only views."""

    num_prompt: I32
    """Prompt tokens."""
    num_output: I32
    """Tokens generated so far."""
    num_computed: I32
    """Tokens whose KV exists; num_prompt + num_output - num_computed are still to compute (1 while decoding). Of a
    preempted row: those in the blocks that it holds."""
    held_blocks: I32
    """KV blocks that the row holds, alone or with others; of a preempted row its first ones, full."""
    host_tokens: I32
    """Tokens of a preempted row whose KV it has again once the host gives back what lies there, or is on its way there,
    behind the blocks that it holds; 0: nothing is on the host."""
    order: NDArray[np.int64]
    """Number of the row's sequence, in order of their coming: with the row it names one sequence for good. -1: none."""
    arrival_s: F64
    """When the request reached the dispatcher, on this worker's clock."""
    expires_s: F64
    """The row is dropped then, on this worker's clock; infinite: it is to be dropped anyway."""
    last_token_s: F64
    """When the row's newest token came, on this worker's clock; its arrival before there is one."""
    num_preemptions: I32
    """How often the request was preempted, here or at other workers."""
    tier: U8
    """`shared.api_keys.Tier`; higher is more urgent, 0 (FLEX) is best effort."""
    slo_ttft_s: F64
    """Longest time to the first token, seconds from arrival; infinite: nobody has said."""
    slo_tpot_s: F64
    """Longest mean time per further token, seconds; infinite: nobody has said."""
    qoe_ttft_s: F64
    """Expected time to the first token, seconds from arrival; behind a thinking that has ended, to the first one of the
    text. NaN when no reader follows: best effort."""
    qoe_speed: F64
    """Expected tokens per second of the text, also while it thinks; NaN when no reader follows."""
    qoe_gap_s: F64
    """Between two tokens as they are wanted now: 1 / `qoe_speed`, or less while it thinks. NaN as `qoe_speed`."""
    thinks: Bool
    """It thinks: nobody reads it yet. Its tokens are wanted all the same, as if one was read every `qoe_gap_s`, but no
    reader notices a pause between them."""
    num_thought: I32
    """Of its output, the first tokens, which QoE does not count: a thinking that has ended."""
    qoe_last_s: F64
    """`last` of the O(1) QoE form: when the newest token is displayed, seconds after arrival."""
    qoe_delay_sum_s: F64
    """`D` of the O(1) QoE form: sum of the display delays so far, seconds."""
    last_step: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The newest step that the row was in, -1 before its first; policies ask only where there are several lanes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step."""

    max_batch_tokens: int
    """Most tokens that one step computes."""
    max_batch_rows: int
    """Most sequences in one step."""
    num_lanes: int = 1
    """Steps that are to be in flight together: one per stage of a pipeline. A sequence that decodes is in at most one
    of them, chunks of a prompt may be in several."""


@hot_dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What a row that waits would find of its KV if it were admitted now."""

    num_tokens: int = 0
    """Tokens that need not be computed; at least one is left."""
    num_shared_blocks: int = 0
    """Blocks of these tokens that others hold: they cost none of `free_blocks`. (The rest are free ones with contents.)
    In a step that preempts somebody they must be counted as if they cost one each: he may be the other holder. What the
    row itself holds of these tokens is not among them."""
    next_block: bytes | None = None
    """Names the block that follows, if it could be shared. Rows with equal names would compute the same KV."""
    is_coming: bool = False
    """A row that was admitted is computing that block; the row finds it there soon. Shared blocks are not counted then:
    `num_shared_blocks` is 0."""


NOTHING_CACHED = CachedPrefix()


@hot_dataclass(frozen=True, slots=True)
class OnHost:
    """What of a row's KV is in host memory already, from before or by others, and need not be copied there."""

    num_blocks: int = 0
    num_kept_blocks: int = 0
    """Those of them that other rows or copies need: they cost none of `HostView.free_blocks`."""


NOTHING_ON_HOST = OnHost()


@hot_dataclass(frozen=True, slots=True)
class HostPrefix:
    """What a parked row without KV of its own on the host would find if what is there were brought to the device."""

    num_device_blocks: int = 0
    """Full blocks with which it begins, on the device."""
    num_blocks: int = 0
    """Full blocks that follow, on the host."""


NOTHING_BEHIND = HostPrefix()


@dataclass(frozen=True, slots=True)
class Sides:
    """Who has a block that is not full, whose other end a row may open that lacks a block for one token."""

    for_left: I32
    """Rows whose blocks those can open that fill from the left."""
    for_right: I32
    """And from the right."""
    from_right: Bool
    """[rows of the table] which of them do."""

    def num_of(self, rows: AnyRows) -> int:
        """Return how many of some rows could open one, each another."""
        if not self.from_right.size:
            return 0
        num_right = int(np.count_nonzero(self.from_right[rows]))
        return min(rows.size - num_right, self.for_left.size) + min(num_right, self.for_right.size)


NO_SIDES = Sides(EMPTY_ROWS, EMPTY_ROWS, np.zeros(0, dtype=np.bool_))


class BlockFacts(Protocol):
    """What a policy may ask about blocks. It costs more than reading a column, so ask only about rows in question."""

    def freeable(self, rows: AnyRows) -> I32:
        """Return [n]: blocks that become free when the rows[i:] give up all of theirs, beyond those of rows[i + 1:].

        So the sum is what all of the rows free together, and the sum of an end is what that end frees.
        """

    def cached(self, row: int) -> CachedPrefix:
        """Return what a waiting or preempted row would find. The answer holds for this step."""


@dataclass(frozen=True, slots=True)
class HostView:
    """Host memory for the KV of preempted rows, and the copies that are under way."""

    free_blocks: int
    """Blocks of host memory that nobody holds."""
    leaving_blocks: int
    """Device blocks that become free when the copies to the host are done; not in `SchedulerView.free_blocks`."""
    num_leaving: int
    """Blocks that the link has yet to carry to the host, shared ones included."""
    arriving: I32
    """Rows whose KV is being brought back: they hold their blocks and go on soon; not in `SchedulerView.running`."""
    block_copy_s: float
    """One block over the host link, in one direction."""
    num_arriving: int = 0
    """Blocks that the link has yet to carry back."""
    lent_blocks: int = 0
    """Device blocks that rows on their way to the host hold still: they can be taken when the copies are done."""
    on_host: Callable[[int, int], OnHost] = lambda _row, _num_kept: NOTHING_ON_HOST
    """What is there already of the KV in a row's blocks, but for the first so many. It costs more than reading a
    column."""
    behind: Callable[[int], HostPrefix] = lambda _: NOTHING_BEHIND
    """What a parked row would find there. As dear."""


@hot_dataclass(frozen=True, slots=True)
class SchedulerView:
    """One moment of the engine. Every row of the queues may run now (nothing holds it, it is in no batch in flight)."""

    now_s: float
    columns: Columns
    waiting: I32
    """Rows that hold no KV and never ran, in order of arrival."""
    running: I32
    """Rows that hold KV, in order of admission; the last one is the newest."""
    preempted: I32
    """Rows that ran and gave up their KV, or the end of it, in order of arrival; they come before `waiting`."""
    num_in_flight: int
    """Rows that batches in flight hold (not listed above), each counted once."""
    free_blocks: int
    block_size: int
    limits: Limits
    blocks: BlockFacts
    host: HostView | None = None
    """None: KV that is given up can only be computed again."""
    flights: tuple[I32, ...] = ()
    """The rows of each batch in flight, the oldest batch first: their columns are as if it had not been made, but for
    the blocks that they hold."""
    in_flight: I32 = field(default_factory=lambda: EMPTY_ROWS)
    """[num_in_flight] rows of those batches, each once: they keep their blocks, and are back when their last one is."""
    in_flight_ends: I32 = field(default_factory=lambda: EMPTY_ROWS)
    """[num_in_flight] tokens of each row of `in_flight` whose KV exists when all its batches are back."""
    extensible: I32 = field(default_factory=lambda: EMPTY_ROWS)
    """[e] those of `in_flight` that may be in this step too, in order of admission: more of their known tokens are to
    be computed. None with one lane."""
    extensible_begins: I32 = field(default_factory=lambda: EMPTY_ROWS)
    """[e] where the next chunk of each begins."""
    sides: Sides = NO_SIDES
    """Rows that decode, begin a block and find none free may have these instead, one each, if nobody gives way."""
    cost: CostModel | None = None
    """Of a step of the whole model, as it is known now; None: it is not."""


@hot_dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One decision. Rows of `rows` that are waiting or preempted are admitted by it."""

    rows: I32
    """[n] who runs in the next step; decodes first."""
    num_tokens: I32
    """[n] tokens to compute for each: at least 1, at most what is still to compute (not cached, not in flight)."""
    preempt: I32
    """Running rows that give up their KV before the step, and preempted ones that give up more of what they hold;
    disjoint from `rows` and `resume`."""
    preempt_how: U8
    """[len(preempt)] `PreemptHow`."""
    preempt_kept: I32
    """[len(preempt)] how many of its first blocks each keeps, full ones and fewer than it holds."""
    reason: str
    """Why, in one word or two, for logs and the step trace; for example 'decode', 'prefill', 'kv-full'."""
    resume: I32 = field(default_factory=lambda: EMPTY_ROWS)
    """Parked rows whose KV is to be brought from host memory, their own or what they find there; disjoint from `rows`.
    They take the blocks that they lack for it now and can run once the copy is done."""
    next_look_s: float = inf
    """When the policy is to be asked again although nothing has happened."""
    holds: bool = False
    """Until then, or until something happens, the decision is the same again: `rows`, one token each, all of which
    decode; nobody else runs, whoever waits. What happens is that somebody comes, ends, gives way or may run again, or
    that more blocks are free."""


class Scheduler(Protocol):
    """A scheduling policy."""

    @property
    def reorders(self) -> bool:
        """Whether it lets who waits run in another order than that of arrival, and so should see more of them."""

    @property
    def best_effort_gives_way(self) -> bool:
        """Whether best effort comes behind all others, who may have its blocks.

        If it reorders too, readers who have text give way to those who have none.
        """

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step.

        Rows come from the queues and from `view.extensible`. The answer must fit: the blocks that `rows` need beyond
        those they hold, and `resume` for its tokens in host memory, less those that `preempt` frees, are at most
        `view.free_blocks`. (Of a row that keeps some it counts what all its blocks would free, less those kept.)
        Preemption by SWAP counts as if it freed nothing yet, and takes at most as many of
        `view.host.free_blocks`. A row that is admitted begins behind what `view.blocks.cached` finds. If any running
        row fits, or can be made to by preemption, `rows` is not empty, unless copies are under way or begin that will
        make room or bring somebody back, or, with several lanes, batches are in flight.

        Before `next_look_s` it is not asked while a decision `holds`, and, where steps overlap, while all who run
        decode and nobody waits who could run: then the same rows go on, as long as blocks suffice
        (`engine/going_ahead.py`).
        """
