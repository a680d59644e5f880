"""Turns: whose turn is over gives way to who waits, in order, and nobody is forgotten."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.scheduling.round_robin import QUANTUM_TOKENS, RoundRobinScheduler
from services.worker.scheduling.view import PreemptHow, SchedulerView
from services.worker.sequences.config import AddRefusal
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import make_harness
from tests.support.engine_views import check_contract, decoding, host_view, make_view, parked, prefilling


def decide(view: SchedulerView, *, how: PreemptHow = PreemptHow.RECOMPUTE) -> tuple[list[int], list[int]]:
    """Return who gives way, all in one way, and who is in the step; turns are of 5 tokens.

    A row of `decoding(n)` has n outputs, all of them in its turn: the policy meets it running.
    """
    output = RoundRobinScheduler(5).schedule(view)
    check_contract(view, output)
    assert (output.preempt_how == how).all()
    return output.preempt.tolist(), output.rows.tolist()


def test_a_turn_is_as_long_as_in_the_source() -> None:
    assert QUANTUM_TOKENS == 50


def test_who_had_its_turn_gives_way_and_the_first_in_line_comes_in() -> None:
    """Rows 0 and 2 are over their turn. Row 3 needs ceil(6 / 4) = 2 blocks beside headroom: row 0 gives 2."""
    view = make_view(running=[decoding(6), decoding(4), decoding(7)], waiting=[parked(5)], free_blocks=2)
    assert decide(view, how=PreemptHow.RECOMPUTE) == ([0], [3])


def test_as_few_as_make_it_fit_give_way() -> None:
    """Row 3 needs ceil(14 / 4) = 4 of 2 free blocks, less 3 for headroom: row 0 brings 2 + 1, row 1 the rest."""
    view = make_view(running=[decoding(6), decoding(6), decoding(6)], waiting=[parked(13)], free_blocks=2)
    assert decide(view) == ([0, 1], [3])


def test_nobody_gives_way_for_who_would_not_fit_even_then() -> None:
    """Only row 0 is over its turn, and 3 blocks more are not the 7 that row 2 needs."""
    view = make_view(running=[decoding(6), decoding(3)], waiting=[parked(25)], free_blocks=2)
    assert decide(view) == ([], [0, 1])


def test_nobody_gives_way_while_there_is_room_or_nobody_waits() -> None:
    assert decide(make_view(running=[decoding(9), decoding(9)], waiting=[parked(3)])) == ([], [2])
    assert decide(make_view(running=[decoding(9), decoding(9)], free_blocks=0)) == ([], [0, 1])


def test_nobody_gives_way_within_its_turn() -> None:
    assert decide(make_view(running=[decoding(4), decoding(3)], waiting=[parked(5)], free_blocks=1)) == ([], [0, 1])


def test_a_place_in_the_batch_is_shared_by_turns_too() -> None:
    view = make_view(running=[decoding(6), decoding(6)], waiting=[parked(3)], max_batch_rows=2)
    assert decide(view) == ([0], [2])


def test_a_prefill_under_way_is_not_interrupted() -> None:
    view = make_view(running=[prefilling(20, 8), decoding(9)], waiting=[parked(5)], free_blocks=3)
    assert decide(view) == ([], [0])


def test_with_a_host_turns_are_taken_by_swapping_and_nobody_else_waits_for_the_copy() -> None:
    view = make_view(running=[decoding(6), decoding(4)], waiting=[parked(5)], free_blocks=2, host=host_view())
    assert decide(view, how=PreemptHow.SWAP) == ([0], [1])


def served_by_turns(num_sequences: int, *, num_host_blocks: int = 0) -> list[int]:
    """Return who says a token, in order. All come at once; 10 blocks of 4 hold two of them; turns of 4 tokens."""
    harness = make_harness(
        RoundRobinScheduler(quantum_tokens=4), num_blocks=10, prefix_caching=False, num_host_blocks=num_host_blocks
    )
    for name in range(num_sequences):
        added = harness.add(new_sequence(name, num_prompt=8, max_tokens=12, arrival_s=0.0))
        assert not isinstance(added, AddRefusal)
    said: list[int] = []
    lengths = [0] * num_sequences
    while harness.engine.table.num_sequences:
        harness.step()
        for name in range(num_sequences):
            length = len(harness.stories[1000 + name].text)
            said += [name] * (length - lengths[name])
            lengths[name] = length
    harness.judge()
    harness.check_empty()
    return said


@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_everybody_has_had_a_turn_before_anybody_ends(num_host_blocks: int) -> None:
    """First come, first served would end two sequences of 12 tokens before the third says a word."""
    said = served_by_turns(5, num_host_blocks=num_host_blocks)
    assert [said.count(name) for name in range(5)] == [12] * 5
    first = [said.index(name) for name in range(5)]
    third_turn = [np.flatnonzero(np.array(said) == name)[8] for name in range(5)]
    assert max(first) < min(third_turn)


def test_turns_go_round_in_order_of_arrival() -> None:
    said = served_by_turns(4)
    assert [name for i, name in enumerate(said) if name not in said[:i]] == [0, 1, 2, 3]


def test_nobody_starves_while_others_keep_coming() -> None:
    """A new sequence every third step, more than fit: each that came in the first half ends before the stream does."""
    harness = make_harness(RoundRobinScheduler(quantum_tokens=4), num_blocks=16, max_sequences=400, max_batch_rows=4)
    for step in range(600):
        if step % 3 == 0 and step < 300:
            harness.add(new_sequence(step, num_prompt=6, max_tokens=9, arrival_s=harness.now_s))
        harness.step()
    early = [story for stream, story in harness.stories.items() if stream < 1000 + 60]
    assert len(early) == 20
    assert all(len(story.text) == 9 for story in early)
    harness.judge()
