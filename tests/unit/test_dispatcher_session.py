"""One session by itself: parts in any order, what is missing, and what is counted."""

from __future__ import annotations

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.session import NewRequest, Session
from shared.ids import DispatcherId, Incarnation, RequestId, StreamId
from shared.messages.request import pack_token_ids
from shared.types import FinishReason, SamplingParams

NONE, LENGTH = FinishReason.NONE, FinishReason.LENGTH


def new_session(gaps: GapHistogram | None = None) -> Session:
    request = NewRequest(
        RequestId("r"), pack_token_ids([1, 2, 3]), SamplingParams(max_tokens=10), arrival_s=100.0, limit_s=60.0
    )
    return Session(request, StreamId(7), gaps or GapHistogram())


def test_a_request_counts_its_prompt_and_all_that_it_may_say() -> None:
    assert new_session().request.num_prompt_tokens == 3
    assert new_session().request.num_tokens == 13


def test_a_submission_says_how_old_the_request_is_how_long_it_has_left_and_what_it_has() -> None:
    session = new_session()
    session.receive(0, [5, 6], NONE, 101.0)
    submit = session.next_submit(DispatcherId("d0"), Incarnation(3), 110.0)
    assert (submit.attempt, submit.age_s, submit.remaining_s) == (1, 10.0, 50.0)
    assert submit.generated_ids().tolist() == [5, 6]
    assert session.next_submit(DispatcherId("d0"), Incarnation(3), 170.0).remaining_s == 0.001


def test_parts_are_taken_in_order_and_a_gap_is_told_as_long_as_there_is_one() -> None:
    session = new_session()
    assert session.receive(0, [10], NONE, 101.0)
    assert not session.receive(4, [14], LENGTH, 101.0)
    assert not session.receive(2, [12], NONE, 101.0)
    assert not session.receive(1, [11], NONE, 101.0), "token 3 is still missing"
    assert session.tokens == [10, 11, 12]
    assert session.receive(2, [12, 13], NONE, 102.0)
    assert session.tokens == [10, 11, 12, 13, 14]
    assert session.finish is LENGTH
    assert session.ended.is_set()


def test_gaps_are_counted_between_tokens_and_not_before_the_first() -> None:
    """Tokens at 101.0, two at 101.5 and one at 103.5: gaps of 0.5, 0 and 2 s."""
    gaps = GapHistogram()
    session = new_session(gaps)
    session.receive(0, [1], NONE, 101.0)
    session.receive(1, [2, 3], NONE, 101.5)
    session.receive(3, [4], NONE, 103.5)
    _, number, total_s = gaps.snapshot()
    assert (number, total_s) == (3, 2.5)
    assert session.first_token_s == 101.0
