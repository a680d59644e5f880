"""Records and summaries against the definitions, token by token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.experiment.records import UNFINISHED, Recorder, Records
from sim.experiment.summary import Slo, SystemFacts, held_until_s, in_time, rounded, summarise
from sluice_client.qoe import QoeTarget, displayed_times, final_qoe
from tests.support.workloads import plain_workload

TARGET = QoeTarget(1.0, 4.8)
# gaps of an answer's tokens, the first after the arrival; several at once are 0 apart
ANSWERS = st.lists(st.lists(st.floats(0, 20), max_size=30), min_size=1, max_size=8)


def record(answers: list[list[float]], arrival_s: list[float] | None = None) -> Records:
    """Return the records of answers with these gaps; one without a token failed."""
    workload = plain_workload(arrival_s or list(range(len(answers))))
    recorder = Recorder(workload)
    for i, gaps in enumerate(answers):
        for at_s in workload.arrival_s[i] + np.cumsum(gaps):
            recorder.tokens(i, float(at_s))
        recorder.end(i, "" if gaps else "queue_full")
    return recorder.records()


@given(ANSWERS)
def test_every_request_has_the_figures_of_its_own_tokens(answers: list[list[float]]) -> None:
    records = record(answers)
    for i, gaps in enumerate(answers):
        times = (np.cumsum(gaps)).tolist()
        assert records.num_tokens[i] == len(times)
        if not times:
            assert np.isnan(records.ttft_s[i])
            assert records.qoe[i] == 0
            continue
        assert records.ttft_s[i] == pytest.approx(times[0], abs=1e-9)
        assert records.qoe[i] == pytest.approx(final_qoe(TARGET, times), abs=1e-9)
        if len(times) == 1:
            assert np.isnan(records.tpot_s[i])
            assert np.isnan(records.tds_tokens_per_s[i])
            assert np.isnan(records.longest_gap_s[i])
        else:
            assert records.tpot_s[i] == pytest.approx((times[-1] - times[0]) / (len(times) - 1), abs=1e-9)
            assert records.longest_gap_s[i] == pytest.approx(max(b - a for a, b in pairwise(times)), abs=1e-9)


@given(st.lists(st.floats(0, 0.4).map(lambda gap: gap + 1e-3), min_size=1, max_size=60))
def test_a_token_counts_by_how_many_are_unread_when_it_comes(gaps: list[float]) -> None:
    """Counted from the displayed timeline; a token that is displayed as another comes may be on either side."""
    times = np.cumsum(gaps)
    displayed_s = np.array(displayed_times(TARGET, times.tolist()))
    bounds = []
    for slip_s in (1e-6, -1e-6):
        shares = [np.count_nonzero(displayed_s[: i + 1] > at_s + slip_s) / times.size for i, at_s in enumerate(times)]
        bounds.append(sum(1.0 if share < 0.1 else max(0.0, 2 - 10 * share) for share in shares))
    assert bounds[1] - 1e-6 <= record([gaps]).effective_tokens[0] <= bounds[0] + 1e-6


def test_what_comes_faster_than_it_is_read_is_worth_nothing_once_a_fifth_is_unread() -> None:
    """100 tokens at once, the first displayed as it comes: up to 10 unread are worth 1, then 0.9 … 0.1, then none.

    TokenFlow's curve: 11 · 1 + 9 · 0.5. At reading speed all of them count, and without a reader, too.
    """
    at_once, read, nobody = [2.0] + [0.0] * 99, [2.0] + [0.25] * 99, Recorder(plain_workload([0.0], has_reader=False))
    nobody.tokens(0, 2.0, 100)
    nobody.end(0)
    assert record([at_once, read]).effective_tokens.tolist() == pytest.approx([15.5, 100.0])
    assert nobody.records().effective_tokens.tolist() == [100.0]


@given(ANSWERS, st.floats(0, 50))
def test_a_gap_over_an_instant_is_that_of_the_answer_that_waits_longest_then(
    answers: list[list[float]], at_s: float
) -> None:
    records = record(answers)
    ends = records.token_begin[1:].tolist()
    tokens = [records.token_s[begin:end].tolist() for begin, end in pairwise([0, *ends])]
    over = [after - before for times in tokens for before, after in pairwise(times) if before <= at_s < after]
    assert records.longest_gap_over_s(at_s) == max(over, default=0.0)


@given(ANSWERS, st.data())
def test_a_selection_has_the_figures_of_the_selected(answers: list[list[float]], data: st.DataObject) -> None:
    records = record(answers)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(answers), max_size=len(answers))))
    part = records.select(wanted)
    for name in ("arrival_s", "ttft_s", "tpot_s", "longest_gap_s", "qoe", "effective_tokens", "num_tokens"):
        assert np.array_equal(getattr(part, name), getattr(records, name)[wanted], equal_nan=True), name
    assert len(part.failure) == len(part)


def test_tokens_that_come_together_are_as_if_each_was_noted() -> None:
    workload = plain_workload([0.0])
    one, three = Recorder(workload), Recorder(workload)
    for _ in range(3):
        one.tokens(0, 2.0)
    three.tokens(0, 2.0, 3)
    assert one.records().token_s.tolist() == three.records().token_s.tolist() == [2.0] * 3


def test_the_instants_of_an_answer_may_come_all_at_once() -> None:
    workload, instants = plain_workload([0.0, 0.5]), ([0.25, 1.5, 1.5], [2.0])
    one_by_one, at_once = Recorder(workload), Recorder(workload)
    for index, at_s in enumerate(instants):
        for instant in at_s:
            one_by_one.tokens(index, instant)
        at_once.tokens_at(index, np.array(at_s))
    for name in ("token_s", "token_begin", "ttft_s", "longest_gap_s"):
        assert np.array_equal(getattr(one_by_one.records(), name), getattr(at_once.records(), name), equal_nan=True)


def test_what_never_ended_is_no_whole_answer() -> None:
    recorder = Recorder(plain_workload([0.0, 1.0]))
    recorder.tokens(0, 1.5)
    recorder.end(1)
    records = recorder.records()
    assert records.failure == (UNFINISHED, "")
    assert recorder.num_done == 1


def beside() -> Records:
    """Return two requests that somebody waits for, and best effort that comes before and after the second of them.

    arrival 0.0, of 10 prompt and 3 output tokens: at 1, 2, 6 s          best effort 0.5, of 100 and 2: at 3, 4 s
    arrival 1.0, of 20 prompt and 2 output tokens: at 3 s, 8 s           best effort 4.0, of 200 and 3: at 7, 9 s …
    """
    recorder = Recorder(plain_workload([0.0, 1.0], [10, 20], [3, 2]))
    early, late = recorder.add(0.5, 100, 2), recorder.add(4.0, 200, 3)
    for index, at_s in ((late, [7.0, 9.0]), (0, [1.0, 2.0, 6.0]), (1, [3.0, 8.0]), (early, [3.0, 4.0])):
        recorder.tokens_at(index, np.array(at_s))
    recorder.end(0, num_preemptions=2)
    recorder.end(early, num_preemptions=5)
    recorder.end(1, num_preemptions=0)
    assert recorder.num_done == 2, "of the workload"
    return recorder.records()


def test_what_is_added_stands_where_it_arrived() -> None:
    records = beside()
    assert records.arrival_s.tolist() == [0.0, 0.5, 1.0, 4.0]
    assert records.is_best_effort.tolist() == [False, True, False, True]
    assert records.num_prompt.tolist() == [10, 100, 20, 200]
    assert records.num_tokens.tolist() == [3, 2, 2, 2]
    assert records.ttft_s.tolist() == [1.0, 2.5, 2.0, 3.0]
    assert records.failure == ("", "", "", UNFINISHED)
    assert records.num_preemptions.tolist() == pytest.approx([2, 5, 0, np.nan], nan_ok=True)
    assert records.real_time.arrival_s.tolist() == [0.0, 1.0]
    assert records.normalised_latency_s.tolist() == pytest.approx([2.0, 1.75, 3.5, np.nan], nan_ok=True)


def test_figures_are_of_those_who_wait_and_best_effort_has_its_own() -> None:
    """Rates to the cut-off at 5 s, and to 8 s, when nobody waits any more; the second lacks a token at the cut-off."""
    summary = summarise(beside(), SystemFacts(), slo=Slo(1.5, 9.0), cut_off_s=5.0)
    assert (summary["requests"], summary["completed"], summary["slo"]["both_share"]) == (2, 2, 0.5)
    assert summary["ttft_s"]["mean"] == 1.5
    assert summary["normalised_latency_s"]["mean"] == 2.75
    assert summary["preemptions_per_request"] == {"p50": 1.0, "p99": 1.98, "max": 2.0}
    assert (summary["cut_off_s"], summary["drained_s"]) == (5.0, 8.0)
    assert summary["cut_off"] == {
        "unfinished": 2,
        "lacking_tokens": 2,
        "requests_per_s": 1 / 5,
        "tokens_per_s": 5 / 5,
        "prompt_tokens_per_s": 130 / 5,
    }
    assert summary["drained"] == {"requests_per_s": 3 / 8, "tokens_per_s": 8 / 8, "prompt_tokens_per_s": 330 / 8}
    found = summary["best_effort"]
    assert (found["requests"], found["completed"], found["refused"], found["unfinished"]) == (2, 1, 0, 1)
    assert found["ttft_s"]["mean"] == 2.75
    assert found["normalised_latency_s"]["mean"] == 1.75
    assert found["preemptions_per_request"]["max"] == 5
    assert found["cut_off"] == {"requests_per_s": 1 / 5, "tokens_per_s": 2 / 5, "prompt_tokens_per_s": 100 / 5}
    assert found["drained"] == {"requests_per_s": 1 / 8, "tokens_per_s": 3 / 8, "prompt_tokens_per_s": 300 / 8}


def test_rates_begin_with_the_warm_up() -> None:
    """From 2 to 5 s: three tokens of all, two of best effort; the request that arrived before is in no other figure."""
    summary = summarise(beside(), SystemFacts(), warm_up_s=2.0, cut_off_s=5.0)
    assert summary["requests"] == 0
    assert summary["best_effort"]["requests"] == 1
    assert summary["cut_off"]["tokens_per_s"] == pytest.approx(4 / 3, rel=1e-5)
    assert summary["best_effort"]["cut_off"]["tokens_per_s"] == pytest.approx(2 / 3, rel=1e-5)


def test_without_best_effort_the_windows_are_told_where_they_are_asked_for() -> None:
    summary = summarise(beside().real_time, SystemFacts(), cut_off_s=5.0)
    assert summary["best_effort"] is None
    assert summary["drained_s"] == 8.0
    assert summarise(beside().real_time, SystemFacts())["cut_off"] is None


@given(ANSWERS, st.floats(0.1, 60))
def test_what_is_lacking_at_an_instant_is_what_comes_after_it(answers: list[list[float]], at_s: float) -> None:
    """And all nine tokens of an answer that failed. No token comes as its request does."""
    records = record([[gap + 0.1 for gap in gaps] for gaps in answers])
    ends = records.token_begin[1:].tolist()
    tokens = [records.token_s[begin:end] for begin, end in pairwise([0, *ends])]
    lacking = [9 if not each.size else int((each > at_s).sum()) for each in tokens]
    found = summarise(records, SystemFacts(), cut_off_s=at_s)["cut_off"]
    assert found["lacking_tokens"] == sum(lacking)
    assert found["unfinished"] == sum(each > 0 for each in lacking)
    assert found["tokens_per_s"] == pytest.approx((records.token_s <= at_s).sum() / at_s, rel=1e-5)


def test_a_last_token_is_displayed_when_the_pacer_shows_it() -> None:
    """Two in time, and one an hour late; nobody reads the best effort."""
    answers = [[1.0, 0.2, 0.2], [3600.0]]
    shown = [displayed_times(TARGET, np.cumsum(gaps).tolist())[-1] for gaps in answers]
    assert record(answers).shown_s.tolist() == pytest.approx(shown)
    assert np.isnan(beside().shown_s).tolist() == [False, True, False, True]


def test_a_reader_that_nobody_has_gives_no_qoe() -> None:
    recorder = Recorder(plain_workload([0.0], has_reader=False))
    recorder.tokens(0, 9.0)
    recorder.end(0)
    summary = summarise(recorder.records(), SystemFacts())
    assert summary["qoe"] == {"mean": None, "p1": None, "p10": None, "share_ge_0_95": None}
    assert summary["completed"] == 1


def test_the_summary_counts_what_it_says() -> None:
    """Four requests at 0, 1, 2, 3 s; the last fails. TTFT 1, 2, 3 s; two tokens each, 0.5, 1 and 1.5 s apart."""
    records = record([[1.0, 0.5], [2.0, 1.0], [3.0, 1.5], []])
    summary = summarise(records, SystemFacts(preemptions=7), slo=Slo(ttft_s=2.0, tpot_s=0.5))
    assert (summary["requests"], summary["completed"], summary["refused"]) == (4, 3, 1)
    assert summary["ttft_s"] == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "p999": 2.998}
    assert summary["tpot_s"]["mean"] == 1.0
    assert summary["stall_s"] == {"max": 1.5, "p99": 1.49}
    assert summary["throughput_tokens_per_s"] == pytest.approx(6 / 6.5, rel=1e-5)
    assert summary["tokens_until_s"] == {"p99": pytest.approx(5 + 0.95 * 1.5), "last": 6.5}
    assert summary["effective_tokens_per_s"] <= summary["throughput_tokens_per_s"]
    assert summary["tds_tokens_per_s"] == pytest.approx((1 / 0.5 + 1 / 1.0 + 1 / 1.5) / 3, rel=1e-5)
    assert summary["preemptions"] == 7
    shares = {"ttft_share": 0.5, "tpot_share": 0.25, "both_share": 0.25}
    assert summary["slo"] == {"ttft_s": 2.0, "tpot_s": 0.5, **shares, "ttft_held_until_s": 0.0}


@given(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=40), st.floats(0.1, 4.0))
def test_a_ttft_holds_until_the_first_window_above_it(ttft_s: list[float], limit_s: float) -> None:
    """A request per second: windows of five, the last one perhaps of fewer."""
    held_s = held_until_s(record([[each] for each in ttft_s]), limit_s)
    windows = [ttft_s[i : i + 5] for i in range(0, len(ttft_s), 5)]
    sound = [sum(window) <= limit_s * len(window) + 1e-9 for window in windows]
    expected = 5.0 * sound.index(False) if False in sound else len(ttft_s) - 1.0
    assert held_s == expected or any(abs(sum(w) - limit_s * len(w)) < 1e-6 for w in windows)


def test_a_request_without_a_whole_answer_does_not_hold() -> None:
    answers: list[list[float]] = [[0.1]] * 12 + [[]] + [[0.1]] * 7
    assert held_until_s(record(answers), 1.0) == 10.0
    assert held_until_s(record([[0.1]] * 20), 1.0) == 19.0
    early = record([[0.1]] * 3, arrival_s=[0.0, 1.0, 14.0])
    assert held_until_s(early, 1.0) == 14.0


def test_requests_before_the_warm_up_do_not_count() -> None:
    records = record([[100.0], [1.0], [1.0]])
    assert summarise(records, SystemFacts(), warm_up_s=1.0)["ttft_s"]["mean"] == 1.0
    assert summarise(records, SystemFacts(), warm_up_s=1.0)["requests"] == 2


def test_an_answer_of_one_token_keeps_any_time_per_token() -> None:
    kept = in_time(record([[0.5], [0.5, 9.0]]), Slo(1.0, 1.0))
    assert kept["both"].tolist() == [1.0, 0.0]


def test_nothing_at_all_has_a_summary() -> None:
    summary = summarise(record([[]]), SystemFacts(), slo=Slo(1, 1), warm_up_s=5.0)
    assert summary["requests"] == 0
    assert summary["ttft_s"]["p99"] is None
    assert summary["throughput_tokens_per_s"] is None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_keeps_six_digits_and_is_stable(value: float) -> None:
    once = rounded({"a": [value]})["a"][0]
    assert once == pytest.approx(value, rel=1e-5)
    assert rounded(once) == once
