"""One session by itself: parts in any order, what is missing, and what is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.session import session as session_module
from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import FailureCode, NewRequest, Sender
from services.dispatcher.session.session import MAX_HELD_PARTS, Session
from services.dispatcher.session.standing import num_unread, stall_s
from services.dispatcher.session.submission import next_submit
from services.dispatcher.session.table import MAX_STREAM, SessionTable
from shared.api_keys import Tier
from shared.ids import NOBODY, DispatcherId, Incarnation, RequestId, StreamId, WorkerId
from shared.messages.request import pack_token_ids
from shared.stream_extras import TokenLogprob
from shared.token_batch import TokenBatch
from shared.types import FinishReason, LatencyLimits, ReaderTarget, SamplingParams
from sluice_client.qoe import QoeTarget, displayed_times, final_qoe
from tests.support.session_cluster import Taker

NONE, LENGTH = FinishReason.NONE, FinishReason.LENGTH
SENDER = Sender(DispatcherId("d0"), Incarnation(3))


def new_request(logprobs: int | None = None) -> NewRequest:
    sampling = SamplingParams(max_tokens=10, logprobs=logprobs)
    return NewRequest(RequestId("r"), pack_token_ids([1, 2, 3]), sampling, arrival_s=100.0, limit_s=60.0)


def new_session(gaps: GapHistogram | None = None, logprobs: int | None = None) -> Session:
    return Session(new_request(logprobs), StreamId(7), gaps or GapHistogram())


@pytest.fixture
def session() -> Session:
    return new_session()


def test_a_request_counts_its_prompt_and_all_that_it_may_say() -> None:
    assert new_session().request.num_prompt_tokens == 3
    assert new_session().request.num_tokens == 13


def test_a_submission_says_how_old_the_request_is_how_long_it_has_left_and_what_it_has(session: Session) -> None:
    session.receive(0, [5, 6], NONE, 101.0)
    submit = next_submit(session, SENDER, 110.0)
    assert (submit.attempt, submit.age_s, submit.remaining_s) == (1, 10.0, 50.0)
    assert submit.generated_ids().tolist() == [5, 6]
    assert next_submit(session, SENDER, 170.0).remaining_s == 0.001


def test_a_submission_says_what_the_reader_has_seen() -> None:
    """Two tokens after 3 s, of which the first was expected after 1 s: both are 2 s late."""
    assert next_submit(new_session(), SENDER, 101.0).displayed is None
    read = Session(
        replace(new_request(), qoe=ReaderTarget(ttft_s=1, speed_tokens_per_s=4)), StreamId(7), GapHistogram()
    )
    assert next_submit(read, SENDER, 101.0).displayed is None
    read.receive(0, [5, 6], NONE, 103.0)
    assert next_submit(read, SENDER, 110.0).displayed == (3.25, 4.0)


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(0, 3),
    st.floats(0.1, 2),
    st.floats(1, 20),
    st.floats(0, 9),
)
def test_what_the_reader_has_left_and_how_long_it_had_none_are_as_the_strict_pacer_has_them(
    parts: list[tuple[float, int]], num_before: int, ttft_s: float, speed: float, later_s: float
) -> None:
    """Tokens that an earlier connection got count as shown on time."""
    target = ReaderTarget(ttft_s=ttft_s, speed_tokens_per_s=speed)
    request = replace(new_request(), qoe=target, generated=tuple(range(num_before)))
    made, now_s, delivered = Session(request, StreamId(7), GapHistogram()), 100.0, [-1e9] * num_before
    assert (stall_s(made), num_unread(made, now_s)) == (None, 0)
    for gap_s, count in parts:
        now_s += gap_s
        if count > 1 or not made.take_next(len(made.tokens), 9, now_s):
            made.receive(len(made.tokens), [9] * count, NONE, now_s)
        made.history.start()
        delivered += [now_s - 100.0] * count
    shown = displayed_times(QoeTarget(ttft_s, speed), delivered)
    assert made.reading.shown_s - 100.0 == pytest.approx(shown[-1], abs=1e-9)
    own = shown[num_before:]
    stalls = [after - before - 1 / speed for before, after in pairwise(own)]
    assert stall_s(made) == pytest.approx(sum(stalls), abs=1e-9)
    then_s = now_s - 100.0 + later_s
    nearly, exactly = (sum(each > then_s + off_s for each in shown) for off_s in (1e-9, -1e-9))
    assert nearly <= num_unread(made, 100.0 + then_s) <= exactly


def test_who_has_no_reader_has_nothing_unread_and_no_stalls(session: Session) -> None:
    for index in range(3):
        session.receive(index, [9], NONE, 101.0 + index)
    assert (stall_s(session), num_unread(session, 101.0)) == (None, 0)


def test_a_submission_says_what_is_to_be_kept_and_what_has_become_of_the_request() -> None:
    """The second token came 3 s before; who has heard of fewer preemptions says nothing new."""
    limits = LatencyLimits(ttft_s=0.5)
    made = Session(replace(new_request(), tier=Tier.PRIORITY, slo=limits), StreamId(7), GapHistogram())
    first = next_submit(made, SENDER, 101.0)
    assert (first.tier, first.slo, first.num_preemptions, first.token_age_s) == (Tier.PRIORITY, limits, 0, None)
    made.receive(0, [5], NONE, 103.0)
    made.receive(1, [6], NONE, 107.0)
    for count in (2, 1):
        made.history.learn_preemptions(count)
    again = next_submit(made, SENDER, 110.0)
    assert (again.tier, again.slo, again.num_preemptions, again.token_age_s) == (Tier.PRIORITY, limits, 2, 3.0)


def test_parts_are_taken_in_order_and_a_gap_is_told_as_long_as_there_is_one(session: Session) -> None:
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


def test_a_part_that_says_less_than_is_known_ends_nothing(session: Session) -> None:
    session.receive(0, [10, 11, 12], NONE, 101.0)
    assert session.receive(0, [10, 11], LENGTH, 102.0) is True
    assert (session.tokens, session.finish, session.ended.is_set()) == ([10, 11, 12], NONE, False)
    assert session.last_token_s == 101.0


def test_of_two_early_parts_with_one_beginning_the_longer_one_is_kept(session: Session) -> None:
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


@pytest.mark.slow
@given(data=st.data(), num_tokens=st.integers(1, 30), with_logprobs=st.booleans())
@settings(max_examples=300, deadline=None)
def test_parts_in_any_order_doubled_or_overlapping_give_the_exact_output_and_each_token_its_own_number(
    data: st.DataObject, num_tokens: int, with_logprobs: bool
) -> None:
    """Every token of 0..n is in at least one part; parts may repeat each other, and come without their numbers."""
    output = list(range(1000, 1000 + num_tokens))
    numbers = [TokenLogprob(-float(index)) for index in range(num_tokens)]
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens))) | {0, num_tokens})
    borders = st.tuples(st.integers(0, num_tokens), st.integers(0, num_tokens))
    parts = [*pairwise(cuts), *data.draw(st.lists(borders.map(lambda pair: (min(pair), max(pair)))))]
    session, reader = new_session(logprobs=0 if with_logprobs else None), Taker()
    attach_at = data.draw(st.integers(0, len(parts) - 1))
    for index, (start, stop) in enumerate(data.draw(st.permutations(parts))):
        if index == attach_at:
            session.attach(reader, 0.0)
        if session.ended.is_set():
            break
        known = numbers[start:stop] if with_logprobs and data.draw(st.booleans()) else ()
        session.receive(start, output[start:stop], LENGTH if stop == num_tokens else NONE, 1.0, known)
    if session.reader is None:
        session.attach(reader, 0.0)
    assert session.tokens == reader.tokens == output
    assert session.finish is reader.finish is LENGTH
    assert session.held == {}
    assert (session.logprobs is not None) == with_logprobs
    for found, number in zip(session.logprobs or numbers, numbers, strict=True):
        assert found in (None, number)


@given(
    received=st.lists(st.integers(1, 5), max_size=12),
    between=st.lists(st.integers(0, 3), max_size=12),
    most=st.integers(1, 4),
    stop_at=st.integers(1, 80),
)
def test_a_reader_that_gets_the_beginning_in_parts_gets_what_one_that_gets_all_at_once_does(
    received: list[int], between: list[int], most: int, stop_at: int
) -> None:
    """Tokens come before it and between its parts; it wants no more once it has so many."""
    session, reader = new_session(), Taker(stop_at)
    output = list(range(200))
    for count in received:
        session.receive(len(session.tokens), output[len(session.tokens) :][:count], NONE, 1.0)
    while not session.attach(reader, 1.0, most):
        count = between.pop() if between else 0
        if not session.is_over:
            session.receive(len(session.tokens), output[len(session.tokens) :][:count], NONE, 1.0)
    if not session.is_over:
        session.receive(len(session.tokens), output[len(session.tokens) :], LENGTH, 1.0)
        assert reader.finish is LENGTH
    assert reader.tokens == output[: len(reader.tokens)]
    assert session.was_stopped == (len(reader.tokens) >= stop_at)
    assert session.was_stopped or reader.tokens == output
    assert session.num_delivered == len(reader.tokens)


def test_as_many_early_parts_as_may_be_held_follow_the_one_that_was_missing() -> None:
    session, reader = new_session(), Taker()
    session.attach(reader, 0.0)
    for index in range(1, MAX_HELD_PARTS + 1):
        assert not session.receive(index, [index], NONE, 1.0)
    assert session.receive(0, [0], NONE, 2.0)
    assert session.tokens == reader.tokens == list(range(MAX_HELD_PARTS + 1))
    assert session.held == {}


def has_started(session: Session) -> bool:
    return session.history.has_started


def has_progressed(session: Session) -> bool:
    return session.has_progressed


def test_the_first_sign_of_work_counts_once_and_for_the_attempt(session: Session) -> None:
    assert not has_started(session)
    assert not session.questions.is_suspect
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


def test_an_attempt_has_progressed_when_it_gave_a_token_itself(session: Session) -> None:
    seen = [has_progressed(session)]
    session.receive(0, [1], NONE, 101.0)
    seen.append(has_progressed(session))
    session.begin(WorkerId("b"), 2, 102.0)
    seen.append(has_progressed(session))
    session.receive(1, [2], NONE, 103.0)
    seen.append(has_progressed(session))
    assert seen == [False, True, False, True]


def test_a_new_attempt_begins_without_the_faults_of_the_one_before(session: Session) -> None:
    session.begin(WorkerId("a"), 1, 101.0)
    session.accept(WorkerId("a"), 101.0, Incarnation(7))
    session.questions.accept(2.0, is_behind=True)
    assert [session.questions.miss() for _ in range(3)] == [1, 2, 3]
    assert (session.history.worker_id, session.history.incarnation) == ("a", 7)
    session.receive(2, [12], NONE, 101.0)
    session.begin(WorkerId("b"), 2, 103.0)
    assert (session.worker_id, session.attempt) == ("b", 2)
    assert (session.questions.num_lost_replies, session.questions.is_suspect, session.held) == (0, False, {})
    assert session.history.incarnation == NOBODY
    assert (session.progress_s, session.questions.asked_s) == (103.0, 103.0)


def test_whoever_waits_for_progress_hears_of_tokens_of_the_end_and_of_giving_up() -> None:
    for happen in (
        lambda session: session.receive(0, [1], NONE, 101.0),
        lambda session: session.receive(0, [], LENGTH, 101.0),
        lambda session: session.fail(FailureCode.INTERNAL),
        lambda session: session.fence(),
    ):
        session = new_session()
        session.begin(WorkerId("a"), 1, 100.5)
        progress = session.history.watch()
        happen(session)
        assert progress.is_set()


def test_a_fenced_session_belongs_to_no_worker_and_no_attempt(session: Session) -> None:
    session.begin(WorkerId("a"), 3, 100.5)
    session.receive(1, [11], NONE, 101.0)
    session.fence()
    assert (session.worker_id, session.attempt, session.held) == (None, 0, {})


# Tokens one by one, and in the plain way of a table


class Wire:
    """A table of sessions that run at one worker, and the messages of that worker."""

    def __init__(self, num_sessions: int, logprobs: int | None = None) -> None:
        self.table, self.counter = SessionTable(lambda _: None), 0
        self.sessions = [self.table.open(new_request(logprobs)) for _ in range(num_sessions)]
        for session in self.sessions:
            session.begin(WorkerId("w"), 1, 100.0)
            session.accept(WorkerId("w"), 100.0)

    def send(
        self, parts: Sequence[tuple[int, int, list[int], FinishReason]], now_s: float, extras: bytes = b""
    ) -> None:
        """Send one message: of each part the session, the first index, the tokens, and how it ends."""
        sessions, firsts, tokens, finishes = zip(*parts, strict=True)
        batch = TokenBatch(
            worker_id=WorkerId("w"),
            counter=self.counter,
            stream=np.array([self.sessions[i].stream for i in sessions]),
            attempt=np.ones(len(parts), dtype=np.uint16),
            first_index=np.array(firsts),
            count=np.array([len(part) for part in tokens]),
            finish=np.array(finishes),
            tokens=np.array([token for part in tokens for token in part], dtype=np.uint32),
            extras=extras,
        )
        self.counter += 1
        self.table.apply(TokenBatch.unpack(batch.pack()), now_s)


@pytest.mark.parametrize("seed", range(40))
def test_a_table_gives_sessions_what_they_would_take_themselves(seed: int) -> None:
    """Messages of a token for most sessions; now and then none, several, old or early ones, an end, a late reader."""
    random = np.random.default_rng(seed)
    wire, gaps = Wire(6), GapHistogram()
    alone = [new_session(gaps) for _ in wire.sessions]
    readers = [(Taker(), Taker()) for _ in alone]
    outputs = random.integers(1, 1000, size=(6, 60)).tolist()
    now_s, next_index = 100.0, [0] * 6
    for _ in range(60):
        now_s += float(random.choice([0.05, 0.05, 0.05, 0.2]))
        parts = []
        for i in np.flatnonzero(random.random(6) < 0.9).tolist():
            shift, count = random.choice([0, 0, 0, 0, 0, 0, -1, 1]), random.choice([1, 1, 1, 1, 1, 1, 1, 0, 2])
            first = max(next_index[i] + int(shift), 0)
            finish = LENGTH if random.random() < 0.01 else NONE
            parts.append((i, first, outputs[i][first : first + int(count)], finish))
        if random.random() < 0.1 and (i := int(random.integers(6))) >= 0 and wire.sessions[i].reader is None:
            wire.sessions[i].attach(readers[i][0], now_s)
            alone[i].attach(readers[i][1], now_s)
        if parts:
            wire.send(parts, now_s)
        for i, first, tokens, finish in parts:
            if not alone[i].ended.is_set():
                alone[i].receive(first, tokens, finish, now_s)
        next_index = [len(session.tokens) for session in alone]
    for session, other, (got, expected) in zip(wire.sessions, alone, readers, strict=True):
        assert (session.tokens, session.finish, session.held) == (other.tokens, other.finish, other.held)
        assert (session.token_s, session.progress_s) == (other.token_s, other.progress_s)
        assert (session.num_delivered, session.ended.is_set()) == (other.num_delivered, other.ended.is_set())
        assert got.parts == expected.parts
    assert wire.table.gaps.snapshot() == gaps.snapshot()
    assert sum(next_index) > 60, "there was something to compare"


def test_a_reader_that_fails_in_the_middle_ends_its_own_session_and_no_other() -> None:
    wire, readers = Wire(3), [Taker(), Taker(fails_at=2), Taker()]
    for session, reader in zip(wire.sessions, readers, strict=True):
        session.attach(reader, 100.0)
    for index in range(4):
        wire.send([(i, index, [index], NONE) for i in range(3)], 101.0 + index)
    assert [session.tokens for session in wire.sessions] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
    assert [session.failure for session in wire.sessions] == [None, FailureCode.INTERNAL, None]
    assert wire.table.counters.num_ignored == 1, "what came for it after that"


def test_whoever_waits_for_progress_learns_of_the_next_token() -> None:
    wire = Wire(1)
    wire.send([(0, 0, [5], NONE)], 101.0)
    progress = wire.sessions[0].history.watch()
    wire.send([(0, 1, [6], NONE)], 102.0)
    assert progress.is_set()


def test_extras_that_cannot_be_read_cost_nothing_but_themselves() -> None:
    wire = Wire(1, logprobs=1)
    wire.send([(0, 0, [5, 6], NONE)], 101.0, extras=b"\1\2\3")
    assert wire.sessions[0].tokens == [5, 6]
    assert wire.sessions[0].logprobs == [None, None]


def test_handles_begin_where_the_process_says() -> None:
    table = SessionTable(lambda _: None, first_stream=MAX_STREAM)
    assert [table.open(new_request()).stream for _ in range(3)] == [MAX_STREAM, 0, 1]


def test_qoe_is_that_of_the_times_at_which_tokens_came() -> None:
    """Tokens at 101, 102 and, two of them, 104: 1, 2 and 4 s after the arrival."""
    assert new_session().qoe is None, "no reader follows"
    request = replace(new_request(), qoe=ReaderTarget(ttft_s=1.5, speed_tokens_per_s=2.0))
    session = Session(request, StreamId(7), GapHistogram())
    assert session.qoe == 0.0, "nothing came yet"
    for index, tokens, now_s in ((0, [1], 101.0), (1, [2], 102.0), (2, [3, 4], 104.0)):
        session.receive(index, tokens, NONE, now_s)
    assert session.qoe == pytest.approx(final_qoe(QoeTarget(1.5, 2.0), [1.0, 2.0, 4.0, 4.0]))
