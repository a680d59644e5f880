"""The bursty load of `benchmarks.live_burst`, and what it makes of a cluster's views."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.burst_figures import Figures, Run, report
from benchmarks.burst_load import JOIN_S, BurstShape, BurstWatch
from shared.messages.report import ClusterView
from tests.support.statuses import make_status, make_view

SHAPE = BurstShape()


@pytest.mark.parametrize("seed", range(5))
def test_every_piece_has_its_requests_and_every_length_its_limits(seed: int) -> None:
    load = SHAPE.draw(seed)
    borders = np.cumsum([0.0, SHAPE.calm_s, *[SHAPE.burst_s, SHAPE.calm_s] * SHAPE.num_bursts])
    counts, _ = np.histogram(load.arrival_s, borders)
    assert counts.tolist() == [SHAPE.calm_requests, *[SHAPE.burst_requests, SHAPE.calm_requests] * SHAPE.num_bursts]
    assert (np.diff(load.arrival_s) >= 0).all()
    for lengths, (least, most) in ((load.num_prompt, SHAPE.prompt_tokens), (load.num_output, SHAPE.output_tokens)):
        assert least <= lengths.min() < lengths.max() <= most


def test_a_seed_is_a_load_and_a_stretch_changes_times_only() -> None:
    one, same, other = SHAPE.draw(1), SHAPE.draw(1), SHAPE.draw(2)
    slow = BurstShape(stretch=2.5).draw(1)
    for column in ("arrival_s", "num_prompt", "num_output"):
        assert (getattr(one, column) == getattr(same, column)).all()
        assert (getattr(one, column) != getattr(other, column)).any()
    assert slow.arrival_s == pytest.approx(2.5 * one.arrival_s)
    assert (slow.num_output == one.num_output).all()


def view(*used: int, throttled: bool = False, group: str = "", demanded: int = 0) -> ClusterView:
    """Workers of 10 blocks each; in a group the first one leads, and has the blocks of all and 5 more."""
    statuses = [
        make_status(
            f"w{index}",
            throttled=throttled and index == 0,
            num_blocks=10 * len(used) + 5 if group else 10,
            num_used_blocks=blocks,
            num_demanded_blocks=demanded,
            group=group,
            num_stages=len(used) if group else 1,
            stage=index if group else 0,
        )
        for index, blocks in enumerate(used)
    ]
    return make_view(*statuses)


def test_use_is_a_mean_over_time_and_of_a_group_its_leaders() -> None:
    watch = BurstWatch()
    watch.take(view(2, 4), 0.0)  # 6 of 20 for 3 s
    watch.take(view(20, 0, group="w0"), 3.0)  # 20 of 25 for 1 s
    watch.take(view(0, 0), 4.0)
    seen = watch.figures()
    assert seen.mean_use_ratio == pytest.approx((3 * 0.3 + 1 * 0.8) / 4)
    assert (seen.drops, seen.restores) == (1, 1)
    assert seen.grouped_ratio == pytest.approx(1 / 4)


def test_demand_is_counted_in_the_workers_own_capacity() -> None:
    watch = BurstWatch()
    watch.take(view(9, 9, demanded=3), 0.0)
    watch.take(view(25, 0, group="w0", demanded=2), 1.0)
    assert watch.figures().demand_peak_ratio == pytest.approx(27 / 20), "a member asks for nothing"
    static = BurstWatch()
    static.take(view(30, 0, group="w0"), 0.0)
    assert static.figures().demand_peak_ratio == pytest.approx(30 / 25)


@pytest.mark.parametrize("seed", range(20))
def test_windows_are_counted_as_on_a_line_of_instants(seed: int) -> None:
    """Oracle: a line of ticks; a window ends where no tick for `JOIN_S` is throttled."""
    random, tick_s = np.random.default_rng(seed), JOIN_S / 4
    line = np.repeat(random.random(30) < 0.4, random.integers(1, 8, 30))
    watch = BurstWatch()
    for index, is_throttled in enumerate([*line.tolist(), False]):
        watch.take(view(1, 1, throttled=is_throttled), index * tick_s)
    closed = line.copy()
    ticks = np.flatnonzero(line)
    for left, right in pairwise(ticks):
        if (right - left - 1) * tick_s < JOIN_S:
            closed[left:right] = True
    num_windows = int((np.diff(np.concatenate(([0], closed.astype(int)))) == 1).sum())
    seen = watch.figures()
    assert seen.num_windows == num_windows
    assert seen.throttled_s == pytest.approx(closed.sum() * tick_s)


def test_without_views_there_is_nothing() -> None:
    seen = BurstWatch().figures()
    assert (seen.num_windows, seen.mean_use_ratio, seen.demand_peak_ratio, seen.drops) == (0, 0.0, 0.0, 0)


def made_run(foreign_ratio: float, *, system: str = "fcfs", seed: int = 1, p99_s: float = 2.0) -> Run:
    spread = {"p50": p99_s / 2, "p99": p99_s}
    summary = {"completed": 9, "requests": 9, "ttft_s": spread, "tpot_s": spread}
    summary |= {"stall_s": {"p99": 0.1, "max": 0.2}, "qoe": {"mean": 0.9, "p10": 0.8}}
    return Run(system, seed, summary, BurstWatch().figures(), foreign_ratio, 0.0)


def test_of_each_run_the_least_disturbed_is_kept_in_the_file_and_only_for_the_same_load(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    figures = Figures(SHAPE, path)
    assert figures.missing("fcfs", [1, 2]) == [1, 2]
    for ratio, p99_s in ((0.3, 5.0), (0.04, 2.0), (0.2, 7.0)):
        figures.note(made_run(ratio, p99_s=p99_s))
    figures.note(made_run(0.3, seed=2))
    again = Figures(SHAPE, path)
    assert again.missing("fcfs", [1, 2, 3]) == [2, 3], "a disturbed run is missing still"
    assert again.of("fcfs", [2, 1, 3]) == [made_run(0.3, seed=2), made_run(0.04)]
    assert Figures(BurstShape(stretch=2.0), path).of("fcfs", [1]) == []


def test_ratios_are_by_seed_over_that_of_kunserve(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made_run(0.0, system="kunserve", seed=seed, p99_s=0.5) for seed in (1, 2, 3)]
    runs += [made_run(0.0, seed=seed, p99_s=p99_s) for seed, p99_s in ((1, 1.0), (2, 4.0))]
    report(runs)
    assert "| fcfs | 2.00 | 8.00 | - | 5.00 | 2.00 |" in capsys.readouterr().out
