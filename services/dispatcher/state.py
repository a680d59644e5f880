"""What the dispatcher knows of the cluster: the monitor's last view, and its own submissions since.

One writer: the service. Everyone else reads snapshots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf

from services.dispatcher.policy.loads import Counted, PlacementChange, load_since, reported_loads
from services.dispatcher.policy.placement import Placed, PlacementLoad
from services.dispatcher.policy.prefixes import HeldPrefixes
from shared.api_keys import Tier
from shared.ids import WorkerId
from shared.messages.plan import Filling
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerStatus

_MAX_RECENT = 4096
UNNAMED_LIMIT_S = 10.0
"""A worker that views have stopped naming, though none has shown its end, still counts for so long after its last
report: several times what a monitor that has just started needs to hear everybody."""
_RUNS_NOTHING = (WorkerPhase.LOADING, WorkerPhase.STOPPED)
"""What was placed on a worker that loads was placed on the process before this one."""


@dataclass(slots=True)
class _Known:
    """One worker, between two views."""

    status: WorkerStatus
    reported_s: float
    """When its report was made, on this process's clock."""
    loads: tuple[PlacementLoad, PlacementLoad]
    """By its last report alone, as real-time work sees it, and best effort."""
    is_ready: bool = False
    """It takes requests, now or once a plan holds its steps up no more."""
    num_steps: int = -1
    stepped_s: float = 0.0
    """When its step counter last moved."""
    open_worker: WorkerId | None = None
    """That this one has named when it refused a request because it was closing."""
    recent: deque[PlacementChange] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))
    """Since the report, in order."""

    @property
    def process(self) -> tuple[str, int, int]:
        """Which process made the last report."""
        report = self.status.report
        return report.host, report.pid, report.incarnation

    def load_now(self, *, is_flex: bool) -> PlacementLoad:
        """Return its load now, as real-time work sees it, or best effort."""
        if not self.recent and not is_flex:
            return self.loads[False]
        return load_since(self.status.report, self.loads, self.recent, self.reported_s, is_flex=is_flex)


class ClusterState:
    """The cluster as of the last view.

    Args:
        model: only workers that serve this model count.
        step_limit_s: see `DispatcherSettings.step_limit_s`.
        own_id: of this dispatcher. Of workers that are alike each dispatcher begins with another one; "": in order.
        asks_prefixes: whether placement asks who holds which.
    """

    def __init__(
        self,
        model: str,
        step_limit_s: float,
        own_id: str = "",
        *,
        asks_prefixes: bool = False,
    ) -> None:
        self.model = model
        self.view: ClusterView | None = None
        self.viewed_s = 0.0
        """When the view arrived."""
        self.restarted: list[WorkerId] = []
        """Workers that are another process than in the view before, sorted: what the old one ran may be lost."""
        self.num_restarts: Counter[WorkerId] = Counter()
        """How often a worker was another process than in the view before, which had not stopped in order."""
        self.draining: list[WorkerId] = []
        """Workers that are about to stop, sorted: what runs there should go on elsewhere."""
        self.silent: set[WorkerId] = set()
        """Of the lost workers, those that the monitor merely cannot hear."""
        self.prefixes = HeldPrefixes()
        """What workers hold; nothing if nobody asks."""
        self._asks_prefixes = asks_prefixes
        self._step_limit_s = step_limit_s
        self._own_id = own_id
        self._next_for: dict[WorkerId, tuple[tuple[int, float], ...]] = {}
        """See `PlacementLoad`."""
        self._workers: dict[WorkerId, _Known] = {}
        """Sorted."""
        self._turns: dict[WorkerId, bytes] = {}
        self._in_turn: list[_Known] = []
        """The same in an order of this dispatcher's own."""
        self._loads: dict[bool, Sequence[PlacementLoad]] = {}
        """What `loads` returned last for real-time work and best effort, unless something has changed since."""

    def apply(self, view: ClusterView, now_s: float) -> list[WorkerId]:
        """Take a new view and return the workers whose requests are lost, sorted: dead, stopped, started anew, stuck.

        A worker that is merely missing from the view is not lost: a monitor that has just started knows nobody. It
        counts as it was last seen, for `UNNAMED_LIMIT_S`.
        """
        self.view, self.viewed_s = view, now_s
        self._loads.clear()
        self.restarted = []
        known: dict[WorkerId, _Known] = {}
        for status in view.workers:
            report = status.report
            if report.model and report.model != self.model:
                continue
            worker = self._workers.get(report.worker_id) or _Known(status, now_s, reported_loads(status, ready=False))
            if worker.process != (report.host, report.pid, report.incarnation):
                self.prefixes.forget(report.worker_id)
                self.restarted.append(report.worker_id)
                self.num_restarts[report.worker_id] += worker.status.report.phase is not WorkerPhase.STOPPED
            if self._asks_prefixes:
                sketch = None if status.liveness is Liveness.DEAD else report.prefixes
                self.prefixes.take(report.worker_id, sketch, report.block_size, now_s)
            worker.status, worker.reported_s = status, now_s - status.age_s
            while worker.recent and worker.recent[0].at_s < worker.reported_s:
                worker.recent.popleft()
            if report.num_steps != worker.num_steps or not report.num_runnable:
                worker.num_steps, worker.stepped_s = report.num_steps, now_s
            known[report.worker_id] = worker
        named = {status.report.worker_id for status in view.workers}
        known |= {
            worker_id: worker
            for worker_id, worker in self._workers.items()
            if worker_id not in named and not self._is_lost(worker) and now_s - worker.reported_s < UNNAMED_LIMIT_S
        }
        for worker_id in self._workers.keys() - known.keys():
            self.prefixes.forget(worker_id)
        if known.keys() != self._workers.keys():
            self._turns = {worker_id: _turn(self._own_id, worker_id) for worker_id in known}
        self._workers = dict(sorted(known.items()))
        self._in_turn = sorted(self._workers.values(), key=lambda worker: self._turns[worker.status.report.worker_id])
        self.restarted.sort()
        return self._judge()

    def _judge(self) -> list[WorkerId]:
        """Say of each worker, in one pass over what may be thousands, what it takes and whether it is lost; sorted."""
        self.draining, self.silent = [], set()
        lost: list[WorkerId] = []
        for worker_id, worker in self._workers.items():
            status, has_ended = worker.status, self._has_ended(worker)
            phase, is_lost = status.report.phase, has_ended or status.liveness is Liveness.DEAD
            worker.is_ready = phase is WorkerPhase.READY and not status.report.stage and not is_lost
            next_for = self._next_for.get(worker_id, ())
            worker.loads = reported_loads(status, ready=worker.is_ready and not status.report.held, next_for=next_for)
            if phase is WorkerPhase.DRAINING:
                self.draining.append(worker_id)
            if not has_ended:
                self.silent.add(worker_id)
            if is_lost:
                lost.append(worker_id)
        return lost

    def _has_ended(self, worker: _Known) -> bool:
        """Return whether the worker itself says that it runs nothing, or shows it by standing still."""
        if worker.status.report.phase in _RUNS_NOTHING:
            return True
        return self.viewed_s - worker.stepped_s > self._step_limit_s  # without views nobody is judged

    def _is_lost(self, worker: _Known) -> bool:
        return worker.status.liveness is Liveness.DEAD or self._has_ended(worker)

    def submitted(
        self, placed: Placed, num_prompt: int, num_output: int, now_s: float, tier: Tier = Tier.DEFAULT
    ) -> Counted:
        """Count a request that is sent to the worker, with the tokens that it has; the next report contains it.

        Args:
            placed: where it goes.
            num_prompt: see `Counted`; so the others.
            num_output: likewise.
            now_s: the event loop's clock.
            tier: of the request.
        """
        num_tokens, is_flex = num_prompt + num_output, tier.is_best_effort
        num_cached = min(placed.num_cached, num_tokens)
        self._note(placed.worker_id, PlacementChange(now_s, 1, num_tokens, 1, is_flex=is_flex, num_cached=num_cached))
        return Counted(placed.worker_id, now_s, num_prompt, num_output, tier.is_best_effort)

    def began(self, worker_id: WorkerId, now_s: float, tier: Tier = Tier.DEFAULT) -> None:
        """Count a request that waits at the worker no more: it has begun there, or is about to leave."""
        self._note(worker_id, PlacementChange(now_s, 0, 0, -1, is_flex=tier.is_best_effort))

    def ended(self, counted: Counted, num_output: int, now_s: float) -> None:
        """Count a request that has left its worker with so many tokens of output."""
        num_tokens, num_grown = counted.num_prompt + counted.num_output, num_output - counted.num_output
        change = PlacementChange(now_s, -1, -num_tokens, 0, num_grown, counted.at_s, counted.is_flex)
        self._note(counted.worker_id, change)

    def note_closing(self, worker_id: WorkerId, open_worker: WorkerId | None) -> None:
        """A worker has refused a request because it is closing, and names another; the next view knows better."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.open_worker, (real_time, every) = open_worker, worker.loads
            worker.loads = replace(real_time, is_closing=True), replace(every, is_closing=True)
            self._loads.clear()

    def note_room(self, worker_id: WorkerId, num_free_blocks: int) -> None:
        """A worker has refused a request for want of memory, and says what is free; the next view knows better."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        real_time, every = worker.loads
        asked = real_time.num_blocks - num_free_blocks
        num_more = max(asked - worker.load_now(is_flex=False).num_demanded_blocks, 0)
        worker.loads = (
            replace(real_time, num_demanded_blocks=real_time.num_demanded_blocks + num_more),
            replace(every, num_demanded_blocks=every.num_demanded_blocks + num_more),
        )
        self._loads.clear()

    def note_filling(self, filling: Filling) -> None:
        """Who is filled next has changed."""
        ends = [each.min_tokens for each in filling.by_size[1:]]
        self._next_for = {}
        for each, above in zip(filling.by_size, [*ends, inf], strict=False):
            self._next_for[each.worker_id] = (*self._next_for.get(each.worker_id, ()), (each.min_tokens, above))
        for worker_id, worker in self._workers.items():
            next_for = self._next_for.get(worker_id, ())
            real_time, every = worker.loads
            worker.loads = replace(real_time, next_for=next_for), replace(every, next_for=next_for)
        self._loads.clear()

    def is_closing(self, worker_id: WorkerId) -> bool:
        """Return whether a worker takes a request only if nobody else has room."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.loads[False].is_closing

    def open_instead_of(self, worker_id: WorkerId) -> WorkerId | None:
        """Return the worker that a closing one has named, if that takes requests as far as is known here."""
        worker = self._workers.get(worker_id)
        named = None if worker is None else self._workers.get(worker.open_worker or worker_id)
        if named is None or not named.loads[False].ready or named.loads[False].is_closing:
            return None
        return named.status.report.worker_id

    def _note(self, worker_id: WorkerId, change: PlacementChange) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.recent.append(change)
            self._loads.clear()

    def loads(self, tier: Tier = Tier.DEFAULT) -> Sequence[PlacementLoad]:
        """Return the workers as the placement of a request of this tier sees them."""
        is_flex = tier.is_best_effort
        if is_flex not in self._loads:
            self._loads[is_flex] = [worker.load_now(is_flex=is_flex) for worker in self._in_turn]
        return self._loads[is_flex]

    def address_for(self, target: WorkerId, source: WorkerId) -> str | None:
        """Return where a worker finds the KV of what another one runs; None: it cannot go on with that."""
        known = [self._workers.get(worker_id) for worker_id in (target, source)]
        reports = [worker.status.report for worker in known if worker is not None]
        if len(reports) < len(known) or any(each.num_stages > 1 or not each.model_digest for each in reports):
            return None
        is_alike = reports[0].model_digest == reports[1].model_digest
        return (reports[1].stage_address or None) if is_alike else None

    @property
    def num_ready(self) -> int:
        """Return how many workers take requests, now or once a plan holds their steps up no more."""
        return sum(worker.is_ready for worker in self._workers.values())

    @property
    def num_loading(self) -> int:
        """Return how many workers are still loading the model."""
        return sum(
            worker.status.report.phase is WorkerPhase.LOADING and worker.status.liveness is not Liveness.DEAD
            for worker in self._workers.values()
        )

    @property
    def statuses(self) -> Sequence[WorkerStatus]:
        """The workers of this model in the last view, sorted by id."""
        return [worker.status for worker in self._workers.values()]

    def max_request_tokens(self, default: int) -> int:
        """Return how many tokens of prompt and output every ready worker takes; the default while none is ready.

        A member of a group, which takes nothing now, counts with its context: answers may go on there afterwards.
        """
        ready = [
            worker.status.report.max_model_len if worker.status.report.stage else worker.loads[False].max_request_tokens
            for worker in self._workers.values()
            if worker.status.report.phase is WorkerPhase.READY
        ]
        return min([limit for limit in ready if limit], default=default)


def _turn(own_id: str, worker_id: WorkerId) -> bytes:
    """Return a number by which workers come in another order for every dispatcher."""
    return blake2b(f"{own_id}/{worker_id}".encode(), digest_size=8).digest() if own_id else b""
