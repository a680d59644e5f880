"""Decodes behind a batch in flight that samples what they begin with: who goes ahead, who does not, who has ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.worker.contract.batch import OWN_SAMPLE
from services.worker.contract.executor import KvCapacity
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import Scheduler, SchedulerOutput, SchedulerView
from services.worker.sequences.config import AddRefusal
from services.worker.sequences.table import Hold
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_harness import EngineHarness, Story, make_harness, undisturbed
from tests.support.engine_live import STEP_S, live_engine
from tests.support.napping import Napping


def harness_of(
    *, scheduler: str = "chunked", num_blocks: int = 64, eos_token_ids: tuple[int, ...] = (), overlaps: bool = True
) -> EngineHarness:
    return make_harness(scheduler, num_blocks=num_blocks, eos_token_ids=eos_token_ids, overlaps=overlaps, depth=2)


def stop_of(harness: EngineHarness, name: int, count: int) -> int:
    """Return a token that the sequence says for the first time as its `count`-th."""
    text, _ = undisturbed(harness.engine.config, harness.draw, new_sequence(name, max_tokens=40))
    assert text[count - 1] not in text[: count - 1]
    return text[count - 1]


def story(harness: EngineHarness, name: int) -> Story:
    return harness.stories[1000 + name]


def test_a_decode_goes_ahead_of_the_prompt_that_samples_its_token_and_then_of_every_step() -> None:
    harness = harness_of()
    harness.add(new_sequence(0, num_prompt=5, max_tokens=9))
    _, second = harness.submitted(), harness.submitted()
    assert (second.start.tolist(), second.tokens.tolist(), second.sample.tolist()) == ([5], [OWN_SAMPLE], [True])
    assert harness.submit() is None, "nobody knows what comes behind two steps that are not back"
    num_steps = 2
    while harness.flights:
        harness.land()
        num_steps += harness.submit() is not None
    harness.judge()
    assert (num_steps, harness.num_ahead) == (9, 8)
    assert story(harness, 0).finish is FinishReason.LENGTH
    harness.check_empty()


def test_who_ends_by_length_with_the_step_under_way_does_not_go_ahead() -> None:
    harness = harness_of()
    for name, max_tokens in ((0, 2), (1, 4)):
        harness.add(new_sequence(name, max_tokens=max_tokens))
    batches = [harness.submit(), harness.submit()]
    assert [len(batch.rows) for batch in batches if batch is not None] == [2, 2]
    harness.land()
    third = harness.submitted()
    assert third.rows.tolist() == [1], "the other one has two tokens then"
    harness.finish()
    assert harness.num_surplus == 0


def test_who_ends_by_a_token_says_so_at_once_and_keeps_its_blocks_until_the_step_behind_is_back() -> None:
    plain = harness_of()
    harness = harness_of()
    new = new_sequence(0, max_tokens=40, stop_token_ids=(stop_of(plain, 0, 3),))
    harness.add(new)
    harness.add(new_sequence(1, max_tokens=6))
    engine = harness.engine
    for _ in range(3):
        harness.fill()
        harness.land()
    row = story(harness, 0).row
    assert story(harness, 0).finish is FinishReason.STOP
    assert engine.table.hold[row] & Hold.ENDED
    assert engine.table.held_blocks[row] > 0
    assert not engine.registry.cancel(new.request_id, 1), "it is not here any more"
    assert engine.registry.rows_of(0) == [story(harness, 1).row]
    assert engine.registry.add(new) is AddRefusal.DUPLICATE
    replayed = engine.registry.replay(new.request_id, 1, 0)
    assert replayed is not None
    assert (replayed[0].tolist(), replayed[1]) == (story(harness, 0).text, FinishReason.STOP)
    behind = harness.submit()
    assert behind is None or row not in behind.rows
    harness.land()
    assert engine.table.held_blocks[row] == 0
    assert row not in np.flatnonzero(engine.table.status)
    harness.finish()
    assert harness.num_surplus == 1
    assert len(story(harness, 0).text) == 3


def test_the_time_of_a_sequence_that_has_ended_is_not_over_once_more() -> None:
    plain, harness = harness_of(), harness_of()
    harness.add(new_sequence(0, max_tokens=30, stop_token_ids=(stop_of(plain, 0, 1),), expires_s=50.0))
    harness.add(new_sequence(1, max_tokens=30))
    harness.fill()
    harness.land()
    assert story(harness, 0).finish is FinishReason.STOP
    harness.now_s = 60.0
    assert harness.submit() is not None
    harness.finish()
    assert harness.engine.registry.num_cancelled == 0


def test_all_may_end_while_a_step_behind_them_is_under_way() -> None:
    plain = harness_of()
    harness = harness_of(eos_token_ids=(stop_of(plain, 0, 2),))
    harness.add(new_sequence(0, max_tokens=40))
    harness.finish()
    assert (harness.num_surplus, story(harness, 0).finish) == (1, FinishReason.STOP)


@pytest.mark.parametrize("case", ["somebody waits", "a prompt goes on", "memory is short", "a step has failed"])
def test_nobody_goes_ahead_where_there_is_something_to_decide(case: str) -> None:
    num_blocks = 5 if case == "memory is short" else 64
    harness = harness_of(num_blocks=num_blocks, scheduler="fcfs" if case == "somebody waits" else "chunked")
    num_prompt = {"a prompt goes on": 60, "memory is short": 7}.get(case, 5)
    harness.add(new_sequence(0, num_prompt=num_prompt, max_tokens=9))
    if case == "memory is short":
        harness.add(new_sequence(1, num_prompt=7, max_tokens=3))
    assert harness.submit() is not None
    if case == "somebody waits":
        harness.add(new_sequence(1, max_tokens=3))
    if case == "a step has failed":
        harness.land("bad luck")
        assert harness.submit() is not None, "it is tried again"
    assert harness.submit() is None
    harness.finish()


def test_nobody_goes_ahead_of_who_has_given_way_and_could_run() -> None:
    harness = harness_of()
    harness.add(new_sequence(0, max_tokens=9))
    harness.add(new_sequence(1, max_tokens=9, channel=1))
    harness.step()
    harness.engine.pause(1)
    harness.settle()
    batches = [harness.submit(), harness.submit()]
    assert [batch.rows.tolist() for batch in batches if batch is not None] == 2 * [[story(harness, 0).row]]
    harness.engine.resume(1)
    harness.land()
    assert harness.submit() is None
    harness.land()
    both = harness.submitted()
    assert len(both.rows) == 2
    harness.finish()


def test_a_step_behind_one_that_failed_changes_nothing() -> None:
    harness = harness_of()
    harness.add_all(3, max_tokens=8)
    harness.submit()
    assert harness.submit() is not None
    harness.land("bad luck")
    assert harness.num_ahead == 3
    again = harness.submitted()
    assert (again.tokens >= 0).all()
    harness.land()
    assert harness.num_stale == 3
    assert not any(each.text for each in harness.stories.values())
    harness.finish()


def test_who_is_cancelled_ends_when_the_last_of_its_steps_is_back() -> None:
    harness = harness_of()
    new = new_sequence(0, max_tokens=9)
    harness.add(new)
    harness.fill()
    assert harness.engine.registry.cancel(new.request_id, 1)
    harness.land()
    assert story(harness, 0).finish is FinishReason.NONE
    assert harness.submit() is None
    harness.land()
    assert (story(harness, 0).finish, story(harness, 0).text) == (FinishReason.CANCELLED, [])
    harness.check_empty()


@pytest.mark.parametrize("how", ["cancelled", "ended"])
def test_the_others_go_ahead_of_a_row_that_is_waited_for(how: str) -> None:
    plain, harness = harness_of(), harness_of()
    stop = stop_of(plain, 0, 1) if how == "ended" else 10_000
    new = new_sequence(0, max_tokens=30, stop_token_ids=(stop,))
    harness.add(new)
    harness.add(new_sequence(1, max_tokens=30))
    harness.fill()
    if how == "cancelled":
        harness.engine.registry.cancel(new.request_id, 1)
    harness.land()
    third = harness.submitted()
    assert (third.rows.tolist(), third.tokens.tolist()) == ([story(harness, 1).row], [OWN_SAMPLE])
    harness.finish()


def test_a_row_that_has_ended_is_not_counted_as_running_for_anybody_new() -> None:
    """Its row and blocks are given to others only when the step behind it is back."""
    plain = harness_of()
    harness = harness_of(num_blocks=12)
    harness.add(new_sequence(0, max_tokens=30, stop_token_ids=(stop_of(plain, 0, 2),)))
    for _ in range(2):
        harness.fill()
        harness.land()
    assert story(harness, 0).finish is FinishReason.STOP
    harness.add(new_sequence(1, num_prompt=30, max_tokens=10))
    assert harness.submit() is None
    harness.finish()


def test_without_overlap_nothing_goes_ahead() -> None:
    harness = harness_of(overlaps=False)
    harness.add(new_sequence(0, max_tokens=9))
    harness.submit()
    assert harness.submit() is None
    harness.drain()
    assert harness.num_ahead == 0


def test_the_executor_may_change_between_one_that_overlaps_and_one_that_does_not() -> None:
    harness = harness_of()
    harness.add(new_sequence(0, max_tokens=9))
    for _ in range(2):
        harness.submit()
        harness.land()
    capacity = KvCapacity(64, harness.engine.config.block_size)
    harness.engine.leave_executor(harness.now_s)
    harness.engine.enter_executor(capacity, 2)
    assert not harness.engine.config.overlaps
    harness.engine.leave_executor(harness.now_s)
    harness.engine.enter_executor(capacity, 1, overlaps=True)
    assert harness.engine.config.overlaps


class Watched:
    """A policy, how often it was asked, and whether its decisions may hold."""

    def __init__(self, policy: Scheduler, *, may_hold: bool) -> None:
        self._policy, self._may_hold = policy, may_hold
        self.reorders, self.num_asked = policy.reorders, 0
        self.best_effort_gives_way = policy.best_effort_gives_way

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self.num_asked += 1
        output = self._policy.schedule(view)
        return output if self._may_hold else replace(output, holds=False)


def steps_of(policy: Watched, seed: int, *, overlaps: bool) -> list[tuple[list[int], list[int]]]:
    """Return the rows and tokens of each step of a crowded life; somebody is cancelled now and then."""
    random = np.random.default_rng(seed)
    harness = make_harness(policy, num_blocks=22, max_batch_rows=5, overlaps=overlaps, depth=2 if overlaps else 1)
    steps = list[tuple[list[int], list[int]]]()
    for name in range(14):
        num_prompt, max_tokens = int(random.integers(1, 30)), int(random.integers(1, 40))
        harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=max_tokens))
        for _ in range(int(random.integers(0, 6))):
            while (batch := harness.submit()) is not None:
                steps.append((batch.rows.tolist(), batch.num_tokens.tolist()))
            if harness.flights:
                harness.land()
        if name % 5 == 4:
            harness.cancel(harness.live()[0])
    harness.finish()
    return steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["fcfs", "chunked"])
def test_a_decision_that_holds_is_the_one_that_the_policy_would_take_again(name: str, seed: int) -> None:
    asked, held = (Watched(make_scheduler(name), may_hold=may_hold) for may_hold in (False, True))
    assert steps_of(held, seed, overlaps=False) == steps_of(asked, seed, overlaps=False)
    assert held.num_asked < asked.num_asked


@pytest.mark.parametrize("name", ["fcfs", "chunked", "andes"])
def test_steps_go_ahead_while_others_wait_for_memory(name: str) -> None:
    harness = harness_of(scheduler=name, num_blocks=12)
    harness.add(new_sequence(0, num_prompt=20, max_tokens=20))
    harness.add(new_sequence(1, num_prompt=30, max_tokens=10))
    for _ in range(9):
        harness.fill()
        harness.land()
    assert len(harness.engine.table.waiting) == 1
    assert harness.num_ahead >= 6
    harness.finish()


def test_who_comes_while_a_decision_holds_is_seen_at_once() -> None:
    harness = make_harness("chunked", num_blocks=16)
    harness.add(new_sequence(0, num_prompt=20, max_tokens=40))
    harness.add(new_sequence(1, num_prompt=50, max_tokens=10))
    for _ in range(5):
        harness.step()
    assert len(harness.engine.table.waiting) == 1
    assert harness.cancel(story(harness, 1))
    harness.add(new_sequence(2, num_prompt=4, max_tokens=3))
    assert sorted(harness.stepped().num_tokens.tolist()) == [1, 4]
    harness.finish()


def test_who_waits_for_blocks_comes_in_when_a_pin_gives_them_back() -> None:
    harness = make_harness("chunked", num_blocks=16, prefix_caching=False)
    row = harness.add(new_sequence(0, num_prompt=24, max_tokens=2))
    harness.add(new_sequence(1, num_prompt=4, max_tokens=40))
    harness.step()
    harness.pin_full_blocks("somebody", row)
    harness.step_until_end_of(1000)
    harness.add(new_sequence(2, num_prompt=30, max_tokens=4))
    for _ in range(3):
        assert harness.stepped().num_tokens.tolist() == [1]
    harness.unpin("somebody")
    assert sorted(harness.stepped().num_tokens.tolist()) == [1, 30]
    harness.finish()


@pytest.mark.virtual_time
@pytest.mark.parametrize("overlaps", [False, True])
async def test_a_timer_wakes_the_loop_when_everybody_was_paused(*, overlaps: bool) -> None:
    async with live_engine(scheduler=Napping(), overlaps=overlaps) as live:
        news = [new_sequence(name, num_prompt=5, max_tokens=8) for name in range(3)]
        for new in news:
            live.add(new)
        await live.until_idle()
        for new in news:
            assert live.texts[new.stream] == live.undisturbed(new)
            gaps_s = np.diff(live.heard_s[new.stream])
            assert sorted(set(gaps_s.round(1).tolist())) == [STEP_S, 60.0 + STEP_S]


async def test_a_timer_wakes_the_loop_of_a_real_clock_too() -> None:
    napping = Napping(nap_s=0.05)
    async with live_engine(scheduler=napping, cost=per_token(1e-4)) as live:
        new = live.add(new_sequence(0, num_prompt=5, max_tokens=8))
        await live.until_idle()
        assert live.texts[new.stream] == live.undisturbed(new)
        assert napping.num_naps == 2
