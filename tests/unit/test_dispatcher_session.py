"""One session by itself: parts in any order, what is missing, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence

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


def test_the_short_way_of_the_next_token_does_what_the_long_one_does() -> None:
    class Shown:
        def __init__(self) -> None:
            self.parts: list[tuple[list[int], FinishReason, float]] = []

        def on_tokens(self, token_ids: Sequence[int], finish: FinishReason, now_s: float) -> bool:
            self.parts.append((list(token_ids), finish, now_s))
            return len(self.parts) < 4

    def outcome(*, is_short: bool) -> tuple[object, ...]:
        gaps, shown = GapHistogram(), Shown()
        session = new_session(gaps)
        session.attach(shown, 100.5)
        for index, now_s in enumerate((101.0, 101.5, 103.5, 104.0)):
            taken = (
                session.receive_next(index, index + 5, now_s)
                if is_short
                else session.receive(index, [index + 5], NONE, now_s)
            )
            assert taken
        counts = (session.num_delivered, session.first_token_s, session.last_token_s, session.progress_s)
        return session.tokens, shown.parts, gaps.snapshot(), counts, session.was_stopped, session.ended.is_set()

    assert outcome(is_short=True) == outcome(is_short=False)


def test_the_short_way_refuses_what_is_not_the_next_token_and_leaves_all_as_it_was() -> None:
    session = new_session()
    assert not session.receive_next(1, 5, 101.0), "token 0 is missing"
    session.receive(1, [6], NONE, 101.0)
    assert not session.receive_next(0, 5, 101.0), "a later part is held"
    assert session.tokens == []
    assert session.first_token_s is None
