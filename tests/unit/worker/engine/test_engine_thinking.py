"""Readers of answers that think: the worker's columns beside the dispatcher's reading, and both beside the definition.

The definition is written out here token by token, and knows neither columns nor sums.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import NewRequest, Sender
from services.dispatcher.session.session import Session
from services.dispatcher.session.standing import num_unread, reader_qoe, slack_s, stall_s
from services.dispatcher.session.submission import next_submit
from services.worker.engine.describe import describe
from services.worker.engine.engine import Engine
from services.worker.engine.invariants import check_engine
from services.worker.engine.readers import qoe_by_now
from services.worker.sequences import qoe_columns
from services.worker.sequences.config import NewSequence
from services.worker.sequences.reading import DEFAULT_READER
from shared.api_keys import Tier
from shared.ids import DispatcherId, Incarnation, RequestId, StreamId
from shared.messages.request import Submit, pack_token_ids
from shared.types import FinishReason, ReaderTarget, SamplingParams, Thinking
from tests.support.engine_builders import make_engine, new_sequence
from tests.support.engine_harness import make_harness, undisturbed

OPENING, CLOSING, WORD = 8, 9, 10
ARRIVAL_S = 100.0
SENDER = Sender(DispatcherId("d0"), Incarnation(1))
COLUMNS = ("ttft_s", "speed", "gap_s", "last_s", "delay_sum_s")
TOKENS = st.lists(st.sampled_from([OPENING, CLOSING, WORD, WORD, WORD]), min_size=1, max_size=14)
GAPS = st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.2, 1.0, 3.0]), min_size=14, max_size=14)
TARGETS = st.builds(
    ReaderTarget,
    ttft_s=st.floats(0.1, 3),
    speed_tokens_per_s=st.floats(1, 20),
    thinking_speed_tokens_per_s=st.floats(1, 20),
)


@dataclass(frozen=True)
class Answer:
    """What comes, when (seconds after the arrival), and for whom."""

    tokens: list[int]
    delivered_s: list[float]
    target: ReaderTarget
    is_open: bool

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=20, thinking=Thinking(opening_id=OPENING, closing_id=CLOSING, is_open=self.is_open)
        )

    def thought(self, count: int) -> int | None:
        """Tokens of the thinking among the first so many; None while it goes on, or may begin."""
        if count == 0:
            return None
        if not self.is_open and self.tokens[0] != OPENING:
            return 0
        return next((i + 1 for i in range(count) if self.tokens[i] == CLOSING), None)

    def timeline(self, count: int) -> tuple[list[float], list[float], float]:
        """When the first so many tokens are displayed and expected, and the gap: of the text, or of the thinking."""
        thought, target = self.thought(count), self.target
        thinks = thought is None and (count > 0 or self.is_open)
        gap_s = 1 / (target.thinking_speed_tokens_per_s if thinks else target.speed_tokens_per_s)
        first_s, begin = target.ttft_s, thought or 0
        if begin:
            first_s = max(first_s, self.delivered_s[begin - 1] + gap_s)
        shown: list[float] = []
        for i, delivered_s in enumerate(self.delivered_s[begin:count]):
            shown.append(max(first_s + i * gap_s, delivered_s, shown[-1] + gap_s if shown else 0.0))
        return shown, [first_s + i * gap_s for i in range(len(shown) + 1)], gap_s

    def final(self) -> float | None:
        """QoE of the whole answer by the sums; None if nobody reads it."""
        if self.thought(len(self.tokens)) is None:
            return None
        shown, ideal, _ = self.timeline(len(self.tokens))
        if not shown:
            return None
        late = sum(at - wanted for at, wanted in zip(shown, ideal, strict=False))
        whole = sum(shown[-1] - wanted for wanted in ideal[:-1])
        return 1.0 if whole <= 0 else 1 - late / whole


ANSWERS = st.builds(
    lambda tokens, gaps, target, is_open: Answer(
        tokens, [float(at) for at in itertools.accumulate(gaps[: len(tokens)])], target, is_open
    ),
    TOKENS,
    GAPS,
    TARGETS,
    st.booleans(),
)


def new_session(answer: Answer, **changes: Any) -> Session:
    request = NewRequest(
        RequestId("r0"), pack_token_ids([1, 2]), answer.sampling, ARRIVAL_S, 60.0, qoe=answer.target, **changes
    )
    return Session(request, StreamId(7), GapHistogram())


def sequence_of(submit: Submit, name: int) -> NewSequence:
    """What a worker makes of a submission; its clock is the dispatcher's."""
    return replace(
        new_sequence(name, generated=submit.generated_ids().tolist(), arrival_s=ARRIVAL_S, qoe=submit.qoe),
        sampling=submit.sampling,
        displayed=submit.displayed,
        thought_s=submit.thought_s,
    )


def add(engine: Engine, submit: Submit, name: int = 0) -> int:
    row = engine.table.add(sequence_of(submit, name), 20)
    assert row is not None
    return row


def deliver(engine: Engine, rows: list[int], tokens: list[int], at_s: float) -> None:
    """Count a token of each row as the engine does."""
    places, before = np.array(rows, dtype=np.intp), engine.table.num_output[rows]
    engine.table.num_output[places] += 1
    qoe_columns.deliver(engine.table, places, np.array(tokens, dtype=np.int32), before, ARRIVAL_S + at_s)
    live = np.flatnonzero(engine.table.status)
    assert engine.table.num_thinkers == sum(engine.table.is_thinker(int(row)) for row in live)


def go_on(engine: Engine, row: int, answer: Answer, first: int) -> None:
    for token, at_s in list(zip(answer.tokens, answer.delivered_s, strict=True))[first:]:
        deliver(engine, [row], [token], at_s)


def columns_of(engine: Engine, row: int) -> list[float]:
    table = engine.table
    names = (*(f"qoe_{name}" for name in COLUMNS), "thinks", "may_think", "num_thought")
    return [float(getattr(table, name)[row]) for name in names]


def take(session: Session, answer: Answer, index: int) -> None:
    """Give a session one token, by the short way where it takes it."""
    now_s = ARRIVAL_S + answer.delivered_s[index]
    if not session.take_next(index, answer.tokens[index], now_s):
        session.receive(index, [answer.tokens[index]], FinishReason.NONE, now_s)
    session.history.start()


@given(ANSWERS)
def test_columns_and_reading_follow_the_definition_token_by_token_and_say_the_same(answer: Answer) -> None:
    engine, session = make_engine(), new_session(answer)
    row = add(engine, next_submit(session, SENDER, ARRIVAL_S))
    for count in range(len(answer.tokens) + 1):
        if count:
            take(session, answer, count - 1)
            deliver(engine, [row], answer.tokens[count - 1 : count], answer.delivered_s[count - 1])
        shown, ideal, gap_s = answer.timeline(count)
        last_s = shown[-1] if shown else ideal[0] - gap_s
        late_s = sum(at - wanted for at, wanted in zip(shown, ideal, strict=False))
        table = engine.table
        assert table.qoe_last_s[row] == pytest.approx(last_s, abs=1e-9)
        assert table.qoe_delay_sum_s[row] == pytest.approx(late_s, abs=1e-9)
        assert session.reading.shown_s - ARRIVAL_S == pytest.approx(last_s, abs=1e-9)
        thinks = answer.thought(count) is None and (count > 0 or answer.is_open)
        assert (bool(table.thinks[row]), session.thinks) == (thinks, thinks)
        for later_s in (0.0, 0.07, 5.0):
            now_s = ARRIVAL_S + (answer.delivered_s[count - 1] if count else 0.0) + later_s
            rows = np.array([row], dtype=np.int32)
            assert slack_s(session, now_s) == pytest.approx(last_s + gap_s - (now_s - ARRIVAL_S), abs=1e-9)
            assert slack_s(session, now_s) == pytest.approx(float(qoe_columns.slack_s(table, rows, now_s)[0]), abs=1e-9)
            mine = reader_qoe(session, now_s + 1e-9)
            assert mine == pytest.approx(float(qoe_by_now(engine, rows, now_s + 1e-9)[0]), abs=1e-6)
            assert mine == 1.0 or not thinks


@given(ANSWERS)
def test_the_qoe_of_an_answer_is_that_of_its_text(answer: Answer) -> None:
    session = new_session(answer)
    for index in range(len(answer.tokens)):
        take(session, answer, index)
    expected, found = answer.final(), session.qoe
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, abs=1e-9)
    if expected is None:
        assert (stall_s(session), num_unread(session, ARRIVAL_S)) == (None, 0)
    else:
        shown, _, gap_s = answer.timeline(len(answer.tokens))
        assert stall_s(session) == pytest.approx(shown[-1] - shown[0] - (len(shown) - 1) * gap_s, abs=1e-9)


@given(ANSWERS)
def test_an_answer_that_is_cut_at_any_token_and_goes_on_elsewhere_has_the_same_reader(answer: Answer) -> None:
    engine, session = make_engine(), new_session(answer)
    undisturbed_row = add(engine, next_submit(session, SENDER, ARRIVAL_S))
    go_on(engine, undisturbed_row, answer, 0)
    whole = columns_of(engine, undisturbed_row)
    for cut in range(len(answer.tokens) + 1):
        row = add(engine, next_submit(session, SENDER, ARRIVAL_S + 9))
        go_on(engine, row, answer, cut)
        assert columns_of(engine, row) == pytest.approx(whole, abs=1e-9), cut
        engine.table.free(row)
        if cut < len(answer.tokens):
            take(session, answer, cut)


@given(ANSWERS, st.integers(1, 5))
def test_tokens_that_come_together_are_read_as_if_they_came_one_by_one(answer: Answer, size: int) -> None:
    """All of a part come when its last one does."""
    starts = range(0, len(answer.tokens), size)
    ends = [min(start + size, len(answer.tokens)) for start in starts]
    at_s = [answer.delivered_s[end - 1] for start, end in zip(starts, ends, strict=True) for _ in range(start, end)]
    slower = replace(answer, delivered_s=at_s)
    one_by_one, in_parts = new_session(slower), new_session(slower)
    for index in range(len(answer.tokens)):
        take(one_by_one, slower, index)
    for start, end in zip(starts, ends, strict=True):
        in_parts.receive(start, answer.tokens[start:end], FinishReason.NONE, ARRIVAL_S + at_s[start])
    assert in_parts.qoe == pytest.approx(one_by_one.qoe)
    assert in_parts.reading.shown_s == pytest.approx(one_by_one.reading.shown_s)
    assert in_parts.reading.num_thought == one_by_one.reading.num_thought
    assert in_parts.reading.thought_s == one_by_one.reading.thought_s


@given(ANSWERS, st.integers(0, 14))
def test_what_an_earlier_connection_got_counts_as_on_time(answer: Answer, cut: int) -> None:
    """The worker begins where the dispatcher does; who saw the thinking end here expects the text from then on."""
    cut = min(cut, len(answer.tokens))
    engine, session = make_engine(), new_session(answer, generated=tuple(answer.tokens[:cut]))
    row = add(engine, next_submit(session, SENDER, ARRIVAL_S))
    for index in range(cut, len(answer.tokens)):
        take(session, answer, index)
        deliver(engine, [row], [answer.tokens[index]], answer.delivered_s[index])
        elsewhere = add(engine, next_submit(session, SENDER, ARRIVAL_S + 9))
        assert columns_of(engine, elsewhere) == pytest.approx(columns_of(engine, row), abs=1e-9)
        engine.table.free(elsewhere)
    assert session.reading.shown_s - ARRIVAL_S == pytest.approx(float(engine.table.qoe_last_s[row]), abs=1e-9)
    thought, here = answer.thought(len(answer.tokens)), len(answer.tokens) - cut
    assert session.num_thought == (here if thought is None and answer.tokens else max(0, (thought or 0) - cut))
    assert (session.reading.thought_s is not None) == (thought is not None and thought > cut)


def test_forty_seconds_of_thinking_cost_a_reader_nothing_that_follows_the_text_in_time() -> None:
    """Ten tokens of text at reading speed; the first comes a gap after the thinking has ended."""
    thinking = [OPENING, *[WORD] * 398, CLOSING]
    at_s = [i / 10 for i in range(400)] + [39.9 + (i + 1) / 5 for i in range(10)]
    answer = Answer([*thinking, *[WORD] * 10], at_s, ReaderTarget(speed_tokens_per_s=5), is_open=False)
    session = new_session(answer)
    for index in range(len(answer.tokens)):
        take(session, answer, index)
    assert session.qoe == pytest.approx(1.0)
    as_text = replace(session.request, sampling=SamplingParams(max_tokens=500))
    all_read = Session(as_text, StreamId(8), GapHistogram())
    for index in range(400, 410):
        all_read.receive(index - 400, [WORD], FinishReason.NONE, ARRIVAL_S + at_s[index])
    assert all_read.qoe is not None
    assert all_read.qoe < 0.05


def test_where_nobody_has_said_who_reads_a_move_tells_when_the_thinking_ended() -> None:
    """The worker's default reader, for its policies, expects the text 1 / 4.8 s behind 3 s; two tokens came in time."""
    answer = Answer([OPENING, CLOSING, WORD, WORD], [1.0, 3.0, 3.1, 3.2], ReaderTarget(), is_open=False)
    session = Session(replace(new_session(answer).request, qoe=None), StreamId(7), GapHistogram())
    for index in range(len(answer.tokens)):
        take(session, answer, index)
    submit, engine = next_submit(session, SENDER, ARRIVAL_S + 5), make_engine()
    assert (submit.qoe, submit.displayed, submit.thought_s) == (None, None, 3.0)
    assert (session.qoe, slack_s(session, ARRIVAL_S + 5), stall_s(session)) == (None, None, None)
    row = add(engine, submit)
    assert engine.table.qoe_last_s[row] == pytest.approx(3.0 + 2 / 4.8)
    assert engine.table.num_thought[row] == 2


def test_who_does_not_think_is_the_same_beside_who_does() -> None:
    at_s = [0.3, 2.0, 2.1, 4.0]
    answer = Answer([OPENING, WORD, CLOSING, WORD], at_s, ReaderTarget(), is_open=False)
    plain = next_submit(new_session(answer), SENDER, ARRIVAL_S).model_copy(
        update={"sampling": SamplingParams(max_tokens=9)}
    )
    alone, both = make_engine(), make_engine()
    row, thinks, beside = (
        add(alone, plain),
        add(both, next_submit(new_session(answer), SENDER, ARRIVAL_S)),
        add(both, plain, 1),
    )
    for token, now_s in zip(answer.tokens, at_s, strict=True):
        deliver(alone, [row], [token], now_s)
        deliver(both, [thinks, beside], [token, token], now_s)
    assert columns_of(alone, row) == columns_of(both, beside)
    assert (alone.table.num_thinkers, both.table.num_thinkers) == (0, 1)
    both.table.free(thinks)
    assert both.table.num_thinkers == 0


def test_nobody_follows_best_effort_that_thinks_and_who_reads_too_fast_is_the_default_reader_of_the_text() -> None:
    answer = Answer([], [], ReaderTarget(speed_tokens_per_s=300, thinking_speed_tokens_per_s=10), is_open=True)
    engine, submit = make_engine(), next_submit(new_session(answer), SENDER, ARRIVAL_S)
    nobody = engine.table.add(replace(sequence_of(submit, 0), tier=Tier.FLEX), 20)
    row = add(engine, submit, 1)
    assert np.isnan(engine.table.qoe_gap_s[nobody])
    assert engine.table.num_thinkers == 1
    assert (engine.table.qoe_gap_s[row], engine.table.qoe_speed[row]) == (0.1, DEFAULT_READER.speed_tokens_per_s)
    deliver(engine, [row], [CLOSING], 7.0)
    assert engine.table.qoe_ttft_s[row] == 7.0 + 1 / DEFAULT_READER.speed_tokens_per_s


@pytest.mark.parametrize("budget", [0, 1, 5, 40])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_modelled_worker_closes_a_thinking_whose_budget_is_used_up_whatever_happens_to_its_kv(
    budget: int, is_open: bool
) -> None:
    """Seven share memory for about three, so they give way to each other; five think, two of which began elsewhere."""
    harness = make_harness(num_blocks=14, vocab_size=1000)
    for name in range(7):
        new = new_sequence(name, num_prompt=5, max_tokens=16, arrival_s=0.0)
        thinking = Thinking(opening_id=50, closing_id=999, is_open=is_open, budget=budget)
        if not is_open:  # what it draws first opens it
            first = undisturbed(harness.engine.config, harness.draw, new)[0][0]
            thinking = thinking.model_copy(update={"opening_id": first})
        if name < 5:
            new = replace(new, sampling=new.sampling.model_copy(update={"thinking": thinking}))
        if name in (3, 4):
            text, _ = undisturbed(harness.engine.config, harness.draw, new)
            new = replace(new, generated=np.array(text[: name - 1], dtype=np.uint32))
        harness.add(new)
    harness.drain()
    assert harness.engine.totals.num_preemptions > 0
    for name in range(7):
        story = harness.stories[1000 + name]
        assert (story.text, story.finish) == undisturbed(harness.engine.config, harness.draw, story.new)
        place = budget + (not is_open)
        assert [i for i, token in enumerate(story.text) if token == 999] == ([place] if name < 5 and place < 16 else [])
    check_engine(harness.engine)


def test_the_dump_says_of_who_thinks_how_far_ahead_of_its_wanted_speed_it_is() -> None:
    """Three tokens wanted by 1.0, 1.1 and 1.2 s after the arrival came before; the next one is due at 1.3 s."""
    harness = make_harness()
    new = new_sequence(0, max_tokens=9, arrival_s=0.0, qoe=ReaderTarget(thinking_speed_tokens_per_s=10))
    thinking = Thinking(opening_id=98, closing_id=99, is_open=True)
    harness.add(replace(new, sampling=new.sampling.model_copy(update={"thinking": thinking})))
    for _ in range(3):
        harness.step()
    (row,) = describe(harness.engine, 2.0)
    assert (row["qoe"], row["slack_s"]) == (1.0, -0.7)
