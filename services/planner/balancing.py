"""Has running requests change their worker with their KV: asks who runs where some should leave, and has others fetch.

    view ─► a rule ─► ListRunning to the source ─► choose ─► Fetch to the target, which answers when it is over

Not a plan: nothing is written down. A worker is in one move at a time, and afterwards reports have to show it.
Rules: `policy/load_balance.py`, `policy/packing/consolidation.py`; how requests travel: `shared/messages/fetch.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from services.planner.policy.moves import MoveRule, Wanted, WantedMove
from services.planner.policy.patience import Backoff, PatienceParams
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Fetch, Fetched, FetchOutcome, ListRunning, RunningList
from shared.messages.report import ClusterView, WorkerReport
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError
from shared.wire import WireError, decode, encode

_log = get_logger()
LIST_LIMIT_S = 1.0
"""For a worker to say who runs there."""


class Balancer:
    """Moves requests between workers, each of which is in one move at a time.

    Args:
        bus: connected.
        subjects: of the cluster.
        rule: says from whom something should leave.
        patience: with pairs between which nothing could move.
        pause_s: after a move, until the workers are looked at again: reports have to show it.
        look: returns the newest view; None: there is none that is young enough.
        tasks: owns the moves.
        announce: tells people the name of what happened, and the reason.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        bus: Bus,
        subjects: Subjects,
        rule: MoveRule,
        patience: PatienceParams,
        *,
        pause_s: float,
        look: Callable[[], ClusterView | None],
        tasks: TaskOwner,
        announce: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self.outcomes: Counter[FetchOutcome] = Counter()
        """Of all moves since the start."""
        self._bus = bus
        self._subjects = subjects
        self._rule = rule
        self._patience = patience
        self._pause_s = pause_s
        self._look = look
        self._tasks = tasks
        self._announce = announce
        self._busy: set[WorkerId] = set()
        self._failures: dict[tuple[WorkerId, WorkerId], Backoff] = {}
        """Of pairs between which nothing could move."""

    async def run(self) -> None:
        """Begin what is worth it, again and again, until cancelled."""
        while True:
            view, now_s = self._look(), asyncio.get_running_loop().time()
            for wanted in () if view is None else self._rule(view, self._avoided(view), now_s):
                names = {report.worker_id for report in (wanted.source, *wanted.targets)}
                if not self._busy & names:
                    self._busy |= names
                    self._tasks.start(self._move(wanted, names), name=f"move-{wanted.source.worker_id}")
            await asyncio.sleep(self._pause_s)

    async def _move(self, wanted: Wanted, names: set[WorkerId]) -> None:
        """Have carried out what is wanted; whoever takes part is in no other move until it is over."""
        source = wanted.source.worker_id
        try:
            moves = wanted.choose((await self._running(wanted)).requests)
            more = {move.target.worker_id for move in moves} - names
            if self._busy & more:
                return
            self._busy |= more
            names |= more
            for move in moves:
                if not await self._carry_out(wanted, move):
                    break
            if moves or wanted.targets:
                await asyncio.sleep(self._pause_s)
        except (BusError, WireError) as error:
            for target in names - {source}:
                self._note(source, target, has_failed=True)
            _log.warning("not_moved", source=source, targets=sorted(names - {source}), error=str(error))
        finally:
            self._busy -= names

    async def _carry_out(self, wanted: Wanted, move: WantedMove) -> bool:
        """Have all choices of a request fetched; return whether all have gone."""
        source, target = wanted.source.worker_id, move.target.worker_id
        for request_id, attempt in move.part.choices:
            outcome = await self._fetch(wanted, move.target, request_id, attempt)
            if outcome is FetchOutcome.MOVED:
                told = f"{request_id} goes from {source} to {target}: {wanted.tell(move)}"
                await self._announce("request_moved", told)
            self.outcomes[outcome] += 1
            self._note(source, target, has_failed=outcome not in {FetchOutcome.MOVED, FetchOutcome.GONE})
            if outcome is not FetchOutcome.MOVED:
                return outcome is FetchOutcome.GONE  # the others would go without it
        return True

    def _avoided(self, view: ClusterView) -> set[tuple[WorkerId, WorkerId]]:
        """Return the pairs that are left alone for now; those of workers that are gone are forgotten."""
        here, now_s = {status.report.worker_id for status in view.workers}, asyncio.get_running_loop().time()
        self._failures = {pair: each for pair, each in self._failures.items() if here.issuperset(pair)}
        return {pair for pair, each in self._failures.items() if each.left_s(now_s)}

    def _note(self, source: WorkerId, target: WorkerId, *, has_failed: bool) -> None:
        """Remember that nothing could move between two, or that it could."""
        now_s = asyncio.get_running_loop().time()
        if has_failed:
            self._failures.setdefault((source, target), Backoff(self._patience)).failed(now_s)
        else:
            self._failures.pop((source, target), None)

    async def _fetch(self, wanted: Wanted, target: WorkerReport, request_id: RequestId, attempt: int) -> FetchOutcome:
        """Have a choice fetched; return what came of it."""
        fetch = Fetch(
            request_id=request_id,
            attempt=attempt,
            source=wanted.source.worker_id,
            source_address=wanted.source.stage_address,
            reason=wanted.reason,
        )
        subject = self._subjects.fetch(target.worker_id)
        return decode(await self._bus.request(subject, encode(fetch), timeout_s=FETCH_LIMIT_S), Fetched).outcome

    async def _running(self, wanted: Wanted) -> RunningList:
        subject, asked = self._subjects.fetch(wanted.source.worker_id), ListRunning(most_blocks=wanted.most_blocks)
        return decode(await self._bus.request(subject, encode(asked), timeout_s=LIST_LIMIT_S), RunningList)
