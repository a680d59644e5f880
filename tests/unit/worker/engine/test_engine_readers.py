"""What a worker says of the readers of its sequences, beside the definition of what they experience."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.describe import describe
from services.worker.engine.readers import look_at_readers
from services.worker.engine.stats import take_stats
from shared.api_keys import Tier
from shared.messages.report import SLACK_EDGES_S
from shared.types import ReaderTarget
from sluice_client.qoe import QoeTarget, displayed_times, qoe_at
from tests.support.engine_builders import new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

SPEEDS = (1.0, 4.0, 15.0)


def read_by_some() -> tuple[EngineHarness, dict[int, list[float]]]:
    """Return six sequences, of which two wait and one that runs has no reader, and when tokens came, by name."""
    harness, rng = make_harness(max_batch_rows=4), np.random.default_rng(1)
    came: dict[int, list[float]] = {name: [] for name in range(6)}
    for name in range(6):
        target = ReaderTarget(ttft_s=0.5 + name / 4, speed_tokens_per_s=SPEEDS[name % 3])
        arrival_s = -4.0 if name == 3 else -float(rng.uniform(0, 3))
        new = new_sequence(name, max_tokens=40, arrival_s=arrival_s, qoe=target)
        harness.add(replace(new, tier=Tier.FLEX) if name == 3 else new)
    for _ in range(30):
        before = {name: len(harness.stories[1000 + name].text) for name in came}
        harness.now_s += float(rng.exponential(0.1))
        harness.step()
        for name, num in before.items():
            story = harness.stories[1000 + name]
            came[name] += [harness.engine.noted_s - story.new.arrival_s] * (len(story.text) - num)
    return harness, came


def test_the_dump_says_of_each_sequence_what_its_reader_has_and_how_old_its_last_token_is() -> None:
    harness, came = read_by_some()
    now_s = harness.engine.noted_s + 1.7
    rows = describe(harness.engine, now_s)
    json.dumps(rows, allow_nan=False)
    assert {row["status"] for row in rows} == {"running", "waiting"}
    for row in rows:
        name = int(str(row["request_id"])[1:])
        new, at = harness.stories[1000 + name].new, came[name]
        assert row["token_age_s"] == pytest.approx(now_s - new.arrival_s - (at[-1] if at else 0.0), abs=1e-3)
        assert row["tier"] == ("flex" if name == 3 else "default")
        if name == 3:
            assert (row["qoe"], row["slack_s"]) == (None, None)
            continue
        assert new.qoe is not None
        target = QoeTarget(new.qoe.ttft_s, new.qoe.speed_tokens_per_s)
        t_s, gap_s = now_s - new.arrival_s, 1 / target.speed_tokens_per_s
        assert row["qoe"] == pytest.approx(np.clip(qoe_at(target, at, t_s, finished=False), 0, 1), abs=1e-3)
        last_s = displayed_times(target, at)[-1] if at else target.ttft_s - gap_s
        assert row["slack_s"] == pytest.approx(last_s + gap_s - t_s, abs=1e-3)


def test_a_report_has_the_same_of_all_together() -> None:
    harness, _ = read_by_some()
    table, now_s = harness.engine.table, harness.engine.noted_s + 1.7
    rows, said = describe(harness.engine, now_s), look_at_readers(harness.engine, now_s)
    known = [row["qoe"] for row in rows if row["qoe"] is not None]
    assert said.qoe == pytest.approx(np.mean(np.array(known, dtype=float)), abs=1e-3)
    run = [row for row in rows if row["status"] == "running" and row["slack_s"] is not None]
    assert sum(said.slack_rows) == len(run) > 0
    for bucket, (low, high) in enumerate(zip((-np.inf, *SLACK_EDGES_S), (*SLACK_EDGES_S, np.inf), strict=True)):
        within = [row["num_blocks"] for row in run if low <= float(str(row["slack_s"])) < high]
        assert said.slack_rows[bucket] == len(within)
        assert said.slack_blocks[bucket] == sum(int(str(num)) for num in within)
    assert len(table.running) > len(run), "one is read by nobody"


def test_where_nobody_reads_nothing_is_said_of_readers() -> None:
    harness = make_harness()
    assert look_at_readers(harness.engine, 0.0).qoe is None
    harness.add(replace(new_sequence(0), tier=Tier.FLEX))
    harness.submit()
    said = look_at_readers(harness.engine, 5.0)
    assert (said.qoe, sum(said.slack_rows), sum(said.slack_blocks)) == (None, 0, 0)


@pytest.mark.parametrize("tiers", [(Tier.FLEX,), (Tier.FLEX, Tier.DEFAULT), (Tier.PRIORITY, Tier.DEFAULT), tuple(Tier)])
def test_a_report_counts_by_tier_what_the_dump_says_of_each_sequence(tiers: tuple[Tier, ...]) -> None:
    harness = make_harness(max_batch_rows=4)
    for name in range(9):
        harness.add(replace(new_sequence(name, max_tokens=40), tier=tiers[name % len(tiers)]))
    for _ in range(12):
        harness.step()
    rows, found = describe(harness.engine, harness.now_s), take_stats(harness.engine).tiers
    assert [each.tier for each in found] == [tier.label for tier in sorted(tiers, reverse=True)]
    for each in found:
        own = [row for row in rows if row["tier"] == each.tier]
        runs = [row for row in own if row["status"] == "running"]
        assert (each.num_running, each.num_waiting) == (len(runs), len(own) - len(runs))
        assert each.num_used_blocks == sum(int(str(row["num_blocks"])) for row in own)
    assert sum(each.num_running for each in found) == 4
    assert sum(each.num_used_blocks for each in found) == take_stats(harness.engine).num_used_blocks > 0


def test_while_all_is_of_the_default_tier_a_report_says_nothing_of_tiers() -> None:
    harness = make_harness()
    assert take_stats(harness.engine).tiers == ()
    harness.add(new_sequence(0))
    harness.submit()
    assert take_stats(harness.engine).tiers == ()
