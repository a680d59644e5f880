"""The engine: a synchronous state machine over a table of sequences. No asyncio, torch, bus or clock.

One step is `next_batch` (the scheduler chooses, blocks are given, a batch is made) and, once the executor has run it,
`absorb` (or `roll_back` if it failed). Batches come back in the order in which they were made. A row that is in a batch
in flight is never touched by anybody else: a cancel only marks it. With several lanes the next chunk of its prompt may
be in the next batch (`flights.py`); where steps overlap, its next decode may be (`going_ahead.py`). Copies to host
memory and back run beside the steps: `take_copies` hands them out, `copied` takes in their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from services.worker.blocks.compaction import with_moves
from services.worker.blocks.manager import BlockManager
from services.worker.blocks.remote_kv import RemoteSpan
from services.worker.blocks.row_names import RowNames
from services.worker.blocks.shared_blocks import SharedBlocks
from services.worker.blocks.sharing import Sharing
from services.worker.blocks.swapping import Swapping
from services.worker.contract.arrays import I32, Bool, Rows
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, HostMemory, KvCapacity
from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.cost.estimate import CostEstimate
from services.worker.engine.flights import Flight, Flights
from services.worker.engine.going_ahead import GoingAhead
from services.worker.engine.kv_memory import KvMemory
from services.worker.engine.retry import RetryGroup, RetryQueue
from services.worker.engine.sequence_registry import SequenceRegistry
from services.worker.engine.totals import Totals
from services.worker.engine.transitions import Transitions
from services.worker.engine.viewing import Viewing
from services.worker.scheduling.view import Limits, Scheduler, SchedulerOutput
from services.worker.sequences import qoe_columns
from services.worker.sequences.assemble import decodes_first, input_tokens
from services.worker.sequences.config import EngineConfig
from services.worker.sequences.events import NO_EVENTS, RowExtra, StepEvents
from services.worker.sequences.logprob_log import LogprobLog
from services.worker.sequences.table import Hold, SequenceTable, Status
from services.worker.sequences.token_log import TokenLog
from shared.api_keys import Tier
from shared.types import FinishReason

# arrays without a dimension: an operation of a short array with one takes half as long as with a scalar
_RUNNING = np.array(Status.RUNNING, dtype=np.uint8)
_ONE = np.array(1, dtype=np.int32)


class Engine:
    """All sequences of one worker, and their next step."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        num_blocks: int,
        host: HostMemory | None = None,
        cost: CostEstimate | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            config: limits.
            scheduler: chooses every step.
            num_blocks: KV blocks with memory.
            host: memory for the KV of preempted sequences; None: they are computed anew.
            cost: of a step, for the scheduler; None: unknown.
        """
        self.config = config
        self.cost = cost or CostEstimate()
        self.table = SequenceTable(config.max_sequences, config.block_size)
        max_blocks_per_row = -(-config.max_model_len // config.block_size)
        blocks = SharedBlocks if config.shares_blocks else BlockManager
        self.blocks = blocks(num_blocks, config.block_size, self.table.held_blocks, max_blocks_per_row)
        self.log = TokenLog(config.max_sequences, config.max_model_len)
        self.logprobs = LogprobLog()
        self.flights = Flights(self.table)
        self.retry = RetryQueue()
        self.totals = Totals()
        names = RowNames(self.table, self.log, config.block_size, are_shared=config.prefix_caching)
        self.swapping = None if host is None else Swapping(self.table, self.blocks, names, host)
        self.sharing = Sharing(self.table, self.blocks, names)
        self.registry = SequenceRegistry(config, self.table, self.sharing, self.blocks, self.log)
        self._transitions = Transitions(
            table=self.table,
            sharing=self.sharing,
            registry=self.registry,
            retry=self.retry,
            log=self.log,
            totals=self.totals,
            swapping=self.swapping,
        )
        self.registry.on_end = self._transitions.ended
        self.memory = KvMemory(self.table, self.blocks, self.sharing, self.swapping, self._transitions)
        self._viewing = Viewing(
            self.table, self.blocks, self.sharing, self.swapping, self.flights, self.cost, config.shares_blocks
        )
        self.ahead = GoingAhead(self.table, self.blocks, self.flights)
        self._scheduler = scheduler
        self.reorders, self.best_effort_gives_way = scheduler.reorders, scheduler.best_effort_gives_way
        """See there."""
        self.beside_best_effort_s = -np.inf
        """When best effort was last in a step."""
        self.limits = _limits(config)
        """Of one step."""
        self._next_step_id = 0
        self.noted_s = 0.0
        """When it was last asked for a step, or given what came of one."""

    # Sequences come and go

    def pause(self, channel: int) -> None:
        """Let no sequence of a channel run until `resume`; for rows in a step or copy, repeat it when they are back.

        Those that hold blocks give up their KV: it stays in the prefix cache until its memory is needed.
        """
        table = self.table
        for row in self.registry.rows_of(channel):
            table.hold[row] |= Hold.PAUSED
            self._transitions.clear(row)

    def resume(self, channel: int) -> None:
        """Let the sequences of a channel run again; the caller wakes the step loop."""
        self.table.hold[self.registry.rows_of(channel)] &= ~Hold.PAUSED

    # Steps

    def next_batch(self, now_s: float) -> Batch | None:
        """Make the next step's batch, or None if nothing can run now. The batch is in flight from then on."""
        self._note(now_s)
        if now_s >= self.registry.next_expiry_s:
            self.registry.expire(now_s)
        if self.retry:
            return self._launch_again(self.retry.pop())
        if self.config.overlaps and self.flights:
            ahead = self.ahead.rows_ahead(now_s, self.limits)
            return None if ahead is None else self._launch(ahead, np.ones(ahead.size, dtype=np.int32))
        if not self.flights and (again := self.ahead.rows_again(now_s)) is not None:
            return self._launch(again, np.ones(again.size, dtype=np.int32))
        for _ in range(2 * self.table.num_rows + self.blocks.num_used):
            view = self._viewing.view(now_s, self.limits)
            if not (view.running.size or view.waiting.size or view.preempted.size or view.extensible.size):
                return None
            output = self._scheduler.schedule(view)
            rows, num_tokens = self._commit(output)
            self.ahead.decided(output)
            if rows.size:
                self._transitions.leave_out_all_but(rows, self.limits.num_lanes)
                return self._launch(rows, num_tokens)
            moved = np.concatenate([output.preempt, output.resume])
            if (self.table.hold[moved] & Hold.SWAPPING).all():
                return None
            # who went to the host or came back without anything to copy has changed at once what can run
        raise AssertionError("the scheduler sends rows to the host and back again, and lets nobody run")

    def absorb(self, batch: Batch, output: BatchOutput, now_s: float) -> StepEvents:
        """Take in what the oldest batch in flight produced.

        Returns:
            One event for each row that got a token or ended.
        """
        assert output.step_id == batch.step_id, f"output of step {output.step_id} for step {batch.step_id}"
        self._note(now_s)
        flight, sound = self._land(batch)
        self.totals.busy_s += output.duration_s
        rows, tokens = flight.rows, output.tokens
        wanted = batch.sample
        if np.count_nonzero(sound) == sound.size:
            self.table.num_computed[rows] = flight.end
            self.retry.succeeded(batch.rows)
        else:
            self.table.num_computed[rows[sound]] = flight.end[sound]
            self.retry.succeeded(batch.rows[sound])
            wanted = wanted & sound
        self.sharing.landed()
        if self.registry.num_cancelled:
            wanted = wanted & ((self.table.hold[rows] & Hold.CANCELLED) == 0)
        extras = self.logprobs.take_in(self.table, rows, wanted, output.logprobs) if output.logprobs else ()
        if np.count_nonzero(wanted) < wanted.size:
            rows, tokens = rows[wanted], tokens[wanted]
        events = self._deliver(rows, tokens, now_s, extras) if rows.size else NO_EVENTS
        ends = self.registry.after_batch(flight.rows)
        return StepEvents.concatenate([events, ends]) if len(ends) else events

    def roll_back(self, batch: Batch, error: BatchFailedError, now_s: float) -> StepEvents:
        """Undo the oldest batch in flight, which failed, and arrange for its rows to be tried again in halves.

        Nobody was advanced, so there is nothing to restore. A row that failed twice in a step of its own ends with
        `FinishReason.ERROR`; the others never notice. A row whose chunk before has failed is tried again with that one.
        If the executor is lost, nobody is suspected.
        """
        del now_s  # a part of the step's interface; nothing here depends on the time
        flight, sound = self._land(batch)
        self.totals.num_failed_steps += 1
        self.flights.fail(flight.rows)
        going_on = ((self.table.hold[flight.rows] & (Hold.CANCELLED | Hold.LEAVING)) == 0) & sound
        group = RetryGroup(flight.rows, batch.num_tokens).select(going_on)
        events = self.registry.after_batch(flight.rows)
        if not group.rows.size or error.is_lost:
            return events
        self.table.hold[group.rows] |= Hold.RETRY
        lost = self.retry.failed(group, np.isin(group.rows, error.rows))
        return StepEvents.concatenate([events, self.registry.end(lost, FinishReason.ERROR)])

    def take_copies(self) -> list[HostCopy]:
        """Return the copies between device and host that have begun since the last call, for the executor."""
        if self.swapping is None:
            return []
        if self._viewing.may_leave:
            step_blocks = self.limits.max_batch_tokens // self.config.block_size + self.limits.max_batch_rows
            self.swapping.copy_ahead(self.cost.now, step_blocks)
        return self.swapping.take_copies()

    def copied(self, copy_id: int, *, done: bool) -> None:
        """Take in the end of a copy. If it failed, its row's KV is lost, and is computed again when its turn comes."""
        self._transitions.copied(copy_id, done=done)
        self.registry.leaving.go_on()

    # Another executor: the step gate is held

    def leave_executor(self, now_s: float) -> KeptKv:
        """Preempt all that runs: the executor is about to be another one. Nothing may be in flight or pinned.

        Returns:
            What sequences that run, or did before, have computed in full blocks: first those of the sequence whose
            reader runs out of text first, and last what is on the host alone.
        """
        assert not self.flights, "the executor changes only while nothing is in flight"
        self.sharing.coming.clear()
        self.blocks.limit(None)  # what has not moved yet goes along like the rest
        self._transitions.forget_executor()
        rows = self.table.preempted.view
        return self.kept(rows[np.argsort(qoe_columns.slack_s(self.table, rows, now_s), kind="stable")].tolist())

    def kept(self, rows: Iterable[int]) -> KeptKv:
        """Return what is here, on the device or on the host, of the first full blocks of parked rows."""
        if self.config.shares_blocks:
            return NOTHING_KEPT  # names do not say from which end their blocks are filled
        return self.sharing.kept(rows, None if self.swapping is None else self.swapping.host.index)

    def enter_executor(
        self,
        capacity: KvCapacity,
        num_lanes: int,
        kept: KeptKv = NOTHING_KEPT,
        coming: KeptKv = NOTHING_KEPT,
        spans: Sequence[RemoteSpan] = (),
        *,
        overlaps: bool = False,
    ) -> None:
        """Go on with another executor, which knows no row, after `leave_executor`; no step was made in between.

        Args:
            capacity: that it has now; on its host there is nothing yet.
            num_lanes: batches in flight at most, with other sequences each.
            kept: which of the blocks hold what; the others are empty.
            coming: which of the empty ones are being filled, and with what: sequences wait for theirs until it has
                `arrived`, or `expect_no_more`.
            spans: what of it the executor can attend where it lies, so that sequences need not wait for it.
            overlaps: see `EngineConfig`.
        """
        self.memory.furnish(capacity, kept, coming, spans)
        self.config = replace(self.config, num_lanes=num_lanes, overlaps=overlaps)
        self.limits = _limits(self.config)

    # Looks

    @property
    def capacity_blocks(self) -> int:
        """Usable blocks that the device has, below the limit."""
        return self.blocks.num_usable

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds or pins; what is copied to the host for nobody can be had in a moment."""
        return self.blocks.num_used - (0 if self.swapping is None else self.swapping.num_leaving_blocks[1])

    @property
    def num_demanded_blocks(self) -> int:
        """Blocks that parked rows ask for beyond those in use: there count those that leave the device, or are kept."""
        asked = self.table.num_parked_blocks
        if not asked:
            return 0
        counted = self.sharing.coming.num_kept_blocks + self.table.num_lent_blocks
        if self.swapping is not None:
            counted += self.swapping.num_leaving_blocks[0]
        return max(asked - counted, 0)

    # Inside

    def _note(self, now_s: float) -> None:
        """Count the time since the last look, and the memory that is held and asked for."""
        totals, stalled, used = self.totals, len(self.table.preempted), self.num_used_blocks
        if self.swapping is not None:
            stalled += self.swapping.num_arriving
        if stalled:
            totals.stalled_s += stalled * (now_s - self.noted_s)
        self.noted_s = now_s
        totals.peak_used_blocks = max(totals.peak_used_blocks, used)
        if (demanded := used + self.num_demanded_blocks) > totals.peak_demanded_blocks:
            totals.peak_demanded_blocks = demanded

    def _commit(self, output: SchedulerOutput) -> tuple[Rows, I32]:
        """Admit, preempt and bring back as the scheduler chose."""
        table = self.table
        rows = output.rows.astype(np.intp)
        assert not np.count_nonzero(table.hold[rows] & ~Hold.IN_FLIGHT), "the scheduler chose a row that is held"
        assert rows.size <= self.limits.max_batch_rows, "the scheduler chose too many rows"
        parked = table.status[rows] != _RUNNING
        if np.count_nonzero(parked):
            owner = ("copies", self._next_step_id)
            self._transitions.admit(rows[parked].tolist(), owner, output.preempt)
        if output.preempt.size:  # after: what the admitted rows share must not be handed out
            runs = rows.size + output.resume.size
            assert runs or output.preempt_how.all(), "who drops KV makes room for somebody"
            ways = (output.preempt.tolist(), output.preempt_how.tolist(), output.preempt_kept.tolist())
            for row, how, num_kept in zip(*ways, strict=True):
                self._transitions.preempt(row, how, num_kept)
        for row in output.resume.tolist() if output.resume.size else ():
            self._transitions.bring_back(row)
        remaining = table.num_known[rows] - self.flights.begins(rows)
        impossible = (output.num_tokens < _ONE) | (output.num_tokens > remaining)
        assert not np.count_nonzero(impossible), "a row computes at least one token, and none that is not known"
        return decodes_first(rows, output.num_tokens, remaining)

    def _launch(self, rows: Rows, num_tokens: I32, *, is_retry: bool = False) -> Batch:
        table = self.table
        start = table.num_computed[rows] if is_retry else self.flights.begins(rows)
        end = start + num_tokens
        table.last_step[rows] = self._next_step_id
        if self.best_effort_gives_way and np.count_nonzero(table.tier[rows] == Tier.FLEX):
            self.beside_best_effort_s = self.noted_s
        admits, drops = self._transitions.take_news()
        owner = ("copies", self._next_step_id)
        delta, copies = self.blocks.extend(rows, end, owner, self._viewing.decoding), self.blocks.take_copies()
        self.totals.num_opened_blocks, self.totals.num_met_blocks = self.blocks.num_opened_and_met
        delta, copies = with_moves(self.blocks, owner, delta, copies)
        batch = Batch(
            step_id=self._next_step_id,
            rows=rows.astype(np.int32),
            num_tokens=num_tokens,
            start=start,
            tokens=input_tokens(table, self.log, rows, start, num_tokens),
            sample=end >= table.num_known[rows],
            table_delta=delta,
            copies=copies,
            admits=admits,
            drops=drops,
        )
        self._next_step_id += 1
        self.flights.launch(batch, rows, end, is_retry=is_retry)
        return batch

    def _launch_again(self, group: RetryGroup) -> Batch:
        self.table.hold[group.rows] &= ~Hold.RETRY  # other bits stay: a channel may have been paused meanwhile
        return self._launch(group.rows, group.num_tokens, is_retry=True)

    def _land(self, batch: Batch) -> tuple[Flight, Bool]:
        flight, sound = self.flights.land(batch)
        if batch.copies.source.size:
            self.blocks.unpin(("copies", batch.step_id))
        self.totals.num_steps += 1
        if self.registry.num_ended or self.registry.num_cancelled:
            sound &= ~self.registry.are_waited_for(flight.rows)
            self.flights.fail(flight.rows[~sound])
        return flight, sound

    def _deliver(self, rows: Rows, tokens: I32, now_s: float, extras: tuple[RowExtra, ...] = ()) -> StepEvents:
        table = self.table
        first_index = table.num_output[rows]
        num_output = first_index + _ONE
        self.log.append(rows, first_index, tokens)
        table.num_output[rows] = num_output
        table.num_known[rows] = table.num_known[rows] + _ONE
        table.last_token[rows] = tokens
        table.last_token_s[rows] = now_s
        if table.num_readers:
            qoe_columns.deliver(table, rows, tokens, first_index, now_s)
        self.totals.num_generated_tokens += int(rows.size)
        finish = self.registry.stops.check(rows, tokens, num_output, table.max_output[rows])
        events = StepEvents(
            channel=table.channel[rows],
            stream=table.stream[rows],
            attempt=table.attempt[rows],
            first_index=first_index.astype(np.uint32),
            tokens=tokens,
            finish=finish,
            extras=self._transitions.with_cached_tokens(rows, extras),
        )
        for i in finish.nonzero()[0].tolist():
            self.registry.forget(int(rows[i]), FinishReason(int(finish[i])))
        return events


def _limits(config: EngineConfig) -> Limits:
    return Limits(config.max_batch_tokens, config.max_batch_rows, config.num_lanes)
