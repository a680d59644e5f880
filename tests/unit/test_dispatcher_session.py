"""One session by itself: parts in any order, what is missing, and what is counted."""

from __future__ import annotations

import asyncio

import pytest

from services.dispatcher.session import session as session_module
from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import FailureCode, NewRequest
from services.dispatcher.session.session import Session
from shared.ids import NOBODY, DispatcherId, Incarnation, RequestId, StreamId, WorkerId
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


def test_a_part_that_says_less_than_is_known_ends_nothing() -> None:
    session = new_session()
    session.receive(0, [10, 11, 12], NONE, 101.0)
    assert session.receive(0, [10, 11], LENGTH, 102.0) is True
    assert (session.tokens, session.finish, session.ended.is_set()) == ([10, 11, 12], NONE, False)
    assert session.last_token_s == 101.0


def test_of_two_early_parts_with_one_beginning_the_longer_one_is_kept() -> None:
    session = new_session()
    assert session.receive(1, [11, 12], NONE, 101.0) is False
    assert session.receive(1, [11], NONE, 101.0) is False
    assert session.receive(3, [13], NONE, 101.0) is False
    assert session.receive(3, [13, 14], LENGTH, 101.0) is False
    assert session.receive(0, [10], NONE, 102.0) is True
    assert session.tokens == [10, 11, 12, 13, 14]
    assert session.finish is LENGTH


def test_no_more_early_parts_are_held_than_may_be_but_a_held_one_may_get_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "MAX_HELD_PARTS", 2)
    session = new_session()
    for first_index in (2, 4, 6):
        assert session.receive(first_index, [10 + first_index], NONE, 101.0) is False
    assert sorted(session.held) == [2, 4]
    session.receive(4, [14, 15], NONE, 101.0)
    assert session.held[4][0] == [14, 15]


def has_started(session: Session) -> bool:
    return session.history.has_started


def has_progressed(session: Session) -> bool:
    return session.has_progressed


def test_the_first_sign_of_work_counts_once_and_for_the_attempt() -> None:
    session = new_session()
    assert not has_started(session)
    assert not session.is_suspect
    session.begin(WorkerId("a"), 1, 100.5)
    assert not has_started(session)
    session.start(101.0)
    session.accept(WorkerId("a"), 101.5)
    session.start(102.0)
    assert has_started(session)
    assert (session.admitted_s, session.started_s) == (101.0, 101.0)
    session.begin(WorkerId("b"), 2, 103.0)
    assert not has_started(session)
    session.start(104.0)
    assert session.started_s == 101.0, "the request started when its first attempt did"


def test_an_attempt_has_progressed_when_it_gave_a_token_itself() -> None:
    session = new_session()
    seen = [has_progressed(session)]
    session.receive(0, [1], NONE, 101.0)
    seen.append(has_progressed(session))
    session.begin(WorkerId("b"), 2, 102.0)
    seen.append(has_progressed(session))
    session.receive(1, [2], NONE, 103.0)
    seen.append(has_progressed(session))
    assert seen == [False, True, False, True]


def test_a_new_attempt_begins_without_the_faults_of_the_one_before() -> None:
    session = new_session()
    session.begin(WorkerId("a"), 1, 101.0)
    session.num_lost_replies, session.is_suspect = 3, True
    session.history.incarnation = Incarnation(7)
    session.receive(2, [12], NONE, 101.0)
    session.begin(WorkerId("b"), 2, 103.0)
    assert (session.worker_id, session.attempt) == ("b", 2)
    assert (session.num_lost_replies, session.is_suspect, session.held) == (0, False, {})
    assert session.history.incarnation == NOBODY
    assert (session.progress_s, session.asked_s) == (103.0, 103.0)


def test_whoever_waits_for_progress_hears_of_tokens_of_the_end_and_of_giving_up() -> None:
    for happen in (
        lambda session: session.receive(0, [1], NONE, 101.0),
        lambda session: session.receive(0, [], LENGTH, 101.0),
        lambda session: session.fail(FailureCode.INTERNAL),
        lambda session: session.fence(),
    ):
        session = new_session()
        session.begin(WorkerId("a"), 1, 100.5)
        session.history.on_progress = asyncio.Event()
        happen(session)
        assert session.history.on_progress.is_set()


def test_a_fenced_session_belongs_to_no_worker_and_no_attempt() -> None:
    session = new_session()
    session.begin(WorkerId("a"), 3, 100.5)
    session.receive(1, [11], NONE, 101.0)
    session.fence()
    assert (session.worker_id, session.attempt, session.held) == (None, 0, {})
