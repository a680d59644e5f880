"""Who is served: by what each gains, as many as memory holds and as are still faster than every reader. Pure.

Some rows may come *last*, behind all others, who share what these leave: those that run first, then as they came.
Nobody sits out so that others think faster: of who thinks the speed of the reader counts, who is to come.

Source: Andes (arXiv 2404.16283), section 4.2 and algorithm 1, of which `gain.py` and `packing.py` are the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.worker.scheduling.andes_settings import AndesSettings
from services.worker.scheduling.best_effort import Remainder
from services.worker.scheduling.blocks_math import Places, blocks_taken
from services.worker.scheduling.gain import Gains
from services.worker.scheduling.packing import batch_sizes, greedy, most_in_time, most_that_fit
from services.worker.scheduling.view import F64, SchedulerView


class Ranking(NamedTuple):
    """Who is served, of some rows, by their places."""

    order: Places
    """[n] who comes first first."""
    num_first: int
    """The first of them: all but those that come last."""
    num_served: int
    """The first of these."""
    gain: F64
    """[n] what it gains to serve each."""
    is_slow: bool
    """Steps with as many as memory holds are slower than some reader: who is not served sits out."""
    num_in_time: int
    """So many can decode in steps that are as fast as every reader."""


def rank(
    view: SchedulerView, settings: AndesSettings, left: Remainder | None = None, weights: F64 | None = None
) -> tuple[Ranking, Gains]:
    """Return who of all rows is served: all while memory is enough and steps are as fast as every reader.

    It is at least one: alone a row may use every block.

    Args:
        view: of this moment.
        settings: of the policy.
        left: who comes last; None: nobody.
        weights: see `Gains.priority`.
    """
    rows = np.concatenate([view.running, view.preempted, view.waiting]).astype(np.intp)
    num_blocks, capacity = blocks_taken(view, rows)
    gains, first = Gains(view, rows, num_blocks, capacity, settings, left), np.arange(rows.size)
    if gains.is_last is not None:
        first = np.flatnonzero(~gains.is_last)
    taken = num_blocks[first]
    most, num = max(view.limits.max_batch_rows * view.limits.num_lanes - view.num_in_flight, 0), taken.size
    fits = num <= most and int(taken.sum()) <= capacity + 1
    largest = num if fits else most_that_fit(taken, capacity + 1, most)
    quickest_s = float(_reading_gap_s(view, gains, first).min(initial=np.inf))
    is_slow, in_time = gains.period_s(largest) > quickest_s, most
    if is_slow or left is not None:
        in_time = most_in_time(gains.period_s, quickest_s, largest if is_slow else most)
    if fits and not is_slow:
        gain = gains.gain(gains.period_s(num))
        return Ranking(
            np.argsort(-gains.priority(gain, weights), kind="stable"), num, num, gain, is_slow, in_time
        ), gains
    sizes = [largest]
    if is_slow:
        sizes = batch_sizes(in_time, largest, settings.num_batch_sizes)
    best, most_gained = None, -1.0
    for size in sizes:
        gain = gains.gain(gains.period_s(size))
        order, count = greedy(gains.priority(gain, weights), num_blocks, capacity + 1, size)
        if (gained := float(gain[order[:count]].sum())) > most_gained:
            best, most_gained = Ranking(order, num, max(count, 1), gain, is_slow, in_time), gained
    assert best is not None, "there is a size to try"
    return best, gains


def _reading_gap_s(view: SchedulerView, gains: Gains, places: Places) -> F64:
    """Return the seconds between two tokens of the text for the readers of some rows, or of nobody who reads."""
    gap_s, thinks = gains.readers.gap_s[places], view.columns.thinks.take(gains.rows[places])
    if not np.count_nonzero(thinks):
        return gap_s
    return np.where(thinks, 1 / view.columns.qoe_speed.take(gains.rows[places]), gap_s)
