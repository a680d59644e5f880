"""Says how far a starting cluster is, from the workers' reports: a live line on a terminal, else a line per step."""

from __future__ import annotations

from cli.console import Console
from shared.ids import WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Bus, Message, Subscription
from shared.wire import WireError, decode_json

BAR_CELLS = 20
LINE_S = 5.0
"""Without a terminal, between two lines."""


class StartProgress:
    """Hears the reports of the expected workers.

    Args:
        names: of the workers that must become ready.
        console: where progress is shown.
    """

    def __init__(self, names: list[str], console: Console) -> None:
        self._names = names
        self._console = console
        self._reports: dict[str, WorkerReport] = {}
        self._said_s = 0.0

    @property
    def all_ready(self) -> bool:
        """Whether every expected worker has reported that it is ready."""
        reports = [self._reports.get(name) for name in self._names]
        return all(report is not None and report.phase is WorkerPhase.READY for report in reports)

    async def listen(self, bus: Bus, subjects: Subjects) -> Subscription:
        """Hear reports until the subscription is closed."""
        return await bus.subscribe(subjects.all_reports(), self._on_report)

    def show(self, elapsed_s: float) -> None:
        """Show the present state."""
        if self._console.is_terminal:
            parts = [self._describe(name) for name in self._names]
            self._console.show_status(f"{elapsed_s:4.0f} s  " + " · ".join(parts))
            return
        if elapsed_s - self._said_s >= LINE_S and not self.all_ready:
            self._said_s = elapsed_s
            self._console.line(f"{elapsed_s:5.1f} s  {self._describe_all()}")

    def _on_report(self, message: Message) -> None:
        try:
            report = decode_json(message.data, WorkerReport)
        except WireError:  # the monitor hears it too; it counts and logs it
            return
        if report.worker_id in map(WorkerId, self._names):
            self._reports[report.worker_id] = report

    def _describe(self, name: str) -> str:
        report = self._reports.get(name)
        if report is None:
            return f"{name} starting"
        if report.phase is not WorkerPhase.LOADING:
            return f"{name} {report.phase.value}"
        return f"{name} {bar(report.progress_ratio)} {report.progress_ratio:4.0%} {report.progress_text}".rstrip()

    def _describe_all(self) -> str:
        """Return how many are ready, and what the one does that is furthest from it."""
        reports = {name: self._reports.get(name) for name in self._names}
        ratios = {name: _ratio(report) for name, report in reports.items()}
        last = min(self._names, key=lambda name: ratios[name])
        report, num_ready = reports[last], sum(ratio > 1 for ratio in ratios.values())
        doing = "starting" if report is None else f"{report.progress_ratio:.0%} {report.progress_text}"
        return f"{num_ready} of {len(self._names)} workers ready; {last} {doing}".rstrip()


def _ratio(report: WorkerReport | None) -> float:
    """Return how far a worker is: above 1 once it is ready, below 0 before it has said anything."""
    if report is None:
        return -1.0
    return 2.0 if report.phase is WorkerPhase.READY else report.progress_ratio


def bar(ratio: float, cells: int = BAR_CELLS) -> str:
    """Return a bar of this many cells, filled by the ratio (0 to 1)."""
    filled = min(cells, max(0, int(ratio * cells)))
    return "[" + "#" * filled + "." * (cells - filled) + "]"
