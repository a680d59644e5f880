"""Who holds KV and is left out of steps: counted once until it goes on, whatever it has left to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.worker.contract.batch import Batch
from services.worker.engine.describe import describe
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import I32, Bool, SchedulerOutput, SchedulerView
from tests.support.engine_builders import new_sequence
from tests.support.engine_chaos import Chaos, make_chaos
from tests.support.engine_harness import EngineHarness, make_harness
from tests.support.priority_scheduler import PriorityScheduler


class Sitting:
    """Sequences that decode, some of which sit out the steps to come."""

    def __init__(self, count: int = 2, **engine: Any) -> None:
        self.rows: set[int] = set()
        scheduler = PriorityScheduler(lambda _, rows: -rows.astype(float), self._sit)
        self.harness = make_harness(scheduler, **engine)
        self.totals = self.harness.engine.totals
        self.harness.add_all(count, max_tokens=40)
        for _ in range(count):
            self.harness.step()

    def _sit(self, _: SchedulerView, rows: I32) -> Bool:
        return np.isin(rows, sorted(self.rows))

    def steps(self, *sitting: int, count: int = 4) -> int:
        """Make steps which these rows sit out; return the pauses so far."""
        self.rows = set(sitting)
        for _ in range(count):
            self.harness.fill()
            self.harness.land()
        return self.totals.num_pauses


def test_a_row_that_sits_out_and_goes_on_pauses_once_each_time() -> None:
    sitting = Sitting()
    assert [sitting.steps(*rows) for rows in ((), (1,), (), (1,), (0,), ())] == [0, 1, 1, 2, 3, 3]
    sitting.harness.finish()
    assert (sitting.totals.num_pauses, sitting.totals.num_preemptions) == (3, 0)


@pytest.mark.parametrize(("num_lanes", "count"), [(2, 5), (3, 7), (4, 9)])
def test_who_rests_until_its_lane_has_its_turn_does_not_pause_and_who_is_passed_over_does(
    num_lanes: int, count: int
) -> None:
    sitting = Sitting(count, num_lanes=num_lanes)
    before = sitting.steps(count=0)
    assert [sitting.steps(*rows, count=9) - before for rows in ((), (1,), (), (1,), ())] == [0, 1, 1, 2, 2]
    sitting.harness.finish()


def test_a_dump_says_who_pauses_now() -> None:
    sitting = Sitting()
    for rows, paused in (((), [False, False]), ((1,), [False, True]), ((), [False, False])):
        sitting.steps(*rows)
        assert [row["is_paused"] for row in describe(sitting.harness.engine, 0.0)] == paused


def test_a_prompt_that_was_begun_pauses_while_another_one_takes_the_steps() -> None:
    """32 of its 60 tokens; then all of the one that comes, in two steps; then the rest."""
    harness = make_harness(PriorityScheduler(lambda _, rows: rows.astype(float), lambda _, rows: rows < 0))
    pauses = []
    for name in range(2):
        harness.add(new_sequence(name, num_prompt=60))
        for _ in range(1 + name):
            harness.stepped()
            pauses.append(harness.engine.totals.num_pauses)
    harness.finish()
    assert [*pauses, harness.engine.totals.num_pauses] == [0, 1, 1, 1]


def test_who_gives_way_does_not_pause() -> None:
    harness = make_harness("chunked", num_blocks=8)
    harness.add_all(4, num_prompt=6, max_tokens=16)
    harness.finish()
    assert harness.engine.totals.num_preemptions > 0
    assert harness.engine.totals.num_pauses == 0


class Told:
    """Counts pauses in its own way: by name of who is left out, and of who has been in a step since it came in."""

    def __init__(self, harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = harness.engine
        self.num_pauses = 0
        self._been: set[tuple[int, ...]] = set()
        self._is_asked = False
        self._next_batch, self._schedule = self.engine.next_batch, self.engine._scheduler.schedule
        monkeypatch.setattr(self.engine, "next_batch", self._launched)
        monkeypatch.setattr(self.engine._scheduler, "schedule", self._asked)

    def _asked(self, view: SchedulerView) -> SchedulerOutput:
        self._is_asked = True
        return self._schedule(view)

    def _launched(self, now_s: float) -> Batch | None:
        self._is_asked = False
        batch, table = self._next_batch(now_s), self.engine.table
        if batch is None:
            return None
        left = table.running.view[table.hold[table.running.view] == 0] if self._is_asked else []
        paused = self._been & {self._name(row) for row in left}
        self.num_pauses += len(paused)
        self._been = (self._been - paused) | {self._name(row) for row in batch.rows}
        return batch

    def _name(self, row: int) -> tuple[int, ...]:
        table = self.engine.table
        return int(row), int(table.order[row]), int(table.num_preemptions[row])


@pytest.mark.parametrize("engine", [{}, {"depth": 2}, {"num_host_blocks": 12}, {"overlaps": True, "depth": 2}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_pauses_are_counted_through_anything_that_may_happen(
    engine: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chaos: Chaos = make_chaos(make_scheduler("andes"), [seed], whims=0.6, **engine)
    told = Told(chaos.harness, monkeypatch)
    chaos.run(400)
    assert chaos.harness.engine.totals.num_pauses == told.num_pauses > 3
