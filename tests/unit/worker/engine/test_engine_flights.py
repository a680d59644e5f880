"""Chunks of a prompt in several batches in flight: who may be extended, what is stale, and who ends when."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.scheduling.view import SchedulerOutput, SchedulerView
from services.worker.sequences.table import Hold
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness


class Pieces:
    """Gives everybody who may run as many tokens as it is told, step by step; decodes whoever decodes."""

    reorders = best_effort_gives_way = False

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        columns = view.columns
        size = self.sizes.pop(0) if self.sizes else 100
        rows = np.concatenate([view.running, view.extensible, view.waiting])
        begins = np.concatenate([columns.num_computed[view.running], view.extensible_begins, view.waiting * 0])
        left = (columns.num_prompt + columns.num_output)[rows] - begins
        none = rows[:0]
        return SchedulerOutput(
            rows, np.minimum(left, size).astype(np.int32), none, none.astype(np.uint8), none, "pieces"
        )


def harness_of(
    *sizes: int, num_lanes: int = 3, prompts: tuple[int, ...] = (20,), num_submitted: int = 0
) -> EngineHarness:
    """Sequences whose prompts are cut into such pieces, and so many batches in flight."""
    harness = make_harness(
        Pieces(*sizes),
        num_blocks=60,
        num_lanes=num_lanes,
        max_batch_tokens=200,
        prefix_caching=False,
        depth=num_lanes,
        num_stages=3,
    )
    for name, num_prompt in enumerate(prompts):
        harness.add(new_sequence(name, num_prompt=num_prompt, max_tokens=5, ignore_eos=True))
    for _ in range(num_submitted):
        harness.submitted()
    return harness


def starts(harness: EngineHarness) -> list[list[int]]:
    return [batch.start.tolist() for batch in harness.flights]


def finish_of(harness: EngineHarness) -> FinishReason:
    return next(iter(harness.stories.values())).finish


def test_a_prompt_goes_on_until_all_of_it_is_in_flight() -> None:
    """20 tokens as 8, 8 and 4; the last piece samples, so there is nothing to launch behind it."""
    harness = harness_of(8, 8, 8, num_lanes=4)
    harness.fill()
    assert starts(harness) == [[0], [8], [16]]
    assert [bool(batch.sample[0]) for batch in harness.flights] == [False, False, True]
    assert harness.engine.flights.rows.tolist() == [0]
    harness.finish()


def test_with_one_lane_nobody_is_extended() -> None:
    harness = make_harness(Pieces(8, 8), num_blocks=60, max_batch_tokens=200, depth=3)
    harness.add(new_sequence(0, num_prompt=20, max_tokens=5))
    assert harness.submit() is not None
    assert harness.submit() is None


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_was_launched_behind_a_failed_chunk_is_stale_and_computed_again(failing: int) -> None:
    """Three chunks of one prompt beside a second sequence; one fails: its like and all behind are computed anew."""
    harness = harness_of(8, 8, 8, prompts=(24, 30), num_submitted=3)
    assert starts(harness) == [[0, 0], [8, 8], [16, 16]]
    table = harness.engine.table
    for number in range(3):
        harness.land("bad luck" if number == failing else None)
        assert table.num_computed[0] == min(number + 1, failing) * 8
    assert harness.num_stale == 2 * (2 - failing)
    assert not table.num_output[0], "a token sampled behind garbage is nobody's"
    harness.finish()
    assert {story.finish for story in harness.stories.values()} == {FinishReason.LENGTH}


def test_nothing_goes_ahead_of_what_is_tried_again() -> None:
    harness = harness_of(8, 8, 4, 4, 4, num_submitted=2)
    harness.land("bad luck")
    assert starts(harness) == [[8]]
    again = harness.submitted()
    assert again.start.tolist() == [0]
    assert harness.submit() is None, "not before it has come back"
    harness.land()  # the stale one
    assert harness.submit() is None
    harness.land()
    assert harness.engine.table.num_computed[0] == 8
    harness.finish()


def test_a_cancelled_prompt_ends_with_the_last_batch_that_holds_it() -> None:
    harness = harness_of(8, 8, num_submitted=2)
    story = next(iter(harness.stories.values()))
    harness.cancel(story)
    assert harness.submit() is None, "nothing more is launched for it"
    harness.land()
    assert finish_of(harness) is FinishReason.NONE
    assert harness.engine.table.hold[story.row] & Hold.CANCELLED
    harness.land()
    assert finish_of(harness) is FinishReason.CANCELLED
    harness.check_empty()


@pytest.mark.parametrize("lands_first", [False, True])
def test_a_cancel_beside_a_stale_chunk_and_a_retry_ends_once(lands_first: bool) -> None:
    harness = harness_of(8, 8, num_submitted=2)
    harness.land("bad luck")
    story = next(iter(harness.stories.values()))
    if lands_first:
        harness.cancel(story)
        harness.land()
    else:
        harness.submit()
        harness.cancel(story)
        harness.land()
        assert finish_of(harness) is FinishReason.NONE, "it is being tried again"
        harness.land()
    assert finish_of(harness) is FinishReason.CANCELLED
    harness.check_empty()


def test_a_lone_guilty_prompt_is_given_up_although_a_chunk_of_it_succeeds_meanwhile() -> None:
    """The stale chunk comes back well: that says nothing of the one that fails."""
    harness = harness_of(8, 8, num_submitted=2)
    harness.land("guilty")
    harness.submit()
    harness.land()
    harness.land("guilty")
    assert finish_of(harness) is FinishReason.ERROR
    harness.check_empty()


def test_a_paused_prompt_is_not_extended() -> None:
    harness = harness_of(8, 8)
    harness.submit()
    harness.engine.pause(0)
    assert harness.submit() is None
    harness.engine.resume(0)
    second = harness.submitted()
    assert second.start.tolist() == [8]
    harness.finish()
