"""Both modes of the pacer as state machines: nothing lost, nothing early, and in smooth mode nothing held for long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_client.pacer import DirectPacer, PaceMode, Pacer, ReadingPacer, Shown, SmoothPacer, SmoothPacing, make_pacer
from sluice_client.pacer_base import cut_piece
from sluice_client.qoe import QoeTarget, displayed_times, final_qoe

TARGET = QoeTarget(ttft_s=1.0, speed_tokens_per_s=4.8)
PACING = SmoothPacing()
READING_PER_S = TARGET.speed_tokens_per_s / PACING.tokens_per_word
MODES: list[PaceMode] = ["reading", "smooth", "off"]
TEXTS = ["word ", " two", "a", " ", "\n", "中", "文。", "```", "`", "{", "e\u0301 ", "", "x" * 30]


@dataclass(frozen=True)
class Arrival:
    at_s: float
    text: str
    num_tokens: int = 1
    paced: bool = True


ARRIVALS = st.lists(
    st.tuples(
        st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 3)),
        st.sampled_from(TEXTS),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=60,
)


def arrivals_of(raw: list[tuple[float, str, int, bool]]) -> list[Arrival]:
    now_s, arrivals = 0.0, []
    for gap_s, text, num_tokens, paced in raw:
        now_s += gap_s
        arrivals.append(Arrival(now_s, text, num_tokens, paced))
    return arrivals


def words(times: Sequence[float]) -> list[Arrival]:
    return [Arrival(t, f"w{i} ") for i, t in enumerate(times)]


def play(pacer: Pacer, arrivals: list[Arrival], finish_s: float | None = None) -> list[Shown]:
    """Push everything, finish (at the last arrival if not told), and take everything in one pop at the very end."""
    for arrival in arrivals:
        pacer.push(arrival.at_s, arrival.text, arrival.num_tokens, paced=arrival.paced)
    pacer.finish(finish_s if finish_s is not None else (arrivals[-1].at_s if arrivals else 0.0))
    return pacer.pop(float("inf"))


def text_of(shown: list[Shown]) -> str:
    return "".join(item.text for item in shown)


@pytest.mark.parametrize("mode", MODES)
@given(raw=ARRIVALS)
def test_everything_is_shown_once_in_order_and_never_before_it_arrived(
    mode: PaceMode, raw: list[tuple[float, str, int, bool]]
) -> None:
    arrivals = arrivals_of(raw)
    pacer = make_pacer(mode, TARGET)
    shown = play(pacer, arrivals)
    assert text_of(shown) == "".join(arrival.text for arrival in arrivals)
    assert sum(item.num_tokens for item in shown) == sum(arrival.num_tokens for arrival in arrivals)
    assert [item.at_s for item in shown] == sorted(item.at_s for item in shown)
    assert (pacer.buffered_tokens, pacer.buffered_chars, pacer.next_due_s()) == (0, 0, None)
    position, ends = 0, [(0, 0.0)]
    for arrival in arrivals:
        ends.append((ends[-1][0] + len(arrival.text), arrival.at_s))
    for item in shown:
        position += len(item.text)
        arrived_s = next(at_s for end, at_s in ends if end >= position)
        assert item.at_s >= arrived_s - 1e-9


@pytest.mark.parametrize("mode", MODES)
@given(raw=ARRIVALS, seed=st.integers(0, 2**32))
def test_what_is_shown_when_does_not_depend_on_when_it_is_popped(
    mode: PaceMode, raw: list[tuple[float, str, int, bool]], seed: int
) -> None:
    """A late timer, or a hidden tab, delays nothing further."""
    arrivals, rng = arrivals_of(raw), random.Random(seed)
    expected = play(make_pacer(mode, TARGET), arrivals)
    pacer, shown = make_pacer(mode, TARGET), []
    for before, arrival in zip([Arrival(0.0, ""), *arrivals], arrivals, strict=False):
        for pop_s in sorted(rng.uniform(before.at_s, arrival.at_s) for _ in range(rng.randint(0, 3))):
            shown += pacer.pop(pop_s)
            due_s = pacer.next_due_s()
            assert due_s is None or due_s > pop_s
        pacer.push(arrival.at_s, arrival.text, arrival.num_tokens, paced=arrival.paced)
        if rng.random() < 0.3:
            shown += pacer.pop(arrival.at_s)
    pacer.finish(arrivals[-1].at_s if arrivals else 0.0)
    while (due_s := pacer.next_due_s()) is not None:
        shown += pacer.pop(due_s)
    assert [(item.text, item.at_s) for item in shown if item.text] == [
        (item.text, item.at_s) for item in expected if item.text
    ]


@pytest.mark.parametrize("mode", MODES)
@given(raw=ARRIVALS, skip_after=st.integers(0, 60))
def test_skip_shows_all_that_arrived_now_and_the_rest_as_it_arrives(
    mode: PaceMode, raw: list[tuple[float, str, int, bool]], skip_after: int
) -> None:
    arrivals = arrivals_of(raw)
    pacer = make_pacer(mode, TARGET)
    for arrival in arrivals[:skip_after]:
        pacer.push(arrival.at_s, arrival.text, arrival.num_tokens, paced=arrival.paced)
    now_s = arrivals[:skip_after][-1].at_s if arrivals[:skip_after] else 0.0
    pacer.skip(now_s)
    assert text_of(pacer.pop(now_s)) == "".join(arrival.text for arrival in arrivals[:skip_after])
    for arrival in arrivals[skip_after:]:
        pacer.push(arrival.at_s, arrival.text, arrival.num_tokens, paced=arrival.paced)
        assert text_of(pacer.pop(arrival.at_s)) == arrival.text
    assert pacer.buffered_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_qoe_is_that_of_the_arrivals_in_every_mode(mode: PaceMode) -> None:
    rng = random.Random(11)
    for _ in range(50):
        times = sorted(rng.uniform(0, 20) for _ in range(40))
        pacer = make_pacer(mode, TARGET)
        shown, stats = play(pacer, words(times)), pacer.stats()
        assert stats.qoe == pytest.approx(final_qoe(TARGET, times), abs=1e-9)
        assert (stats.ttft_s, stats.received_s, stats.shown_s) == (times[0], times[-1], shown[-1].at_s)


@pytest.mark.parametrize("mode", MODES)
def test_buffer_depth_counts_tokens_and_characters_that_wait(mode: PaceMode) -> None:
    pacer = make_pacer(mode, TARGET)
    for i in range(10):
        pacer.push(0.0, "word ", 2)
        assert pacer.buffered_tokens == 2 * (i + 1)
        assert pacer.buffered_chars == 5 * (i + 1)
    taken = pacer.pop(1.3)
    assert taken
    assert pacer.buffered_tokens == 20 - sum(item.num_tokens for item in taken)
    assert pacer.stats().buffered_chars == 50 - len(text_of(taken))


def test_a_pacer_refuses_text_after_the_end_and_modes_that_do_not_exist() -> None:
    pacer = make_pacer("smooth")
    pacer.finish(1.0)
    with pytest.raises(AssertionError, match="after finish"):
        pacer.push(2.0, "late")
    with pytest.raises(ValueError, match="fast"):
        make_pacer("fast")  # type: ignore[arg-type]
    assert isinstance(make_pacer("off"), DirectPacer)


class TestReading:
    def test_each_token_is_shown_at_its_displayed_instant(self) -> None:
        rng = random.Random(12)
        for _ in range(300):
            target = QoeTarget(rng.uniform(0.1, 3), rng.uniform(1, 50))
            times = sorted(rng.uniform(0, rng.choice((0.5, 5, 50))) for _ in range(60))
            shown = play(ReadingPacer(target), words(times))
            expected = displayed_times(target, times)
            assert [item.at_s for item in shown] == pytest.approx(expected, abs=1e-9)

    def test_a_piece_of_several_tokens_is_shown_word_by_word(self) -> None:
        """A server that is behind puts many tokens into one event; the reader is not to wait for the last of them."""
        shown = play(ReadingPacer(TARGET), [Arrival(0.0, "one two three four", 8), Arrival(0.0, "你好", 2)])
        assert [item.text for item in shown] == ["one", " two", " three", " four", "你", "好"]
        assert [item.at_s for item in shown] == pytest.approx([1 + i / 4.8 for i in (1, 3, 5, 7, 8, 9)])

    @given(st.text("ab 你\n\u00a0", max_size=30), st.integers(0, 40))
    def test_parts_of_a_piece_hold_its_text_and_its_tokens_evenly(self, text: str, num_tokens: int) -> None:
        parts = list(cut_piece(text, num_tokens))
        assert "".join(part for part, _ in parts) == text
        counts = [count for _, count in parts]
        assert sum(counts) == num_tokens
        assert len(parts) == 1 or (min(counts) >= 1 and max(counts) - min(counts) <= 1)
        assert len(parts) <= max(num_tokens, 1)

    def test_a_word_of_several_tokens_waits_for_its_last_one(self) -> None:
        shown = play(ReadingPacer(TARGET), [Arrival(0.0, "ab", 3), Arrival(0.0, "c", 1)])
        assert [item.at_s for item in shown] == pytest.approx([1 + 2 / 4.8, 1 + 3 / 4.8])

    def test_text_without_a_token_goes_with_the_text_before_it(self) -> None:
        shown = play(ReadingPacer(TARGET), [Arrival(0.0, "a", 2), Arrival(0.1, "b", 0)])
        assert [item.at_s for item in shown] == pytest.approx([1 + 1 / 4.8] * 2)

    def test_stalls_are_the_growth_of_the_lag_after_the_first_token(self) -> None:
        """The first token 2 s late is no stall; then a gap of 3 reading gaps is one stall of 2 of them."""
        gap_s = 1 / 4.8
        pacer = ReadingPacer(TARGET)
        play(pacer, words([3.0, 3.0 + gap_s, 3.0 + 4 * gap_s, 3.0 + 5 * gap_s]))
        assert pacer.stats().num_stalls == 1
        assert pacer.stats().stall_seconds == pytest.approx(2 * gap_s)

    def test_a_full_buffer_hides_a_pause(self) -> None:
        pacer = ReadingPacer(TARGET)
        play(pacer, words([0.5] * 100 + [15.0] * 10))
        assert pacer.stats().num_stalls == 0
        assert pacer.qoe == 1.0


def smooth_words(times: list[float], finish_s: float | None = None) -> tuple[SmoothPacer, list[float], list[float]]:
    """The pacer, when each word is shown, and how long after its arrival."""
    pacer = SmoothPacer(TARGET)
    shown = [item for item in play(pacer, words(times), finish_s) if item.text.strip()]
    instants = [item.at_s for item in shown]
    return pacer, instants, [s - t for s, t in zip(instants, times, strict=True)]


class TestSmooth:
    @given(raw=ARRIVALS, late_s=st.floats(0, 5))
    def test_no_text_is_held_longer_than_reserve_and_backlog_nor_past_the_drain(
        self, raw: list[tuple[float, str, int, bool]], late_s: float
    ) -> None:
        arrivals = arrivals_of(raw)
        finish_s = (arrivals[-1].at_s if arrivals else 0.0) + late_s
        shown = play(SmoothPacer(TARGET), arrivals, finish_s)
        position, starts = 0, [0]
        for arrival in arrivals:
            starts.append(starts[-1] + len(arrival.text))
        for item in shown:
            if item.text:
                arrived_s = next(a.at_s for a, end in zip(arrivals, starts[1:], strict=True) if end > position)
                assert item.at_s <= max(arrived_s, 0) + PACING.reserve_s + PACING.max_backlog_s + 1e-9
                assert item.at_s <= max(arrived_s, finish_s + PACING.drain_s) + 1e-9
            position += len(item.text)

    @pytest.mark.parametrize("gap_s", [0.001, 0.02, 0.2, 2.0])
    def test_the_first_word_is_shown_at_once(self, gap_s: float) -> None:
        _, instants, _ = smooth_words([0.7 + i * gap_s for i in range(20)])
        assert instants[0] == 0.7

    def test_a_leading_blank_does_not_hold_the_first_word_back(self) -> None:
        shown = play(SmoothPacer(TARGET), [Arrival(0.5, "\n"), Arrival(0.6, " Hello"), Arrival(0.61, " you")])
        assert [item.at_s for item in shown[:2]] == [0.5, 0.6]

    @pytest.mark.parametrize("words_per_s", [4.0, 10.0, 75.0, 400.0])
    def test_a_steady_generator_is_followed_at_its_own_rate_behind_the_reserve(self, words_per_s: float) -> None:
        times = [0.5 + i / words_per_s for i in range(int(8 * words_per_s))]
        _, instants, lags = smooth_words(times)
        half = len(times) // 2
        steady = [b - a for a, b in pairwise(instants)][half : -int(words_per_s)]
        assert max(steady) <= 1.3 / words_per_s
        assert lags[half] == pytest.approx(PACING.reserve_s, abs=0.02)

    def test_bursts_are_spread_to_an_even_flow(self) -> None:
        """A generator of 100 words/s whose network delivers 10 at a time: the largest gap shrinks from 100 to 30 ms."""
        _, instants, _ = smooth_words([0.5 + 0.1 * (i // 10) for i in range(600)])
        steady = [b - a for a, b in pairwise(instants[300:551])]
        assert max(steady) <= 0.03

    def test_a_generator_slower_than_the_reader_is_not_held_back(self) -> None:
        pacer, _, lags = smooth_words([0.5 + i for i in range(20)])
        assert max(lags) == pytest.approx(0, abs=1e-9)
        # each second the reader reads one word in 0.27 s and waits for the next
        assert pacer.stats().num_stalls == 19
        assert pacer.stats().stall_seconds == pytest.approx(19 * (1 - 1 / READING_PER_S))

    @pytest.mark.parametrize("words_per_s", [3.7, 10.0, 75.0])
    def test_the_reserve_covers_a_pause_of_its_own_length(self, words_per_s: float) -> None:
        count = int(6 * words_per_s)
        times = [0.5 + i / words_per_s + (PACING.reserve_s if i > count // 2 else 0.0) for i in range(count)]
        pacer, instants, _ = smooth_words(times)
        assert pacer.stats().num_stalls == 0
        around = instants[count // 2 - 3 : count // 2 + 6]
        arrived_gap_s = 1 / words_per_s + PACING.reserve_s
        assert max(b - a for a, b in pairwise(around)) < arrived_gap_s * 0.7

    def test_a_long_pause_is_one_stall_once_the_reader_has_caught_up(self) -> None:
        """40 words arrive at once: the reader needs 10.8 s for them. The next come at 20.5 s."""
        pacer, _, _ = smooth_words([0.5] * 40 + [20.5 + i / 10 for i in range(20)])
        stats = pacer.stats()
        assert stats.num_stalls == 1
        assert stats.stall_seconds == pytest.approx(20 - 40 / READING_PER_S, abs=0.35)

    def test_a_pause_while_the_reader_is_behind_is_no_stall(self) -> None:
        pacer, _, _ = smooth_words([0.5] * 40 + [8.0 + i / 10 for i in range(20)])
        assert pacer.stats().num_stalls == 0

    def test_an_answer_that_arrives_at_once_and_ends_is_drained_evenly(self) -> None:
        _, instants, _ = smooth_words([0.5] * 61)
        assert instants[-1] == pytest.approx(0.5 + PACING.drain_s)
        gaps = [b - a for a, b in pairwise(instants)]
        assert max(gaps) == pytest.approx(PACING.drain_s / 60)
        assert min(gaps) == pytest.approx(PACING.drain_s / 60)

    def test_code_appears_as_it_arrives_after_the_prose_before_it(self) -> None:
        pieces = ["Look:\n", "```\n", *(f"line {i}\n" for i in range(50)), "```\n", "Done ", "now."]
        arrivals = [Arrival(0.5 + i / 100, piece) for i, piece in enumerate(pieces)]
        shown = play(SmoothPacer(TARGET), arrivals, finish_s=10.0)
        lines = [(item.at_s, item.text) for item in shown if "line" in item.text]
        assert lines[-1][0] - arrivals[51].at_s < 1e-9
        assert next(item.at_s for item in shown if item.text.startswith("Done")) > arrivals[-2].at_s

    def test_unpaced_pieces_do_not_overtake(self) -> None:
        arrivals = [*words([0.5] * 5), Arrival(0.5, '{"tool": 1}', paced=False), *words([0.5] * 3)]
        shown = play(SmoothPacer(TARGET), arrivals, finish_s=10.0)
        at = {item.text: item.at_s for item in shown}
        assert at['{"tool": 1}'] == at["w4 "] > at["w3 "]

    def test_the_rest_of_a_word_follows_its_beginning_at_once(self) -> None:
        arrivals = [Arrival(0.5, "Un"), Arrival(0.9, "believ"), Arrival(1.3, "able"), Arrival(1.4, " news")]
        shown = play(SmoothPacer(TARGET), arrivals, finish_s=9.0)
        assert [(item.text, item.at_s) for item in shown[:3]] == [("Un", 0.5), ("believ", 0.9), ("able", 1.3)]

    @pytest.mark.parametrize(
        "field",
        ["drain_s", "max_backlog_s", "tokens_per_word", "rate_memory_s", "min_observed_s", "pause_s", "same_arrival_s"],
    )
    def test_parameters_out_of_range_are_refused_by_name(self, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            SmoothPacing(**{field: 0.0})
        with pytest.raises(ValueError, match="reserve_s"):
            SmoothPacing(reserve_s=float("inf"))
        assert SmoothPacing(reserve_s=0.0).reserve_s == 0.0

    def test_without_a_reserve_a_steady_stream_is_shown_as_it_arrives(self) -> None:
        times = [0.5 + i / 50 for i in range(100)]
        pacer = SmoothPacer(TARGET, SmoothPacing(reserve_s=0.0))
        shown = play(pacer, words(times))
        lags = [item.at_s - t for item, t in zip(shown, times, strict=True)]
        assert max(lags) <= PACING.min_observed_s + 0.021  # until the rate is known
        assert max(lags[20:]) <= 1e-9

    def test_after_a_burst_the_lag_returns_to_the_reserve(self) -> None:
        """100 words wait when the flow of 20 words/s begins; each second 5 more are shown than come."""
        _, _, lags = smooth_words(
            [0.5 + i / 20 for i in range(200)] + [10.5] * 100 + [10.55 + i / 20 for i in range(400)]
        )
        assert max(lags) > 0.8
        assert lags[-100] == pytest.approx(PACING.reserve_s, abs=0.02)
