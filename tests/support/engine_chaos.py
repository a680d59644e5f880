"""Schedulers and operations that do whatever is allowed, at random from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from services.worker.scheduling.view import I32, U8, PreemptHow, Scheduler, SchedulerOutput, SchedulerView
from services.worker.sequences.config import AddRefusal, NewSequence
from services.worker.sequences.table import Hold, Status
from shared.api_keys import Tier
from shared.types import FinishReason, ReaderTarget
from tests.support.engine_builders import FOREVER, new_sequence
from tests.support.engine_harness import EngineHarness, Story, make_harness
from tests.support.engine_returns import Returns

NUM_CHANNELS = 3
GUILTY_SEED = 666
"""Sequences with this sampling seed make every step fail that they take part in."""


class UnrulyScheduler:
    """Preempts and picks at random, in any order and in chunks of any size; rules by the book when told to be calm."""

    def __init__(self, calm: Scheduler, random: np.random.Generator, whims: float = 0.6) -> None:
        self._calm = calm
        self._whims = whims
        self._random = random
        self.is_calm = False
        self.reorders, self.best_effort_gives_way = calm.reorders, calm.best_effort_gives_way

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if self.is_calm or self._random.random() < 1 - self._whims:
            return self._calm.schedule(view)
        columns, random = view.columns, self._random
        holding = view.preempted[columns.held_blocks[view.preempted] > 0]
        victims = np.concatenate([view.running, holding]).astype(np.int32)
        victims = victims[random.random(victims.size) < random.choice([0.0, 0.1, 0.5])]
        kept = random.integers(0, columns.num_computed[victims] // view.block_size + 1).astype(np.int32)
        kept *= random.random(victims.size) < 0.7
        kept = np.where(np.isin(victims, holding), np.minimum(kept, columns.held_blocks[victims] - 1), kept)
        how = self._ways(view, victims, kept)
        dropped = how == PreemptHow.RECOMPUTE
        free = view.free_blocks + max(int(view.blocks.freeable(victims[dropped]).sum() - kept[dropped].sum()), 0)
        others = view.running[~np.isin(view.running, victims)]
        left = view.limits.max_batch_tokens
        parked = view.preempted[~np.isin(view.preempted, victims)]
        lacks = (-(-columns.host_tokens // view.block_size) - columns.held_blocks).tolist()
        resume = [row for row in parked.tolist() if columns.host_tokens[row] and random.random() < 0.5]
        resume = [row for row in resume[:1] if lacks[row] <= view.free_blocks]
        free -= sum(lacks[row] for row in resume)
        rows: list[int] = []
        num_tokens: list[int] = []
        for row in random.permutation(np.concatenate([others, view.extensible, parked, view.waiting])).tolist():
            computed, held = self._begin(view, row, counts_shared=victims.size == 0)
            remaining = int(columns.num_prompt[row] + columns.num_output[row]) - computed
            chunk = min(int(random.integers(1, remaining + 1)), left, (held + free) * view.block_size - computed)
            if chunk < 1 or len(rows) == view.limits.max_batch_rows or random.random() < 0.2:
                continue
            if columns.host_tokens[row]:
                continue
            free -= max(-(-(computed + chunk) // view.block_size) - held, 0)
            left -= chunk
            rows.append(row)
            num_tokens.append(chunk)
        if not rows:
            return self._calm.schedule(view)
        chosen, back = np.array(rows, dtype=np.int32), np.array(resume, dtype=np.int32)
        return SchedulerOutput(chosen, np.array(num_tokens, dtype=np.int32), victims, how, kept, "whim", back)

    def _ways(self, view: SchedulerView, victims: I32, kept: I32) -> U8:
        """Return how each victim gives way: to the host by chance, as long as it holds them."""
        left = 0 if view.host is None else view.host.free_blocks
        how = np.full(victims.size, PreemptHow.RECOMPUTE, dtype=np.uint8)
        for i, (row, num_kept) in enumerate(zip(victims.tolist(), kept.tolist(), strict=True)):
            num_blocks = -(-int(view.columns.num_computed[row]) // view.block_size) - num_kept
            num_taken = num_blocks - (0 if view.host is None else view.host.on_host(row, num_kept).num_kept_blocks)
            if num_blocks and num_taken <= left and view.host is not None and self._random.random() < 0.7:
                how[i] = PreemptHow.SWAP
                left -= num_taken
        return how

    def _begin(self, view: SchedulerView, row: int, *, counts_shared: bool) -> tuple[int, int]:
        """Return the row's computed tokens and the blocks that it has; it does not mind computing what is coming."""
        if row in view.running:
            return int(view.columns.num_computed[row]), int(view.columns.held_blocks[row])
        if row in view.extensible:
            begin = int(view.extensible_begins[view.extensible == row][0])
            return begin, int(view.columns.held_blocks[row])
        cached = view.blocks.cached(row)
        held = int(view.columns.held_blocks[row])
        return cached.num_tokens, held + (cached.num_shared_blocks if counts_shared else 0)


def draw_reader(random: np.random.Generator) -> tuple[ReaderTarget | None, Tier]:
    """Return somebody of any patience and speed, the reader that is assumed where none is told, or nobody."""
    kind = random.random()
    if kind < 0.5:
        return None, Tier.FLEX if kind < 0.25 else Tier.DEFAULT
    ttft_s, speed = 10.0 ** random.uniform([-2, -1], [2, 4])
    return ReaderTarget(ttft_s=ttft_s, speed_tokens_per_s=speed), Tier.DEFAULT


class Chaos:
    """One operation after the other, each allowed at its moment."""

    def __init__(
        self, harness: EngineHarness, unruly: UnrulyScheduler, random: np.random.Generator, leaves: float = 0
    ) -> None:
        self.harness = harness
        self.leaves = leaves
        self.unruly = unruly
        self.random = random
        self._readers = random.spawn(1)[0]
        self.next_name = count().__next__
        self.num_pins = 0
        self.num_blocks = harness.engine.blocks.num_usable
        self.counts = Counter[str]()
        self.returns = Returns(harness, random, self.counts, self.next_name)

    def run(self, num_operations: int, adds: float = 20) -> None:
        operations: list[Callable[[], None]] = [self.add, self.step, self.land, self.cancel]
        operations += [self.grow, self.pin, self.limit, self.shrink, self.restore]
        weights = np.array([adds, 30, 30, 4, 1, 3, 6, 3, 4], dtype=float)
        if self.harness.engine.swapping is not None:
            operations, weights = [*operations, self.copy, self.pause], np.append(weights, [25, 3])
        if self.harness.num_stages > 1:
            operations, weights = [*operations, self.advance], np.append(weights, 30)
        if self.leaves:
            operations += [self.returns.leave, self.returns.come_again]
            weights = np.append(weights, [self.leaves, 2 * self.leaves])
        for index in self.random.choice(len(operations), size=num_operations, p=weights / weights.sum()):
            operations[index]()

    def live_through(self, num_operations: int = 400, adds: float = 20) -> None:
        """Do random operations, then let everything come to its end and judge it."""
        self.run(num_operations, adds)
        self.calm_down()
        self.harness.judge()
        assert all(story.finish is not FinishReason.NONE for story in self.harness.stories.values())
        for story in self.harness.stories.values():
            if story.finish is FinishReason.ERROR:
                assert story.new.sampling.seed == GUILTY_SEED, "an innocent sequence was given up"
        self.harness.check_empty()

    def calm_down(self) -> None:
        """Give everything back and let nothing fail any more by chance."""
        self.unruly.is_calm = True
        self.unpin_all()
        self.returns.give_up()
        while self.harness.flights:
            self.land()
        self.harness.land_copies()
        self.unpin_all()
        for channel in range(NUM_CHANNELS):
            self.harness.engine.resume(channel)
        self.restore()
        while self.harness.engine.table.num_sequences:
            self.harness.fill()
            self.harness.check_going_on()
            self.land(by_chance=False)
            self.harness.land_copies()

    def add(self) -> None:
        """Add a sequence by itself, or a fork of one that lives, or several choices at once."""
        live, random = self.harness.live(), self.random
        if live and random.random() < 0.2:
            self.add_one(live[random.integers(len(live))].new, is_true_fork=bool(random.random() < 0.8))
            return
        new = self.add_one()
        for _ in range(random.choice([0, 0, 0, 2])):
            self.add_one(new)

    def add_one(self, parent: NewSequence | None = None, *, is_true_fork: bool = True) -> NewSequence:
        random, name = self.random, self.next_name()
        alike = parent if is_true_fork else None
        generated = random.integers(0, 50, size=random.integers(1, 20)).tolist() if random.random() < 0.2 else []
        qoe, tier = draw_reader(self._readers) if alike is None else (alike.qoe, alike.tier)
        new = new_sequence(
            name,
            prompt=self.prompt() if alike is None else alike.prompt.tolist(),
            generated=generated,
            max_tokens=int(random.integers(len(generated) + 1, len(generated) + 30)),
            stop_token_ids=(3, 4) if random.random() < 0.3 else (),
            ignore_eos=bool(random.random() < 0.5),
            seed=GUILTY_SEED if random.random() < 0.04 else int(random.integers(0, 100)),
            attempt=int(random.integers(1, 3)),
            channel=name % NUM_CHANNELS,
            arrival_s=self.harness.now_s - float(random.integers(0, 3)),
            expires_s=self.harness.now_s + float(random.random()) * 3 if random.random() < 0.1 else FOREVER,
            fork_of=parent.request_id[1:] if parent is not None else "gone" if random.random() < 0.1 else None,
            qoe=qoe,
            tier=tier,
            salt=str(random.choice(["", "", "tenant"])) if alike is None else alike.cache_salt,
        )
        outcome = self.harness.offer(new)
        if parent is not None and not is_true_fork:
            assert isinstance(outcome, AddRefusal) or np.array_equal(new.prompt, parent.prompt)
        elif parent is not None and not isinstance(outcome, AddRefusal):
            self.counts["fork waits" if self.harness.engine.table.hold[outcome] & Hold.FORK else "fork"] += 1
        return new

    def prompt(self) -> list[int]:
        """Begin anew, like one of three texts up to some point, or with an earlier prompt and its answer."""
        random, kind = self.random, self.random.random()
        beginning: list[int] = []
        if kind < 0.4:
            text = np.random.default_rng(int(random.integers(3))).integers(0, 50, size=40)
            beginning = text[: random.integers(1, 40)].tolist()
        elif kind < 0.6 and self.harness.stories:
            story = list(self.harness.stories.values())[int(random.integers(len(self.harness.stories)))]
            beginning = [*story.new.prompt.astype(int).tolist(), *story.text][:45]
        rest = random.integers(0, 50, size=random.integers(1, 12 if beginning else 40))
        return [*beginning, *(int(token) for token in rest)]

    def step(self) -> None:
        """Submit a batch; count the blocks of preempted rows, and how often one of these gives more to the host."""
        table = self.harness.engine.table
        parked = (table.status == Status.PREEMPTED) & (table.hold & Hold.SWAPPING == 0)
        self.harness.submit()
        leaves = (table.status == Status.PREEMPTED) & (table.hold & Hold.SWAPPING != 0)
        self.counts["went again"] += int(np.count_nonzero(parked & leaves))
        self.counts["lent"] += table.num_lent_blocks

    def land(self, *, by_chance: bool = True) -> None:
        """Let a step fail if somebody in it is guilty, or (more than one row) by chance."""
        if not self.harness.flights:
            return
        rows = self.harness.flights[0].rows
        table = self.harness.engine.table
        guilty = tuple(row for row in rows.tolist() if table.sequence(row).sampling.seed == GUILTY_SEED)
        if guilty:
            self.counts["guilty"] += 1
            self.harness.land("guilty", blamed=guilty if self.random.random() < 0.3 else ())
        elif by_chance and rows.size > 1 and self.random.random() < 0.05:
            self.counts["bad luck"] += 1
            self.harness.land("bad luck")
        else:
            self.harness.land()

    def advance(self) -> None:
        """Let a stage run ahead; the last one's answer comes when a step lands."""
        stage = int(self.random.integers(self.harness.num_stages - 1))
        if self.harness.kv.advance(stage) and len(self.harness.flights) > 1:
            self.counts["stages apart"] += 1

    def copy(self) -> None:
        """End a copy, the first of its direction; now and then it has failed."""
        copies = self.harness.host_copies
        if copies:
            first = {copy.to_host: i for i, copy in reversed(list(enumerate(copies)))}
            index = int(self.random.choice(sorted(first.values())))
            done = bool(self.random.random() < 0.9)
            self.counts[("out" if copies[index].to_host else "back") if done else "copy fails"] += 1
            self.harness.land_copy(index, done=done)

    def pause(self) -> None:
        """Let a dispatcher be silent, or heard again."""
        channel = int(self.random.integers(NUM_CHANNELS))
        if self.random.random() < 0.5:
            self.harness.engine.pause(channel)
        else:
            self.harness.engine.resume(channel)
        self.harness.settle()

    def cancel(self) -> None:
        live, hold = self.harness.live(), self.harness.engine.table.hold
        moving = [story for story in live if hold[story.row] & Hold.SWAPPING]
        live = moving if moving and self.random.random() < 0.3 else live
        if live:
            story = live[self.random.integers(len(live))]
            self.counts["cancel in flight" if self._in_flight(story) else "cancel"] += 1
            if hold[story.row] & Hold.SWAPPING:
                self.counts["cancel in copy"] += 1
            assert self.harness.cancel(story)
            assert self._in_flight(story) or story.finish is FinishReason.CANCELLED

    def grow(self) -> None:
        first = self.harness.kv.num_blocks
        end = first + int(self.random.integers(1, 4))
        self.counts["grow in flight" if self.harness.flights else "grow"] += 1
        self.harness.kv.grow(end)
        self.harness.engine.memory.grow(first, end)
        self.harness.settle()

    def shrink(self) -> None:
        """Go on with less memory: some sequences may not fit any more."""
        blocks = self.harness.engine.blocks
        if self._can_change():
            self.counts["shrink held" if blocks.num_used else "shrink free"] += 1
            self._change(int(self.random.integers(1, self.num_blocks)))

    def restore(self) -> None:
        if self._can_change() and self.harness.engine.blocks.num_usable < self.num_blocks:
            self._change(self.num_blocks)

    def _change(self, num_blocks: int) -> None:
        """Go on with another executor, to which some of the KV goes along, and whose host may have no memory.

        The device may have forgotten before what nobody holds, but for what the host has.
        """
        blocks = self.harness.engine.blocks
        if self.harness.engine.swapping is not None and self.random.random() < 0.5:
            blocks.drop_contents(np.flatnonzero(blocks.index.is_named & (blocks.refcount == 0)).astype(np.int32))
        num_carried, num_host_blocks = (int(self.random.choice([0, 5, most, most])) for most in (num_blocks, 30))
        kept = self.harness.change_executor(num_blocks, num_carried, num_host_blocks)
        self.returns.forget_reservations()
        self.counts["carried"] += int((kept.ids >= 0).sum())
        self.counts["carried from the host"] += int((kept.ids < 0).sum())

    def _can_change(self) -> bool:
        return not (self.harness.flights or self.harness.pinned or self.harness.host_copies)

    def limit(self) -> None:
        """Limit the block ids to about what is in use, or to less, which is refused; or lift the limit."""
        engine, blocks = self.harness.engine, self.harness.engine.blocks
        is_lifted = bool(self.random.random() < 0.3)
        num_blocks = None if is_lifted else max(blocks.num_used + int(self.random.integers(-2, 12)), 1)
        before = (blocks.num_usable, blocks.num_free, engine.blocks.is_within_limit)
        try:
            engine.memory.limit(num_blocks)
        except ValueError:
            self.counts["limit refused"] += 1
            assert (blocks.num_usable, blocks.num_free, engine.blocks.is_within_limit) == before
        else:
            within = "limit" if engine.blocks.is_within_limit else "limit held"
            self.counts["limit lifted" if is_lifted else within] += 1
            if not is_lifted and self.harness.flights:
                self.counts["limit in flight"] += 1
        self.harness.settle()

    def pin(self) -> None:
        running = self.harness.engine.table.running.view
        if self.harness.pinned and self.random.random() < 0.7:
            self.unpin_all()
        elif running.size:
            self.num_pins += 1
            self.counts["pin"] += 1
            self.harness.pin_full_blocks(f"owner {self.num_pins}", int(running[self.random.integers(running.size)]))
            self.harness.settle()

    def unpin_all(self) -> None:
        for owner in list(self.harness.pinned):
            self.harness.unpin(owner)
        self.harness.settle()

    def _in_flight(self, story: Story) -> bool:
        table = self.harness.engine.table
        row = self.harness.engine.registry.row_of.get((story.new.request_id, story.new.attempt))
        assert row is None or table.status[row] != Status.FREE
        return row is not None and any(row in batch.rows for batch in self.harness.flights)


def make_chaos(
    scheduler: Scheduler, seeds: Sequence[int], *, whims: float = 0.6, leaves: float = 0, **harness: Any
) -> Chaos:
    """Choose at random, from these seeds, what is done to an engine of small limits; `whims` is of its scheduler."""
    random = np.random.default_rng(seeds)
    unruly = UnrulyScheduler(scheduler, random, whims)
    limits = {"max_batch_tokens": 24, "max_batch_rows": 6, "max_model_len": 80, "vocab_size": 50}
    limits["num_blocks"] = int(random.integers(20, 40))
    return Chaos(make_harness(unruly, eos_token_ids=(1, 2), **limits | harness), unruly, random, leaves)
