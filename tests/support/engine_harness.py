"""Drives an engine with the shadow KV, checks its invariants, and judges what came out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import I32
from services.worker.contract.batch import OWN_SAMPLE, Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, HostCopy, HostMemory, KvCapacity
from services.worker.contract.kept_kv import KeptKv
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.modelled.shadow_kv import TokenDraw, expected_outputs, mix
from services.worker.pipeline.stage_messages import StepDone
from services.worker.scheduling.view import Scheduler
from services.worker.sequences.assemble import known_tokens
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from services.worker.sequences.events import StepEvents
from services.worker.sequences.table import Hold
from shared.types import FinishReason
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.staged_kv import StagedKv

STEP_S = 0.05
CHECKED_OPERATIONS = 50
"""After each of which what must hold is looked at."""
TURNS = (False, False, True)
"""After which of further ones: looking takes longer than they do, and what one of them breaks stays broken."""


@dataclass
class Story:
    """What became of one sequence."""

    new: NewSequence
    text: list[int]
    finish: FinishReason = FinishReason.NONE
    was_started: bool = False
    num_preemptions: int = 0
    row: int = -1

    def hear(self, index: int, token: int, finish: int, events: StepEvents) -> None:
        """Take in one of the events, which is its own."""
        told = [extra.num_preemptions for extra in events.extras if extra.index == index and extra.num_preemptions]
        if token >= 0:
            self.text.append(token)
        elif told:
            self.num_preemptions += 1
            assert told == [self.new.num_preemptions + self.num_preemptions], "each is counted, once"
        elif finish == FinishReason.NONE:
            assert not self.was_started, "a sequence is started once"
            self.was_started = True
        self.finish = FinishReason(finish)


def check_contents(engine: Engine, contents: dict[int, bytes]) -> None:
    """Check that rows share a block only if they agree in the salt and in every token up to the block's end.

    Args:
        engine: whose running rows are looked at.
        contents: as in `EngineHarness`; what is seen now is added.
    """
    size = engine.config.block_size
    for row in [*engine.table.running.view.tolist(), *engine.table.preempted.view.tolist()]:
        num_full = int(engine.table.num_computed[row]) // size
        tokens = known_tokens(engine.table, engine.log, row, 0, num_full * size).astype(np.int32).tobytes()
        salt = engine.table.sequence(row).cache_salt.encode() + b"/"
        for index, block in enumerate(engine.blocks.block_table[row, :num_full].tolist()):
            content = salt + tokens[: 4 * size * (index + 1)]
            assert contents.setdefault(block, content) == content, f"row {row} holds another's block {block}"


def check_all(engine: Engine, contents: dict[int, bytes]) -> None:
    """Check what must hold between any two operations."""
    check_engine(engine)
    check_contents(engine, contents)


def check_order(engine: Engine, kv: StagedKv, batch: Batch) -> None:
    """Check that rows read each position where it was written: the sum of a full block is the same from either end.

    Args:
        engine: has not taken in what came of the batch.
        kv: has computed it.
        batch: whose rows are looked at.
    """
    table, ends = engine.table, batch.start + batch.num_tokens
    here = (table.num_computed[batch.rows] == batch.start) & (table.hold[batch.rows] & Hold.ENDED == 0)
    for row, end in zip(batch.rows[here].tolist(), ends[here].tolist(), strict=True):
        tokens = known_tokens(table, engine.log, row, 0, end).astype(np.uint64)
        written = mix(tokens, np.arange(end, dtype=np.uint64))
        assert (kv.read(row, end) == written).all(), f"row {row} reads a block from the wrong end"


def undisturbed(config: EngineConfig, draw: TokenDraw, new: NewSequence) -> tuple[list[int], FinishReason]:
    """Return the whole text of a sequence that runs alone, and why it ends; one token at a time, no engine."""
    sampling = new.sampling
    limit = min(sampling.max_tokens, config.max_model_len - new.prompt.size)
    prompt, generated = new.prompt.astype(np.int32), new.generated.astype(np.int32)
    text = expected_outputs(prompt, generated, limit, sampling.seed, draw, sampling.thinking).tolist()
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else config.eos_token_ids)}
    for count in range(max(generated.size, 1), len(text) + 1):
        if text[count - 1] in stops:
            return text[:count], FinishReason.STOP
    return text, FinishReason.LENGTH


@dataclass
class EngineHarness:
    """The engine, its modelled memory, and the stories of all sequences; time moves by one step's length per step.

    Copies to the host and back end when told, or, in `step` and `drain`, when a step does.
    """

    engine: Engine
    depth: int = 1
    num_stages: int = 1
    """More than one: a pipeline, each stage with the KV of some layers."""
    now_s: float = 0.0
    stories: dict[int, Story] = field(default_factory=dict)
    flights: deque[Batch] = field(default_factory=deque)
    pinned: dict[str, tuple[I32, NDArray[np.uint64]]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    """By block that a row has been seen to fill: everything that its KV depends on."""
    looks: Iterator[bool] = field(default_factory=lambda: chain(repeat(True, CHECKED_OPERATIONS), cycle(TURNS)))
    num_copies: int = 0
    """Blocks that were copied because a row may not write into another's."""
    num_moved: int = 0
    """Blocks that were copied to get below a limit."""
    num_extended: int = 0
    """Chunks that were launched behind another one of the same prompt."""
    num_stale: int = 0
    """Chunks that came back after the one before had failed."""
    num_ahead: int = 0
    """Decodes that were launched before the token was known that they begin with."""
    num_surplus: int = 0
    """Of these, those of rows that turned out to have ended."""
    host_copies: list[HostCopy] = field(default_factory=list)
    """Under way, in the order in which they began."""

    def __post_init__(self) -> None:
        # EOS may be said: the engine has to end there
        self.draw = TokenDraw.of_vocabulary(self.engine.config.vocab_size, ())
        swapping = self.engine.swapping
        self.kv = self.empty_kv(self.engine.blocks.num_usable, 0 if swapping is None else swapping.host.num_usable)
        self.engine.blocks.on_lost = self.lose
        self.watch_host()

    def empty_kv(self, num_blocks: int, num_host_blocks: int) -> StagedKv:
        config = self.engine.config
        return StagedKv(self.num_stages, num_blocks, config.block_size, self.draw, num_host_blocks)

    def change_executor(self, num_blocks: int, num_carried: int = 0, num_host_blocks: int = 0) -> KeptKv:
        """Go on with another executor of so many blocks; nothing is in flight or pinned.

        Args:
            num_blocks: that it has.
            num_carried: at most so many blocks come along, those first that the engine names first; others are empty.
            num_host_blocks: of the host memory that it has, if the engine knows of any.

        Returns:
            What came along, by the ids of before.
        """
        engine, config, before = self.engine, self.engine.config, self.kv
        kept = engine.leave_executor(self.now_s)
        kept = kept.only(range(min(len(kept), num_carried, num_blocks)))
        host = HostMemory(num_host_blocks, 1024, 0.0) if num_host_blocks and engine.swapping is not None else None
        self.kv = self.empty_kv(max(num_blocks, engine.blocks.refcount.size), num_host_blocks)
        self.contents.clear()
        ids = np.arange(len(kept), dtype=np.int32)
        there = KeptKv(kept.names, ids)
        capacity = KvCapacity(num_blocks, config.block_size, host)
        engine.enter_executor(capacity, config.num_lanes, there, overlaps=config.overlaps)
        self.kv.take_from(before, kept.ids, ids)  # now that what the blocks held before is lost
        self.watch_host()
        self.settle()
        return kept

    def watch_host(self) -> None:
        """Let host blocks that nobody may read hold garbage."""
        if self.engine.swapping is not None:
            self.engine.swapping.host.on_lost = partial(self.kv.poison, on_host=True)

    def add(self, new: NewSequence) -> int:
        """Have a sequence taken in; return its row."""
        row = self.offer(new)
        assert isinstance(row, int), row
        return row

    def offer(self, new: NewSequence) -> int | AddRefusal:
        row = self.engine.registry.add(new)
        if not isinstance(row, AddRefusal):
            assert new.stream not in self.stories
            self.stories[new.stream] = Story(new, new.generated.astype(int).tolist(), row=row)
        self.settle()
        return row

    def add_all(self, count: int, **values: Any) -> None:
        """Have so many sequences taken in, named from 0 on."""
        for name in range(count):
            self.add(new_sequence(name, **values))

    def cancel(self, story: Story) -> bool:
        found = self.engine.registry.cancel(story.new.request_id, story.new.attempt)
        self.settle()
        return found

    def submit(self) -> Batch | None:
        """Submit the next batch if the executor takes one more."""
        if len(self.flights) >= self.depth:
            return None
        batch = self.engine.next_batch(self.now_s)
        for copy in self.engine.take_copies():
            self.kv.begin_copy(copy)
            self.host_copies.append(copy)
        if batch is not None:
            self.num_extended += sum(int(np.isin(batch.rows, other.rows).sum()) for other in self.flights)
            self.num_ahead += int((batch.tokens == OWN_SAMPLE).sum())
            self.flights.append(batch)
            self.kv.submit(batch)
            moved = int((self.engine.blocks.refcount[batch.copies.source] == 0).sum())
            self.num_moved += moved
            self.num_copies += int(batch.copies.source.size) - moved
        self.settle()
        return batch

    def submitted(self) -> Batch:
        batch = self.submit()
        assert batch is not None, "nothing can run"
        return batch

    def fill(self) -> None:
        """Submit as many batches as the executor takes, or can be made."""
        while self.submit() is not None:
            pass

    def land(self, cause: str | None = None, blamed: tuple[int, ...] = ()) -> StepEvents:
        """Answer the oldest batch in flight: run it, or let it fail."""
        batch = self.flights.popleft()
        self.num_stale += int((self.engine.table.num_computed[batch.rows] != batch.start).sum())
        self.num_surplus += int(((self.engine.table.hold[batch.rows] & Hold.ENDED) != 0).sum())
        self.now_s += STEP_S
        said = self.kv.finish(batch, cause)
        if isinstance(said, StepDone):
            if self.engine.config.shares_blocks:
                check_order(self.engine, self.kv, batch)
            events = self.engine.absorb(batch, BatchOutput(batch.step_id, said.output.tokens, STEP_S), self.now_s)
        else:
            assert said.cause == cause
            events = self.engine.roll_back(batch, BatchFailedError(batch.step_id, said.cause, blamed), self.now_s)
        self.record(events)
        self.settle()
        return events

    def land_copy(self, index: int = 0, *, done: bool = True) -> None:
        """End a copy that is under way; one that fails leaves its target as it is, which is garbage."""
        copy = self.host_copies.pop(index)
        if done:
            self.kv.end_copy(copy)
        self.engine.copied(copy.copy_id, done=done)
        self.settle()

    def step(self) -> Batch | None:
        batch = self.submit()
        if self.flights:
            self.land()
        self.land_copies()
        return batch

    def stepped(self) -> Batch:
        batch = self.step()
        assert batch is not None, "nothing can run"
        return batch

    def step_until_end_of(self, stream: int) -> None:
        while self.stories[stream].finish is FinishReason.NONE:
            self.step()

    def land_copies(self) -> None:
        while self.host_copies:
            self.land_copy()

    def drain(self, max_steps: int = 5000) -> None:
        """Run until every sequence has ended and everything is given back."""
        for _ in range(max_steps):
            if not self.engine.table.num_sequences:
                break
            self.fill()
            self.check_going_on()
            if self.flights:
                self.land()
            self.land_copies()
        assert not self.engine.table.num_sequences, f"not done after {max_steps} steps"
        if not self.pinned:
            self.check_empty()

    def finish(self, max_steps: int = 5000) -> None:
        """Run until every sequence has ended, and judge what came out."""
        self.drain(max_steps)
        self.judge()

    def check_going_on(self) -> None:
        """Check that something is under way as long as somebody is here."""
        is_idle = not (self.flights or self.host_copies)
        assert not (is_idle and self.engine.table.num_sequences), "sequences are left, but no step runs"

    def check_empty(self) -> None:
        """Check that everything was given back."""
        assert self.engine.blocks.num_free == self.engine.blocks.num_usable
        assert self.engine.log.num_used_chunks == 0
        told = sum(story.num_preemptions for story in self.stories.values())
        assert told == self.engine.totals.num_preemptions, "who is preempted is told of"
        assert self.engine.swapping is None or not self.engine.swapping.host.num_used

    def settle(self) -> None:
        self.record(self.engine.registry.take_events())
        if next(self.looks):
            check_all(self.engine, self.contents)

    def lose(self, ids: I32) -> None:
        self.kv.poison(ids)
        for block in ids.tolist():
            self.contents.pop(block, None)

    def record(self, events: StepEvents) -> None:
        columns = (events.stream, events.attempt, events.channel, events.first_index, events.tokens, events.finish)
        for index, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            stream, attempt, channel, first_index, token, finish = values
            story = self.stories[stream]
            assert story.finish is FinishReason.NONE, "an event after the end"
            assert (attempt, channel) == (story.new.attempt, story.new.channel)
            assert first_index == len(story.text), "a token is lost or doubled"
            story.hear(index, token, finish, events)

    def pin_full_blocks(self, owner: str, row: int) -> None:
        """Pin the blocks of a row that no step writes or copies any more, and remember what is in them."""
        full = int(self.engine.table.num_computed[row]) // self.engine.config.block_size
        ids = self.engine.blocks.block_table[row, :full].copy()
        for batch in self.flights:
            ids = ids[~np.isin(ids, batch.copies.target)]
        self.engine.blocks.pin(ids, owner)
        self.pinned[owner] = (ids, self.kv.slots(ids))

    def unpin(self, owner: str) -> None:
        ids, slots = self.pinned.pop(owner)
        assert (self.kv.slots(ids) == slots).all(), "a pinned block was written"
        self.engine.blocks.unpin(owner)

    def live(self) -> list[Story]:
        return [story for story in self.stories.values() if story.finish is FinishReason.NONE]

    def judge(self) -> None:
        """Compare every text with the text of the same sequence alone."""
        for story in self.stories.values():
            expected, finish = undisturbed(self.engine.config, self.draw, story.new)
            assert story.text == expected[: len(story.text)], f"the text of {story.new.request_id} differs"
            if story.finish in (FinishReason.STOP, FinishReason.LENGTH):
                assert (len(story.text), story.finish) == (len(expected), finish)


def make_harness(
    scheduler: str | Scheduler = "chunked",
    *,
    depth: int | None = None,
    num_stages: int | None = None,
    num_lanes: int = 1,
    **engine: Any,
) -> EngineHarness:
    """Drive an engine of `make_engine`; as many stages and batches in flight as lanes, unless told otherwise."""
    made = make_engine(scheduler, num_lanes=num_lanes, **engine)
    return EngineHarness(made, depth=depth or num_lanes, num_stages=num_stages or num_lanes)
