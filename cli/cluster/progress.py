"""Says how far a starting cluster is, from the workers' reports: a live line on a terminal, else a line per step."""

from __future__ import annotations

from cli.console import Console
from shared.ids import WorkerId
from shared.messages.report import WorkerPhase, WorkerReport
from shared.subjects import Subjects
from shared.transport.bus import Bus, Message, Subscription
from shared.wire import WireError, decode_json

BAR_CELLS = 20
LINE_STEP_RATIO = 0.25
"""Without a terminal, a line is written when a worker is this much further, or does something else."""


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
        self._said: dict[str, tuple[str, float]] = {}

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
        for name in self._names:
            self._say_step(name, elapsed_s)

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

    def _say_step(self, name: str, elapsed_s: float) -> None:
        report = self._reports.get(name)
        if report is None:
            return
        doing = report.progress_text if report.phase is WorkerPhase.LOADING else report.phase.value
        said, ratio = self._said.get(name, ("", -1.0))
        if doing == said and report.progress_ratio < ratio + LINE_STEP_RATIO:
            return
        self._said[name] = (doing, report.progress_ratio)
        share = f" {report.progress_ratio:.0%}" if report.phase is WorkerPhase.LOADING else ""
        self._console.line(f"{elapsed_s:5.1f} s  {name}{share} {doing}")


def bar(ratio: float, cells: int = BAR_CELLS) -> str:
    """Return a bar of this many cells, filled by the ratio (0 to 1)."""
    filled = min(cells, max(0, int(ratio * cells)))
    return "[" + "#" * filled + "." * (cells - filled) + "]"
