"""A small bursty load and what is seen of a cluster under it: throttling, use of KV memory, groups that come and go.

    rate    calm   burst   calm   burst   calm        so many requests in each piece, at times, and of lengths, by seed
            ────╮ ╭─────╮ ╭────╮ ╭─────╮ ╭────
                ╰─╯     ╰─╯    ╰─╯     ╰─╯

Pure: seeds and views in, requests and figures out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport
from sim.workload.workload import Workload
from tests.support.workloads import plain_workload


@dataclass(frozen=True, slots=True)
class BurstShape:
    """One load."""

    calm_s: float = 2.6
    """Length of a calm piece, seconds; one comes before, between and after the bursts."""
    calm_requests: int = 4
    """That arrive in one."""
    burst_s: float = 4.5
    burst_requests: int = 56
    num_bursts: int = 2
    prompt_tokens: tuple[int, int] = (80, 160)
    """Least and most of a prompt."""
    output_tokens: tuple[int, int] = (200, 320)
    """Least and most of an answer."""
    reader: tuple[float, float] = (1.0, 4.8)
    """What QoE expects: seconds to the first token, then tokens per second (Andes's reader of English text)."""
    stretch: float = 1.0
    """Every time is multiplied by it: for slower machines, or those that others use."""

    def draw(self, seed: int) -> Workload:
        """Return the requests of this seed: each piece has its number of them, at times drawn evenly."""
        random = np.random.default_rng(seed)
        pieces = [(self.calm_s, self.calm_requests)]
        pieces += [(self.burst_s, self.burst_requests), (self.calm_s, self.calm_requests)] * self.num_bursts
        times, begin_s = [], 0.0
        for length_s, count in pieces:
            times.append(begin_s + np.sort(random.uniform(0.0, length_s, count)))
            begin_s += length_s
        arrival_s = self.stretch * np.concatenate(times)
        lengths = (
            random.integers(*bounds, len(arrival_s), dtype=np.int32, endpoint=True)
            for bounds in (self.prompt_tokens, self.output_tokens)
        )
        ttft_s, speed = self.reader
        return plain_workload(arrival_s, *lengths, ttft_s=ttft_s, speed=speed, seed=seed, name=f"bursts, seed {seed}")


@dataclass(frozen=True, slots=True)
class Watched:
    """What views of a cluster say of one run."""

    num_windows: int
    """Times in which a worker was throttled; two that are less than `JOIN_S` apart are one."""
    throttled_s: float
    """In all."""
    mean_use_ratio: float
    """KV blocks in use over the blocks that there are, mean over time."""
    demand_peak_ratio: float
    """Most KV blocks in use and asked for, over the blocks that there are without groups, or with them if they stay."""
    drops: int
    """Groups that formed."""
    restores: int
    """Groups that dissolved."""
    grouped_ratio: float = 0.0
    """Share of the time in which there was a group."""


JOIN_S = 1.0
"""Two throttled windows with less than this between them are one."""


class BurstWatch:
    """Takes the views of one run in order."""

    def __init__(self) -> None:
        self._last: tuple[float, ClusterView] | None = None
        self._throttled: list[tuple[float, float]] = []
        self._use = self._time_s = 0.0
        self._peak = 0
        self._own_blocks = self._group_blocks = 0
        self._grouped_s = 0.0
        self._groups = (0, 0)
        """Formed, dissolved."""

    def take(self, view: ClusterView, at_s: float) -> None:
        """Note a view that came at this instant; what it says holds until the next one."""
        if self._last is not None:
            self._hold(self._last[1], self._last[0], at_s)
            before, after = _groups(self._last[1]), _groups(view)
            self._groups = (self._groups[0] + len(after - before), self._groups[1] + len(before - after))
        num_blocks = sum(report.num_blocks for report in _serving(view))
        if _groups(view):
            self._group_blocks = max(self._group_blocks, num_blocks)
        else:
            self._own_blocks = max(self._own_blocks, num_blocks)
        self._peak = max(self._peak, sum(r.num_used_blocks + r.num_demanded_blocks for r in _serving(view)))
        self._last = at_s, view

    def _hold(self, view: ClusterView, from_s: float, to_s: float) -> None:
        reports = _serving(view)
        num_blocks = sum(report.num_blocks for report in reports)
        if num_blocks:
            self._use += (to_s - from_s) * sum(report.num_used_blocks for report in reports) / num_blocks
            self._time_s += to_s - from_s
            self._grouped_s += (to_s - from_s) * bool(_groups(view))
        if any(status.throttled for status in view.workers):
            if self._throttled and from_s - self._throttled[-1][1] < JOIN_S:
                self._throttled[-1] = (self._throttled[-1][0], to_s)
            else:
                self._throttled.append((from_s, to_s))

    def figures(self) -> Watched:
        """Return what was seen so far."""
        return Watched(
            num_windows=len(self._throttled),
            throttled_s=sum(end_s - begin_s for begin_s, end_s in self._throttled),
            mean_use_ratio=self._use / self._time_s if self._time_s else 0.0,
            demand_peak_ratio=self._peak / max(self._own_blocks or self._group_blocks, 1),
            drops=self._groups[0],
            restores=self._groups[1],
            grouped_ratio=self._grouped_s / self._time_s if self._time_s else 0.0,
        )


def _serving(view: ClusterView) -> list[WorkerReport]:
    """Return the reports of those on whom requests are placed: alone, or leading a group."""
    return [
        status.report
        for status in view.workers
        if status.liveness is Liveness.ALIVE
        and status.report.phase is WorkerPhase.READY
        and status.report.group in ("", status.report.worker_id)
    ]


def _groups(view: ClusterView) -> frozenset[str]:
    return frozenset(status.report.group for status in view.workers if status.report.group)
