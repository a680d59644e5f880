"""How far a session is at one moment, and what its reader has: functions of the session and the time."""

from __future__ import annotations

from typing import Any

import pytest

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import NewRequest
from services.dispatcher.session.session import Session
from services.dispatcher.session.standing import PAUSED_AFTER_S, reader_qoe, slack_s, state_of
from shared.ids import RequestId, StreamId, WorkerId
from shared.messages.request import pack_token_ids
from shared.open_requests import RequestState
from shared.types import FinishReason, ReaderTarget, SamplingParams
from sluice_client.qoe import QoeTarget, qoe_at

W, NONE = WorkerId("w0"), FinishReason.NONE


def make_session(**fields: Any) -> Session:
    """One that came at 100 s, whose reader wants the first token after 1 s and four more each second."""
    reader = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.0)
    common = {"sampling": SamplingParams(max_tokens=10), "arrival_s": 100.0, "limit_s": 60.0, "qoe": reader}
    return Session(
        NewRequest(RequestId("r"), pack_token_ids([1, 2]), **{**common, **fields}), StreamId(7), GapHistogram()
    )


def test_an_answer_is_queued_until_its_worker_begins_and_again_when_it_has_lost_it() -> None:
    session, states = make_session(), []

    def note(now_s: float) -> None:
        states.append(state_of(session, now_s).value)

    note(100.0)
    session.begin(W, 1, 100.1)
    note(100.1)
    session.accept(W, 100.2)
    note(100.2)
    session.start(100.3)
    note(100.3)
    session.receive(0, [5], NONE, 101.0)
    note(101.0)
    note(101.0 + PAUSED_AFTER_S + 0.1)
    session.receive(1, [6], NONE, 103.0)
    note(103.5)
    session.fence()
    note(103.6)
    session.begin(W, 2, 103.7)
    session.accept(W, 103.7)
    session.start(103.8)
    note(103.8)
    session.receive(2, [7], NONE, 104.0)
    note(104.0)
    assert states == [
        *("queued", "queued", "queued", "prefill", "streaming"),
        *("paused", "streaming", "queued", "prefill", "streaming"),
    ]
    assert {*states} == {state.value for state in RequestState}


def test_the_slack_is_the_time_until_the_reader_has_read_what_came() -> None:
    """Four tokens at 100.5 s are displayed from 101 on, every quarter of a second, and read at 102; another is late."""
    session = make_session()
    assert slack_s(session, 100.0) == pytest.approx(1.0)
    assert slack_s(session, 101.5) == pytest.approx(-0.5)
    session.receive(0, [1, 2, 3, 4], NONE, 100.5)
    assert slack_s(session, 100.5) == pytest.approx(1.5)
    assert slack_s(session, 102.5) == pytest.approx(-0.5)
    session.receive(4, [5], NONE, 103.0)
    assert slack_s(session, 103.0) == pytest.approx(0.25)


def test_the_experience_falls_while_the_reader_waits() -> None:
    session, target = make_session(), QoeTarget(1.0, 4.0)
    assert reader_qoe(session, 100.9) == 1.0
    assert reader_qoe(session, 101.5) == 0.0
    session.receive(0, [1, 2], NONE, 102.0)
    for at_s in (2.0, 2.25, 3.0):
        assert reader_qoe(session, 100.0 + at_s) == pytest.approx(qoe_at(target, [2.0, 2.0], at_s, finished=False))


def test_tokens_of_an_earlier_connection_count_as_shown_on_time() -> None:
    """Eight tokens last until 103; at 103 nothing has been missed, at 104 the reader lacks four."""
    session = make_session(generated=tuple(range(8)))
    assert slack_s(session, 100.0) == pytest.approx(3.0)
    assert reader_qoe(session, 102.9) == pytest.approx(1.0)
    late = reader_qoe(session, 104.0)
    assert late is not None
    assert late < 1.0


def test_nobody_who_reads_has_neither() -> None:
    session = make_session(qoe=None)
    session.receive(0, [1], NONE, 101.0)
    assert (slack_s(session, 102.0), reader_qoe(session, 102.0)) == (None, None)
