"""Has running requests change their worker with their KV: asks who runs where much is in use, and has others fetch one.

    view ─► find_pairs ─► ListRunning to the source ─► choose ─► Fetch to the target, which answers when it is over

Not a plan: nothing is written down. A worker is in one move at a time, and afterwards reports have to show it.
Source: see `policy/load_balance.py`; how requests travel: `shared/messages/fetch.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from services.planner.policy.load_balance import Pair, choose, find_pairs, usage
from services.planner.policy.patience import Backoff, PatienceParams
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Fetch, Fetched, FetchOutcome, FetchReason, ListRunning, RunningList
from shared.messages.report import ClusterView, WorkerReport
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.systems import Migrates
from shared.transport.bus import Bus, BusError
from shared.wire import WireError, decode, encode

_log = get_logger()
LIST_LIMIT_S = 1.0
"""For a worker to say who runs there."""


class Balancer:
    """Moves between pairs of workers, one request of each at a time.

    Args:
        bus: connected.
        subjects: of the cluster.
        migrates: when.
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
        migrates: Migrates,
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
        self._migrates = migrates
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
            view = self._look()
            for pair in () if view is None else find_pairs(view, self._migrates, self._avoided(view)):
                names = {pair.source.worker_id, pair.target.worker_id}
                if not self._busy & names:
                    self._busy |= names
                    self._tasks.start(self._move(pair), name=f"move-{pair.source.worker_id}")
            await asyncio.sleep(self._pause_s)

    async def _move(self, pair: Pair) -> None:
        source, target = pair.source, pair.target
        try:
            part = choose(pair, (await self._running(pair)).requests)
            for request_id, attempt in () if part is None else part.choices:
                outcome = await self._fetch(pair, request_id, attempt)
                if outcome is FetchOutcome.MOVED:
                    await self._announce("request_moved", f"{request_id} goes from {_told(source)} to {_told(target)}")
                self.outcomes[outcome] += 1
                self._note(pair, has_failed=outcome not in {FetchOutcome.MOVED, FetchOutcome.GONE})
                if outcome is not FetchOutcome.MOVED:
                    break  # the others would go without it
            await asyncio.sleep(self._pause_s)
        except (BusError, WireError) as error:
            self._note(pair, has_failed=True)
            _log.warning("not_moved", source=source.worker_id, target=target.worker_id, error=str(error))
        finally:
            self._busy -= {source.worker_id, target.worker_id}

    def _avoided(self, view: ClusterView) -> set[tuple[WorkerId, WorkerId]]:
        """Return the pairs that are left alone for now; those of workers that are gone are forgotten."""
        here, now_s = {status.report.worker_id for status in view.workers}, asyncio.get_running_loop().time()
        self._failures = {pair: each for pair, each in self._failures.items() if here.issuperset(pair)}
        return {pair for pair, each in self._failures.items() if each.left_s(now_s)}

    def _note(self, pair: Pair, *, has_failed: bool) -> None:
        """Remember that nothing could move between two, or that it could."""
        names, now_s = (pair.source.worker_id, pair.target.worker_id), asyncio.get_running_loop().time()
        if has_failed:
            self._failures.setdefault(names, Backoff(self._patience)).failed(now_s)
        else:
            self._failures.pop(names, None)

    async def _fetch(self, pair: Pair, request_id: RequestId, attempt: int) -> FetchOutcome:
        """Have a choice fetched; return what came of it."""
        fetch = Fetch(
            request_id=request_id,
            attempt=attempt,
            source=pair.source.worker_id,
            source_address=pair.source.stage_address,
            reason=FetchReason.BALANCE,
        )
        subject = self._subjects.fetch(pair.target.worker_id)
        return decode(await self._bus.request(subject, encode(fetch), timeout_s=FETCH_LIMIT_S), Fetched).outcome

    async def _running(self, pair: Pair) -> RunningList:
        subject, asked = self._subjects.fetch(pair.source.worker_id), ListRunning(most_blocks=pair.most_blocks)
        return decode(await self._bus.request(subject, encode(asked), timeout_s=LIST_LIMIT_S), RunningList)


def _told(report: WorkerReport) -> str:
    return f"{report.worker_id} ({usage(report):.0%} of its KV memory used or asked for)"
