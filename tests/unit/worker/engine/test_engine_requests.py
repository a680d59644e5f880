"""Sequences on their way in and out of the engine: refusals, repeats, takeovers, replays, ends, counts."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from services.worker.engine.invariants import check_engine
from services.worker.engine.stats import take_stats
from services.worker.scheduling.view import Columns
from services.worker.sequences.config import AddRefusal, NewSequence
from shared.api_keys import Tier
from shared.ids import StreamId
from shared.types import FinishReason, LatencyLimits, ReaderTarget
from tests.support.engine_builders import FOREVER, make_engine, new_sequence
from tests.support.engine_harness import STEP_S, make_harness


@pytest.mark.parametrize(
    ("new", "refusal"),
    [
        (new_sequence(prompt=[]), AddRefusal.INVALID),
        (new_sequence(prompt=[3, 100]), AddRefusal.INVALID),
        (new_sequence(generated=[100], max_tokens=9), AddRefusal.INVALID),
        (new_sequence(prompt=[1] * 200, generated=[1] * 57, max_tokens=99), AddRefusal.INVALID),
        (new_sequence(attempt=0), AddRefusal.INVALID),
        (new_sequence(attempt=65_536), AddRefusal.INVALID),
        (new_sequence(-1001), AddRefusal.INVALID),
        (new_sequence(num_prompt=256), AddRefusal.TOO_LONG),
        (new_sequence(num_prompt=200, max_tokens=56), None),
        (new_sequence(num_prompt=200, max_tokens=1000), None),
    ],
)
def test_a_sequence_that_can_never_run_is_refused(new: NewSequence, refusal: AddRefusal | None) -> None:
    """Vocabulary 100, context 256, 64 blocks of 4 = 256 slots."""
    outcome = make_engine().registry.add(new)
    assert (outcome if isinstance(outcome, AddRefusal) else None) is refusal


@pytest.mark.parametrize(("max_tokens", "fits"), [(13, True), (14, False)])
def test_the_last_token_needs_no_kv(max_tokens: int, fits: bool) -> None:
    """8 blocks of 4 = 32 slots; 20 prompt tokens and the KV of 12 outputs fill them."""
    outcome = make_engine(num_blocks=8).registry.add(new_sequence(num_prompt=20, max_tokens=max_tokens))
    assert (outcome is AddRefusal.TOO_LONG) is not fits


def test_a_full_table_refuses_and_takes_again_once_a_row_is_free() -> None:
    engine = make_engine(max_sequences=2)
    first = new_sequence(0)
    engine.registry.add(first)
    engine.registry.add(new_sequence(1))
    assert engine.registry.add(new_sequence(2)) is AddRefusal.FULL
    engine.registry.cancel(first.request_id, 1)
    assert engine.registry.add(new_sequence(2)) == 0
    check_engine(engine)


def test_a_repeated_submission_is_answered_alike_and_another_stream_is_a_duplicate() -> None:
    harness = make_harness()
    new = new_sequence(0)
    row = harness.add(new)
    assert harness.engine.registry.add(new) == row
    other = new_sequence(0)
    object.__setattr__(other, "stream", 77)
    assert harness.engine.registry.add(other) is AddRefusal.DUPLICATE
    assert take_stats(harness.engine).num_waiting == 1
    harness.drain()
    assert harness.engine.registry.add(new) is AddRefusal.DUPLICATE, "it has ended here: to run it again would be waste"
    assert harness.engine.registry.add(new_sequence(0, attempt=2)) == row


@pytest.mark.parametrize(
    ("generated", "stop_token_ids", "finish"),
    [([5, 6, 7, 8], (), FinishReason.LENGTH), ([5, 6], (6,), FinishReason.STOP), ([5, 1], (), FinishReason.STOP)],
)
def test_a_takeover_of_a_complete_sequence_ends_at_once(
    generated: list[int], stop_token_ids: tuple[int, ...], finish: FinishReason
) -> None:
    harness = make_harness(eos_token_ids=(1,))
    harness.add(new_sequence(0, generated=generated, max_tokens=4, stop_token_ids=stop_token_ids))
    [story] = harness.stories.values()
    assert (story.finish, story.text) == (finish, generated)
    assert not harness.engine.table.num_sequences


def test_a_takeover_goes_on_as_if_it_had_never_stopped() -> None:
    whole, rest = make_harness(), make_harness()
    whole.add(new_sequence(0, max_tokens=9))
    whole.drain()
    text = whole.stories[1000].text
    rest.add(new_sequence(0, max_tokens=9, generated=text[:4], attempt=2))
    rest.drain()
    assert rest.stories[1000].text == text


def test_replay_returns_outputs_while_the_sequence_runs_and_after_its_end() -> None:
    harness = make_harness()
    new = new_sequence(0, max_tokens=6, generated=[9, 8])
    harness.add(new)
    harness.step()
    harness.step()
    text = harness.stories[1000].text
    found = harness.engine.registry.replay(new.request_id, 1, 1)
    assert found is not None
    assert (found[0].tolist(), found[1]) == (text[1:], FinishReason.NONE)
    harness.drain()
    found = harness.engine.registry.replay(new.request_id, 1, 0)
    assert found is not None
    assert (found[0].tolist(), found[1]) == (harness.stories[1000].text, FinishReason.LENGTH)
    assert len(found[0]) == 6
    assert harness.engine.registry.replay(new.request_id, 2, 0) is None
    beyond = harness.engine.registry.replay(new.request_id, 1, 99)
    assert beyond is not None
    assert beyond[0].size == 0


def test_cancel_finds_only_what_is_there_and_counts_once() -> None:
    harness = make_harness()
    new = new_sequence(0)
    harness.add(new)
    assert not harness.engine.registry.cancel(new.request_id, 2)
    harness.submit()
    assert harness.engine.registry.cancel(new.request_id, 1)
    assert harness.engine.registry.cancel(new.request_id, 1), "it is still here until its step comes back"
    harness.land()
    assert not harness.engine.registry.cancel(new.request_id, 1)
    assert harness.stories[1000].finish is FinishReason.CANCELLED
    assert harness.engine.totals.num_finished == 1


def test_expired_sequences_end_as_cancelled_whether_they_run_or_wait() -> None:
    harness = make_harness(max_batch_rows=1)
    harness.add(new_sequence(0, max_tokens=50, expires_s=0.12))
    harness.add(new_sequence(1, max_tokens=50, expires_s=0.12))
    harness.add(new_sequence(2, max_tokens=2))
    harness.drain()
    finishes = [story.finish for story in harness.stories.values()]
    assert finishes == [FinishReason.CANCELLED, FinishReason.CANCELLED, FinishReason.LENGTH]
    assert len(harness.stories[1000].text) == 3, "steps that began before 0.12 s: at 0, 0.05 and 0.10"


def test_a_sequence_too_long_for_shrunk_memory_waits_without_blocking_others(scheduler: str) -> None:
    harness = make_harness(scheduler, num_blocks=16)
    harness.add(new_sequence(0, num_prompt=40, max_tokens=10))
    harness.step()
    harness.change_executor(8)
    assert take_stats(harness.engine).num_preempted == 1
    harness.add(new_sequence(1, num_prompt=8, max_tokens=4))
    for _ in range(10):
        harness.step()
    assert harness.stories[1001].finish is FinishReason.LENGTH
    assert harness.stories[1000].finish is FinishReason.NONE
    harness.change_executor(16)
    harness.finish()
    assert len(harness.stories[1000].text) == 10


def test_an_executor_that_changes_under_a_step_is_a_bug() -> None:
    harness = make_harness()
    harness.add(new_sequence(0))
    harness.submit()
    with pytest.raises(AssertionError, match="nothing is in flight"):
        harness.engine.leave_executor(harness.now_s)


def test_the_qoe_columns_follow_the_definition() -> None:
    """displayed[i] = max(ideal[i], delivered[i], displayed[i-1] + 1/speed); D sums displayed - ideal."""
    harness = make_harness()
    ttft_s, speed = 0.08, 12.0
    harness.add(
        new_sequence(0, max_tokens=30, arrival_s=-0.02, qoe=ReaderTarget(ttft_s=ttft_s, speed_tokens_per_s=speed))
    )
    harness.add(replace(new_sequence(1, max_tokens=30), tier=Tier.FLEX, qoe=ReaderTarget()))
    harness.add(new_sequence(2, max_tokens=30))
    random, table = np.random.default_rng(3), harness.engine.table
    displayed: list[float] = []
    ideal: list[float] = []
    for i in range(29):
        harness.now_s += float(random.exponential(0.05))
        harness.step()
        ideal.append(ttft_s + i / speed)
        before = displayed[-1] + 1 / speed if displayed else -1.0
        displayed.append(max(ideal[-1], harness.now_s + 0.02, before))
        assert table.qoe_last_s[0] == pytest.approx(displayed[-1])
        assert table.qoe_delay_sum_s[0] == pytest.approx(sum(np.subtract(displayed, ideal)))
    assert np.isnan([table.qoe_last_s[1], table.qoe_delay_sum_s[1], table.qoe_speed[1]]).all(), "best effort"
    assert (table.qoe_ttft_s[2], table.qoe_speed[2]) == (1.0, 4.8), "nobody has said"


def test_what_is_known_of_a_request_is_in_its_columns_and_no_column_but_the_readers_is_ever_undefined() -> None:
    harness = make_harness()
    limits = LatencyLimits(ttft_s=0.4, tpot_s=0.2)
    harness.add(replace(new_sequence(0, max_tokens=9), tier=Tier.PRIORITY, slo=limits, num_preemptions=2))
    batch = new_sequence(1, max_tokens=9, expires_s=50.0)
    harness.add(replace(batch, tier=Tier.FLEX))
    harness.add(replace(new_sequence(2, max_tokens=9, generated=[4]), slo=LatencyLimits(tpot_s=3.0), last_token_s=-1.5))
    columns = harness.engine.table.columns
    assert columns.tier[:3].tolist() == [Tier.PRIORITY, Tier.FLEX, Tier.DEFAULT]
    assert columns.slo_ttft_s[:3].tolist() == [0.4, np.inf, np.inf]
    assert columns.slo_tpot_s[:3].tolist() == [0.2, np.inf, 3.0]
    assert columns.expires_s[:3].tolist() == [FOREVER, 50.0, FOREVER]
    assert columns.last_token_s[:3].tolist() == [0.0, 1.0, -1.5], "there is no token: its arrival"
    assert columns.num_preemptions[:3].tolist() == [2, 0, 0]
    harness.step()
    landed_s = harness.now_s
    harness.step()
    assert (columns.last_token_s[:3] >= landed_s).all()
    unread = ("qoe_ttft_s", "qoe_speed", "qoe_gap_s", "qoe_last_s", "qoe_delay_sum_s")
    for each in fields(Columns):
        undefined = np.flatnonzero(np.isnan(getattr(columns, each.name)[:3])).tolist()
        assert undefined == ([1] if each.name in unread else []), each.name


def test_a_newer_attempt_that_takes_a_row_over_keeps_what_is_known_of_the_request() -> None:
    """The row was preempted twice more than who takes it over has heard."""
    harness = make_harness()
    new = replace(new_sequence(0, max_tokens=9), tier=Tier.PRIORITY, slo=LatencyLimits(ttft_s=0.4), num_preemptions=1)
    row = harness.add(new)
    for _ in range(2):
        harness.step()
        harness.engine._transitions.preempt(row)
    columns = harness.engine.table.columns
    names = ("tier", "slo_ttft_s", "last_token_s", "qoe_last_s", "qoe_delay_sum_s", "arrival_s")
    before = [getattr(columns, name)[row] for name in names]
    again = new_sequence(0, max_tokens=9, attempt=2, arrival_s=5.0)
    assert harness.engine.registry.hand_over(replace(again, stream=StreamId(7), num_preemptions=2)) == row
    assert [getattr(columns, name)[row] for name in names] == before
    assert columns.num_preemptions[row] == 3


def test_who_asks_for_more_than_anybody_reads_counts_as_the_default_reader() -> None:
    """The second token is displayed at his pace, and what was said of another speed is void; 20 tokens/s stay 20."""
    harness = make_harness()
    fast = ReaderTarget(ttft_s=0.01, speed_tokens_per_s=10_000)
    harness.add(replace(new_sequence(0, max_tokens=9, generated=[4], qoe=fast), displayed=(9.0, 9.0)))
    table = harness.engine.table
    assert (table.qoe_speed[0], table.qoe_gap_s[0], table.qoe_last_s[0]) == (4.8, 1 / 4.8, 0.01)
    harness.step()
    assert table.qoe_last_s[0] == pytest.approx(0.01 + 1 / 4.8)
    harness.add(new_sequence(1, qoe=ReaderTarget(speed_tokens_per_s=20)))
    assert table.qoe_speed[1] == 20


def test_the_form_goes_on_where_an_earlier_attempt_has_left_it() -> None:
    """Two tokens, the second one displayed at 3 s and together 2.5 s late; the third, at 3.1 s, waits for its turn."""
    harness = make_harness()
    target = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.0)
    new = new_sequence(0, max_tokens=9, generated=[4, 4], qoe=target, arrival_s=-3.05)
    harness.add(replace(new, displayed=(3.0, 2.5)))
    harness.step()
    table = harness.engine.table
    assert (table.qoe_last_s[0], table.qoe_delay_sum_s[0]) == (3.25, 2.5 + 1.75)


def test_outputs_of_an_earlier_attempt_count_as_shown_on_schedule() -> None:
    """Two tokens at ttft 1 s and 1.25 s; the third, at 0.05 s, is shown at 1.5 s without delay."""
    harness = make_harness()
    target = ReaderTarget(ttft_s=1.0, speed_tokens_per_s=4.0)
    harness.add(new_sequence(0, max_tokens=9, generated=[4, 4], qoe=target))
    harness.step()
    assert harness.engine.table.qoe_last_s[0] == pytest.approx(1.5)
    assert harness.engine.table.qoe_delay_sum_s[0] == pytest.approx(0.0)


@pytest.mark.parametrize(("max_rows", "num_queued"), [(8, 2), (2, 1), (1, 0)])
def test_stats_tell_who_waits_for_memory_and_who_for_a_place(max_rows: int, num_queued: int) -> None:
    """The first takes 8 of 10 blocks of 4 tokens; the next in line needs 3, the one behind it 1."""
    harness = make_harness("fcfs", num_blocks=10, max_model_len=40, max_batch_rows=max_rows)
    harness.add(new_sequence(0, num_prompt=31, max_tokens=2))
    alone = take_stats(harness.engine)
    assert (alone.num_head_blocks, alone.num_queued_for_memory) == (8, 0)
    harness.step()
    harness.add(new_sequence(1, num_prompt=12, max_tokens=2))
    harness.add(new_sequence(2, num_prompt=3, max_tokens=2))
    stats = take_stats(harness.engine)
    assert (stats.num_waiting, stats.num_head_blocks, stats.num_queued_for_memory) == (2, 3, num_queued)
    harness.drain()
    done = take_stats(harness.engine)
    assert (done.num_head_blocks, done.num_queued_for_memory) == (0, 0)


def test_stats_tell_what_is_left_to_compute_of_prompts_that_run_and_that_wait() -> None:
    """Steps of 32 tokens, blocks of 4, chunked: 70 tokens are 18 blocks, of which steps leave 10, 2 and none.

    The second prompt of 6 tokens, 2 blocks, waits behind it for two steps and goes along with the third one.
    """
    harness = make_harness("chunked")
    harness.add(new_sequence(0, num_prompt=70, max_tokens=9))
    harness.add(new_sequence(1, num_prompt=6, max_tokens=9))
    seen = [take_stats(harness.engine)]
    for _ in range(3):
        harness.step()
        seen.append(take_stats(harness.engine))
    assert [(stats.num_used_blocks, stats.num_uncomputed_blocks) for stats in seen] == [
        (0, 20),
        (8, 12),
        (16, 4),
        (20, 0),
    ]
    while harness.engine.table.num_sequences:
        assert take_stats(harness.engine).num_uncomputed_blocks == 0, (
            "nothing is left of a prompt, only the newest token"
        )
        harness.step()


def test_stats_count_what_happened() -> None:
    harness = make_harness(num_blocks=12, max_model_len=40)
    harness.add_all(3, num_prompt=10, max_tokens=20)
    before = take_stats(harness.engine)
    assert (before.num_waiting, before.num_demanded_blocks, before.num_used_blocks) == (3, 9, 0)
    harness.step()
    during = take_stats(harness.engine)
    assert (during.num_running, during.num_waiting, during.num_demanded_blocks) == (3, 0, 0)
    assert during.num_used_blocks == 9
    harness.drain()
    after = take_stats(harness.engine)
    assert (after.totals.num_finished, after.totals.num_generated_tokens, after.totals.num_prompt_tokens) == (3, 60, 30)
    assert after.totals.num_preemptions > 0
    assert after.totals.num_recomputed_tokens >= 10 * after.totals.num_preemptions
    assert after.totals.num_steps * STEP_S == pytest.approx(harness.now_s)


def test_admitted_rows_reach_the_executor_once_and_are_dropped_once() -> None:
    harness = make_harness(num_blocks=12, max_model_len=40)
    admitted, dropped = [], []  # type: tuple[list[int], list[int]]
    harness.add_all(4, num_prompt=10, max_tokens=20)
    while harness.engine.table.num_sequences:
        batch = harness.stepped()
        admitted += [init.row for init in batch.admits]
        dropped += batch.drops.tolist()
    assert harness.engine.totals.num_preemptions > 0
    assert sorted(admitted) == [0, 1, 2, 3]
    assert len(dropped) == 3, "the last one's drop waits for a next batch"


def test_a_row_that_is_paused_while_its_step_fails_is_still_paused_when_it_is_tried_again() -> None:
    harness = make_harness()
    for name in range(2):
        harness.add(new_sequence(name, max_tokens=4, channel=name))
    harness.submit()
    harness.engine.pause(1)
    harness.land("bad luck")
    for _ in range(6):
        harness.step()
    first, second = harness.stories.values()
    assert first.finish is FinishReason.LENGTH
    assert len(second.text) == 1, "the try that was under way counts, and no other step ran it"
    harness.engine.resume(1)
    harness.finish()
