"""What the dispatcher makes of the monitor's views and of its own submissions in between."""

from __future__ import annotations

from math import inf

import pytest

from services.dispatcher.policy.placement import Placed
from services.dispatcher.session.gaps import BOUNDS_S, GapHistogram
from services.dispatcher.state import UNNAMED_LIMIT_S, ClusterState
from shared.ids import WorkerId
from shared.messages.plan import FilledNext, Filling
from shared.messages.report import Liveness, WorkerPhase, WorkerStatus
from shared.messages.report_parts import DecodeCost, MigrationPart
from tests.support.fake_worker import make_status
from tests.support.statuses import make_view

W0 = WorkerId("w0")


def make_state(*statuses: WorkerStatus, now_s: float = 0.0) -> ClusterState:
    state = ClusterState("tiny", step_limit_s=10.0)
    state.apply(make_view(*statuses), now_s)
    return state


def load_of(state: ClusterState) -> tuple[int, int]:
    """Sequences, and KV blocks of 16 tokens."""
    (load,) = state.loads()
    return load.num_sequences, load.num_demanded_blocks


def test_a_process_in_place_of_one_that_had_not_stopped_is_a_restart() -> None:
    """w0 is killed and comes again; then it stops in order and comes again, which is none; w1 stays."""
    state, others = make_state(make_status(pid=1), make_status("w1")), make_status("w1")
    for status in (
        make_status(pid=1),
        make_status(pid=2, phase=WorkerPhase.LOADING),
        make_status(pid=2),
        make_status(pid=2, phase=WorkerPhase.STOPPED),
        make_status(pid=3),
    ):
        state.apply(make_view(status, others), 1.0)
    assert state.num_restarts == {W0: 1}


def test_own_submissions_count_until_a_report_that_was_made_after_them() -> None:
    """Submitted at 1.0 and 2.0. A view at 2.5 with a report 1 s old (made at 1.5) contains the first one only."""
    state = make_state(make_status())
    state.submitted(Placed(W0, ""), 33, 0, 1.0)
    state.submitted(Placed(W0, ""), 10, 6, 2.0)
    assert load_of(state) == (2, 4)
    state.apply(make_view(make_status(num_running=1, num_used_blocks=3, age_s=1.0)), 2.5)
    assert load_of(state) == (2, 4)
    state.apply(make_view(make_status(num_running=2, num_used_blocks=4)), 3.0)
    assert load_of(state) == (2, 4)


def test_who_is_filled_next_is_known_until_somebody_else_is_whatever_views_come() -> None:
    def told(state: ClusterState) -> list[tuple[tuple[int, float], ...]]:
        return [load.next_for for load in state.loads()]

    def filling(*by_size: tuple[int, str]) -> Filling:
        return Filling(by_size=tuple(FilledNext(min_tokens=least, worker_id=WorkerId(name)) for least, name in by_size))

    statuses = [make_status(worker_id=name) for name in ("w0", "w1")]
    state = make_state(*statuses)
    assert told(state) == [(), ()]
    state.note_filling(filling((1, "w1"), (100, "w0"), (200, "w1"), (300, "gone")))
    expected: list[tuple[tuple[int, float], ...]] = [((100, 200),), ((1, 100), (200, 300))]
    assert told(state) == expected
    state.apply(make_view(*statuses), 1.0)
    assert told(state) == expected
    state.note_filling(filling((50, "w0")))
    assert told(state) == [((50, inf),), ()]


def test_own_requests_wait_until_they_begin_or_a_report_says_so() -> None:
    """Sent at 1.0 and 2.0; the first begins at 2.5. A report of 1.5 has that one waiting, one of 3.0 the second."""

    def waiting(state: ClusterState) -> tuple[int, int]:
        (load,) = state.loads()
        return load.num_waiting, load.max_waiting

    state = make_state(make_status(max_waiting=8))
    state.submitted(Placed(W0, ""), 33, 0, 1.0)
    counted = state.submitted(Placed(W0, ""), 10, 6, 2.0)
    assert waiting(state) == (2, 8)
    state.began(W0, 2.5)
    assert waiting(state) == (1, 8)
    state.apply(make_view(make_status(num_waiting=1, max_waiting=8, age_s=1.1)), 2.6)
    assert waiting(state) == (1, 8)
    state.apply(make_view(make_status(num_running=1, num_waiting=1, max_waiting=4)), 3.0)
    assert waiting(state) == (1, 4)
    state.began(W0, 3.1)
    state.ended(counted, 0, 3.1)
    assert waiting(state) == (0, 4)


def test_of_a_request_that_has_left_all_that_the_report_had_is_taken_off() -> None:
    """Sent at 0.0 with 32 tokens, 96 tokens of output at 3.0; at 2.0 it had 64 of them: (32 + 64) / 16 = 6 blocks."""
    state = make_state(make_status())
    counted = state.submitted(Placed(W0, ""), 32, 0, 0.0)
    state.apply(make_view(make_status(num_running=2, num_used_blocks=10)), 2.0)
    state.ended(counted, 96, 3.0)
    assert load_of(state) == (1, 4)
    state.apply(make_view(make_status(num_running=1, num_used_blocks=4)), 3.5)
    assert load_of(state) == (1, 4)


def test_output_that_the_report_does_not_have_is_not_taken_off() -> None:
    """The same request, sent after the report: it adds nothing and takes nothing, however much it said."""
    state = make_state(make_status(num_running=1, num_used_blocks=4))
    state.ended(state.submitted(Placed(W0, ""), 32, 0, 1.0), 96, 3.0)
    assert load_of(state) == (1, 4)


def test_output_from_before_an_attempt_is_there_from_its_beginning() -> None:
    """16 of prompt and 64 of output came along at 0.0; of 32 more at 2.0 half were there at 1.0: 6 blocks in all."""
    state = make_state(make_status())
    counted = state.submitted(Placed(W0, ""), 16, 64, 0.0)
    assert load_of(state) == (1, 5)
    state.apply(make_view(make_status(num_running=2, num_used_blocks=10)), 1.0)
    state.ended(counted, 96, 2.0)
    assert load_of(state) == (1, 4)


def test_computing_that_waits_is_what_the_report_leaves_and_what_was_sent_since() -> None:
    """5 blocks of 16 tokens at 10 ms, then 33 tokens more; a group of two computes in half the time."""
    for num_stages, expected_s in ((1, 1.13), (2, 0.565)):
        state = make_state(make_status(num_uncomputed_blocks=5, token_s=0.01, num_stages=num_stages))
        state.submitted(Placed(W0, ""), 33, 0, 1.0)
        (load,) = state.loads()
        assert load.waiting_s == pytest.approx(expected_s)


def test_a_step_costs_what_the_worker_says_as_much_longer_as_prompts_make_it() -> None:
    """16 ms for 100 blocks of 16 tokens, and 4 ms: while steps take 30 ms, each part is half as long again."""
    cost = DecodeCost(step_s=0.002, sequence_s=0.001, kv_token_s=1e-5)
    for step_time_s, factor in ((0.0, 1.0), (0.02, 1.0), (0.03, 1.5)):
        status = make_status(num_running=2, num_used_blocks=100, decode_cost=cost, step_time_s=step_time_s)
        (load,) = make_state(status).loads()
        assert load.decode_cost.of(7, 1000) == pytest.approx(factor * 0.019)


def test_memory_is_asked_for_by_prompts_under_way_and_by_kv_on_the_host_or_beyond_the_memory() -> None:
    """Demanded are only prompts that wait; uncomputed is neither KV on the host nor what the memory has no room for."""
    for demanded, uncomputed in ((3, 8), (8, 3)):
        status = make_status(num_used_blocks=20, num_demanded_blocks=demanded, num_uncomputed_blocks=uncomputed)
        assert load_of(make_state(status)) == (0, 28)


def test_who_comes_with_its_kv_is_there() -> None:
    """So the worker is in use, whoever else has gone."""
    status = make_status(num_used_blocks=4, migration=MigrationPart(num_fetching=1))
    assert load_of(make_state(status)) == (1, 4)


def test_a_worker_that_is_not_known_is_not_counted() -> None:
    state = make_state(make_status(num_running=1, num_used_blocks=4))
    state.ended(state.submitted(Placed(WorkerId("nobody"), ""), 32, 0, 1.0), 9, 2.0)
    assert load_of(state) == (1, 4)


@pytest.mark.parametrize(
    ("fields", "ready"),
    [
        ({}, True),
        ({"liveness": Liveness.SUSPECT}, True),
        ({"liveness": Liveness.DEAD}, False),
        ({"phase": WorkerPhase.DRAINING}, False),
        ({"phase": WorkerPhase.STOPPED}, False),
        ({"phase": WorkerPhase.LOADING}, False),
        ({"group": "w0", "num_stages": 2}, True),
        ({"group": "w9", "stage": 1, "num_stages": 2}, False),
    ],
)
def test_a_worker_is_ready_when_it_is_loaded_not_known_to_be_dead_and_no_stage_of_another_one(
    fields: dict[str, object], ready: bool
) -> None:
    state = make_state(make_status(**fields))  # type: ignore[arg-type]  # a builder with keyword defaults
    assert state.loads()[0].ready is ready
    assert state.num_ready == ready


def test_the_largest_request_is_what_every_ready_worker_holds() -> None:
    small = make_status("a", num_blocks=10, block_size=16, max_model_len=512)
    assert make_state(small, make_status("b")).max_request_tokens(4096) == 160
    assert make_state(make_status("b")).max_request_tokens(4096) == 512
    assert make_state(make_status("b"), make_status("c", stage=1, num_blocks=5)).max_request_tokens(4096) == 512
    shorter = make_status("c", stage=1, num_blocks=0, max_model_len=300)
    assert make_state(make_status("b"), shorter).max_request_tokens(4096) == 300, "answers may go on there"
    assert make_state().max_request_tokens(4096) == 4096


def test_steps_that_stand_still_make_a_worker_lost_only_while_sequences_could_run_and_views_come() -> None:
    stands, steps = (make_status(num_running=2, num_runnable=1, num_steps=number) for number in (5, 6))
    state = make_state(stands)
    assert state.apply(make_view(stands), 10.0) == []
    assert state.num_ready == 1  # no view since 10.0: nobody is judged by his silence
    assert state.apply(make_view(stands), 10.5) == [W0]
    assert state.num_ready == 0
    assert state.apply(make_view(steps), 11.0) == []
    assert state.apply(make_view(make_status(num_running=2, num_runnable=0, num_steps=6)), 99.0) == []
    waits = make_status(num_preempted=3, num_runnable=3, num_steps=6)
    assert state.apply(make_view(waits), 100.0) == []
    assert state.apply(make_view(waits), 109.1) == [W0], "all that it had gave way, and nobody goes on"


def test_nothing_is_placed_on_a_worker_whose_steps_are_held_up_and_requests_wait_for_it() -> None:
    state = make_state(make_status(held="plan 8"))
    assert not state.loads()[0].ready
    assert state.num_ready == 1
    state.apply(make_view(make_status()), 1.0)
    assert state.loads()[0].ready


def test_gaps_are_counted_in_the_bucket_whose_border_they_do_not_exceed() -> None:
    gaps = GapHistogram()
    for gap_s, count in ((0.001, 1), (0.0011, 2), (0.05, 3), (99.0, 4)):
        gaps.add(gap_s, count)
    cumulative, number, total_s = gaps.snapshot()
    at = dict(zip(BOUNDS_S, cumulative, strict=True))
    assert (at[0.001], at[0.0025], at[0.05], at[10]) == (1, 3, 6, 6)
    assert number == 10
    assert total_s == pytest.approx(0.001 + 2 * 0.0011 + 3 * 0.05 + 4 * 99.0)
    assert gaps.snapshot()[1] == 10


def test_a_worker_that_views_do_not_name_counts_for_a_while_unless_its_end_was_shown() -> None:
    """A new monitor names nobody at first. Reports are made when their view comes, here: last at 1.0."""
    ended = [make_status("b", liveness=Liveness.DEAD), make_status("c", phase=WorkerPhase.STOPPED)]
    state = make_state(make_status("a"), *ended, make_status("d"), now_s=1.0)
    state.submitted(Placed(WorkerId("a"), ""), 16, 0, 2.0)
    other = make_status("d", model="another")
    for now_s, names in ((3.0, ["a"]), (1.0 + UNNAMED_LIMIT_S - 0.1, ["a"]), (1.0 + UNNAMED_LIMIT_S, [])):
        assert not state.apply(make_view(other), now_s)
        assert [load.worker_id for load in state.loads()] == names
        assert state.num_ready == len(names)
        assert [load.num_sequences for load in state.loads()] == [1] * len(names)
