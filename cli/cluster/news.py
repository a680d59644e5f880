"""What an operator must know while a cluster runs, a line each. Pure: events, ends and their times in, lines out.

    worker   its process ends, or drains, or is silent for long ──► lost ──► ready or heard again: `WorkerReturn`
             silent for a moment ──► slow ──► heard again
    memory   a worker runs short; what the planner did about it

All else that happens is in the logs, and on the bus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cli.cluster.dump import Losses
from shared.messages.event import Event
from shared.messages.plan import FormGroup, Plan, RestoreInstance

REPEAT_S: Final = 60.0
"""In which the same is not said of the same worker again."""
_TOLD: Final = {
    "worker_incompatible": "{about} cannot be used: {reason}",
    "worker_left_out": "{about} is left out: {reason}",
    "worker_throttled": "memory is short at {about}: {reason}",
    "plan_failed": "layers did not move as planned: {reason}",
    "plan_aborted": "layers did not move as planned: {reason}",
    "instances_wanted": "more workers are wanted: {reason}",
    "instances_suffice": "no more workers are wanted: {reason}",
}
"""Of events that are said as they are, by name."""
_AT_MOST_NOW_AND_THEN: Final = frozenset({"worker_throttled", "worker_left_out"})


def describe_plan(plan: Plan) -> str | None:
    """Return what has come of a plan that is done; None: nothing that an operator must know."""
    groups = ["+".join(each.worker_id for each in step.workers) for step in plan.steps if isinstance(step, FormGroup)]
    whole = [each.worker_id for step in plan.steps if isinstance(step, RestoreInstance) for each in step.workers]
    parts = [f"layers are dropped for KV: {', '.join(groups)} serve together"] if groups else []
    parts += [f"layers are back: whole again {'are' if len(whole) > 1 else 'is'} {', '.join(whole)}"] if whole else []
    return "; ".join(parts) or None


@dataclass(frozen=True, slots=True)
class WorkerReturn:
    """A worker that was lost takes requests again."""

    worker_id: str
    away_s: float

    def describe(self, losses: Losses | None) -> str:
        """Return the line, with what became of its answers, if that is known."""
        line = f"{self.worker_id} is ready again after {self.away_s:.1f} s"
        if losses is None:
            return line
        if not losses.num_lost:
            return f"{line}; it had no answer under way"
        went_on = "1 answer" if losses.num_recovered == 1 else f"{losses.num_recovered} answers"
        were = "were" if losses.num_failed > 1 else "was"
        parts = [f"{went_on} went on", f"{losses.num_failed or 'none'} {were} lost"]
        if losses.num_under_way:
            parts.append(f"{losses.num_under_way} still wait{'s' if losses.num_under_way == 1 else ''} for a worker")
        return f"{line}; {', '.join(parts)}"


class ClusterNews:
    """Remembers who is away."""

    def __init__(self) -> None:
        self._missed_s: dict[str, float] = {}
        """Workers that are slow or lost, since when."""
        self._lost: set[str] = set()
        self._said_s: dict[tuple[str, str], float] = {}

    def ended(self, name: str, now_s: float) -> None:
        """The process of a child has ended and is started again; the supervisor says so."""
        self._lose(name, now_s)

    def take(self, event: Event, now_s: float) -> str | WorkerReturn | None:
        """Return what there is to say of an event; None: nothing."""
        name = event.about
        match event.name:
            case "worker_suspect" if name not in self._lost:
                self._missed_s.setdefault(name, now_s)
                return f"{name} is slow: {event.reason}"
            case "worker_dead" | "worker_draining" if name not in self._lost:
                self._lose(name, now_s)
                is_drained = event.name == "worker_draining"
                return f"{name} {'drains' if is_drained else 'is lost'}: {event.reason}"
            case "worker_recovered" | "worker_ready":
                return self._see_again(event, now_s)
            case told if told in _TOLD and not (told in _AT_MOST_NOW_AND_THEN and self._was_said(event, now_s)):
                return _TOLD[told].format(about=name, reason=event.reason)
        return None

    def _lose(self, name: str, now_s: float) -> None:
        self._missed_s.setdefault(name, now_s)
        self._lost.add(name)

    def _see_again(self, event: Event, now_s: float) -> str | WorkerReturn | None:
        since_s = self._missed_s.pop(event.about, None)
        if since_s is None:
            return None
        if event.about in self._lost:
            self._lost.discard(event.about)
            return WorkerReturn(event.about, now_s - since_s)
        return f"{event.about} reports again: {event.reason}"

    def _was_said(self, event: Event, now_s: float) -> bool:
        """Return whether it was said lately; if not, it is now."""
        said_s = self._said_s.get((event.name, event.about), float("-inf"))
        if now_s - said_s < REPEAT_S:
            return True
        self._said_s[event.name, event.about] = now_s
        return False
