"""Sequences of a random run that leave for another worker, and come again with some of their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from services.worker.contract.kept_kv import NOTHING_KEPT, KeptKv
from services.worker.sequences.table import Hold, Status
from shared.ids import StreamId
from shared.types import FinishReason
from tests.support.engine_harness import EngineHarness, Story
from tests.support.staged_kv import StagedKv


@dataclass(eq=False)
class Returning:
    """A sequence that has left, and comes again as if from another worker."""

    story: Story
    kept: KeptKv
    """What was computed of it."""
    copy: StagedKv
    """With the contents of these blocks."""
    is_asked: bool = False
    """For room."""
    is_reserved: bool = False
    coming: KeptKv = NOTHING_KEPT


class Returns:
    """Of one run.

    Args:
        harness: that runs.
        random: of the run.
        counts: of what came to pass.
        next_name: returns a number for each sequence that comes again.
    """

    def __init__(
        self, harness: EngineHarness, random: np.random.Generator, counts: Counter[str], next_name: Callable[[], int]
    ) -> None:
        self.harness = harness
        self.random = random
        self.counts = counts
        self._next_name = next_name
        self._returning: list[Returning] = []
        """Sequences that have left, and come again."""

    def forget_reservations(self) -> None:
        """Another executor has other blocks."""
        for one in self._returning:
            one.is_asked, one.coming, one.is_reserved = False, NOTHING_KEPT, False

    def give_up(self) -> None:
        """Nobody comes any more."""
        for one in self._returning:
            self.harness.engine.sharing.coming.release(one.story.new.request_id)

    def leave(self) -> None:
        """Let a sequence go to another worker, with the KV that it has now, or stay after all."""
        leaving, live = self.harness.engine.registry.leaving, self.harness.live()
        if leaving.rows and self.random.random() < 0.5:
            self.counts["stays"] += 1
            leaving.stay(leaving.rows[0])
        elif going := [story for story in live if story.row not in leaving.rows]:
            story = going[self.random.integers(len(going))]
            is_away = self.harness.engine.table.hold[story.row] & Hold.IN_FLIGHT
            self.counts["leaves in flight" if is_away else "leaves"] += 1
            leaving.begin(story.row, "another", partial(self._is_over, story, *self._kv_of(story.row)))
        self.harness.settle()

    def _kv_of(self, row: int) -> tuple[KeptKv, StagedKv]:
        """Return what is computed of a row, and a copy of it."""
        engine = self.harness.engine
        runs = engine.table.status[row] == Status.RUNNING
        kept = engine.sharing.computed([row]) if runs else engine.sharing.kept([row])
        copy = self.harness.empty_kv(self.harness.kv.num_blocks, 0)
        copy.take_from(self.harness.kv, kept.ids, kept.ids)
        return kept, copy

    def _is_over(self, story: Story, kept: KeptKv, copy: StagedKv, num_computed: int | None) -> None:
        self.counts["not left" if num_computed is None else "left"] += 1
        if num_computed is not None:
            self._returning.append(Returning(story, kept, copy))

    def come_again(self) -> None:
        """Have one that has left come again, after some of its KV, or go on with the KV of one that comes."""
        returning = [each for each in self._returning if each.story.finish is FinishReason.RELEASED]
        if not returning:
            return
        one, random = returning[int(self.random.integers(len(returning)))], self.random
        engine, request_id = self.harness.engine, one.story.new.request_id
        coming = engine.sharing.coming
        if not one.is_asked:
            if random.random() < 0.7:  # what it left behind is lost, as at another worker
                blocks = engine.blocks
                blocks.drop_contents(np.flatnonzero(blocks.index.is_named & (blocks.refcount == 0)).astype(np.int32))
            num_names = int(random.integers(0, len(one.kept) + 1))
            found = coming.reserve(request_id, one.kept.names[:num_names], 2, int(engine.table.running.view.size))
            one.coming, one.is_asked, one.is_reserved = found or NOTHING_KEPT, True, found is not None
            self.counts["no room" if found is None else "reserved"] += 1
        elif len(one.coming) and random.random() < 0.8:
            count = int(random.integers(1, len(one.coming) + 1))
            part, one.coming = one.coming.only(range(count)), one.coming.only(range(count, len(one.coming)))
            where = dict(zip(one.kept.names, one.kept.ids.tolist(), strict=True))
            self.harness.kv.take_from(
                one.copy, np.array([where[name] for name in part.names], dtype=np.int32), part.ids
            )
            coming.arrived(part)
            self.counts["arrived"] += count
        else:
            if len(one.coming):  # it is given up
                coming.release(request_id)
            elif one.is_reserved:
                self.counts["whole"] += 1
                coming.is_whole(request_id, 0)
            self._offer_again(one)
        self.harness.settle()

    def _offer_again(self, one: Returning) -> None:
        self._returning.remove(one)
        stream, new = StreamId(1000 + self._next_name()), one.story.new
        generated = np.array(one.story.text, dtype=np.uint32)
        again = replace(new, attempt=new.attempt + 1, stream=stream, generated=generated, fork_of=None)
        is_taken = isinstance(self.harness.offer(again), int)
        self.counts["came again"] += is_taken
        if not is_taken:
            self.harness.engine.sharing.coming.release(new.request_id)
