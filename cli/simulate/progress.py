"""Says how far the runs are: a live line on a terminal, nothing elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cli.console import Console
from cli.simulate.jobs import RunDone
from sim.experiment.run import Progress


class RunProgress:
    """Hears of every run.

    Args:
        labels: of the jobs, in their order.
        console: where progress is shown.
        quiet: show nothing.
    """

    def __init__(self, labels: Sequence[str], console: Console, *, quiet: bool) -> None:
        self._labels = labels
        self._console = console
        self._is_shown = console.is_terminal and not quiet
        self._newest: dict[int, Progress] = {}
        self._num_done = 0
        self._began_s = time.monotonic()

    def hear(self, index: int, news: Progress | RunDone) -> None:
        """Take what a job says, and show where all are."""
        if not self._is_shown:
            return
        if isinstance(news, RunDone):
            self._newest.pop(index, None)
            self._num_done += 1
            speed = f", {news.end_s / news.wall_s:.0f} times as fast" if news.wall_s > 0 else ""
            self._console.line(f"{self._labels[index]}: {news.end_s:.0f} s in {news.wall_s:.1f} s{speed}")
        else:
            self._newest[index] = news
        self._show()

    def end(self) -> None:
        """Take the live line away."""
        self._console.end_status()

    def _show(self) -> None:
        running = (f"{self._labels[index]} {_describe(news)}" for index, news in sorted(self._newest.items()))
        done = f"{self._num_done} of {len(self._labels)} runs done"
        self._console.show_status(" · ".join((f"{time.monotonic() - self._began_s:4.0f} s  {done}", *running)))


def _describe(news: Progress) -> str:
    where = (
        f"{news.at_s:.0f}/{news.end_s:.0f} s"
        if news.at_s <= news.end_s
        else f"{news.at_s:.0f} s, nobody comes any more"
    )
    return f"{where}, {news.num_done}/{news.num_requests} requests"
