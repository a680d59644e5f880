"""Has running requests change their worker with their KV: asks who runs where some should leave, and has others fetch.

    view ─► a rule ─► ListRunning to the source ─► choose ─► Fetch to the target, which answers when it is over

Not a plan: nothing is written down. A worker is in one move at a time, and afterwards reports have to show it; but one
that takes gives what is urgent. A request travels as KV as long as links have time left for moves, else as tokens,
which its target computes again, if that has; what is not urgent waits otherwise. Who is to be emptied is closing
meanwhile (`Close`); if that takes a request that found no room elsewhere, it keeps what has not left.
Rules: `policy/load_balance.py`, and `consolidation.py` and `by_class.py` in `policy/packing`; how requests travel:
`shared/messages/fetch.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.planner.policy.moves import MoveRule, Wanted, WantedMove
from services.planner.policy.packing.adaptive import MoveBudget, MoveKind
from services.planner.policy.packing.by_class import ByClass
from services.planner.policy.patience import Backoff, PatienceParams
from shared.ids import WorkerId
from shared.messages.fetch import FETCH_LIMIT_S, Close, Closed, Fetch, Fetched, FetchOutcome, ListRunning, RunningList
from shared.messages.plan import FILLING_KEY, Filling
from shared.messages.report import ClusterView
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.subjects import Subjects
from shared.transport.bus import Bus, BusError, KeyValue
from shared.wire import WireError, decode, encode, encode_json

_log = get_logger()
LIST_LIMIT_S = 1.0
"""For a worker to say who runs there, or to close."""
FILLING_S = 0.1
"""Between two looks at who is filled next."""
CLOSE_S = FETCH_LIMIT_S + 2 * LIST_LIMIT_S
"""For which a worker is closing if it is not said again: until the next request has left, or could not."""


@dataclass(frozen=True, slots=True)
class BalancerParams:
    """How much is moved."""

    pause_s: float
    """After a move, until the workers are looked at again: reports have to show it."""
    link_share: float
    """Of the time of a worker's link that moves may have, but for urgent ones."""
    kinds: frozenset[MoveKind]
    """How requests may travel."""
    patience: PatienceParams
    """With pairs between which nothing could move."""


class Balancer:
    """Moves requests between workers, each of which gives in one move at a time, and takes in one.

    Args:
        bus: connected.
        subjects: of the cluster.
        rule: says from whom something should leave.
        params: how much is moved.
        look: returns the newest view; None: there is none that is young enough.
        tasks: owns the moves.
        announce: tells people the name of what happened, and the reason.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        bus: Bus,
        subjects: Subjects,
        rule: MoveRule,
        params: BalancerParams,
        *,
        look: Callable[[], ClusterView | None],
        tasks: TaskOwner,
        announce: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self.outcomes: Counter[FetchOutcome] = Counter()
        """Of all moves since the start."""
        self._bus = bus
        self._subjects = subjects
        self._rule = rule
        self._params = params
        self._look = look
        self._tasks = tasks
        self._announce = announce
        self._giving: set[WorkerId] = set()
        self._taking: set[WorkerId] = set()
        self._budget = MoveBudget(params.link_share, params.kinds)
        self._failures: dict[tuple[WorkerId, WorkerId], Backoff] = {}
        """Of pairs between which nothing could move."""

    async def run(self) -> None:
        """Begin what is worth it, again and again, until cancelled."""
        while True:
            view, now_s = self._look(), asyncio.get_running_loop().time()
            if view is not None:
                self._budget.refill(view, now_s)
            for wanted in () if view is None else self._rule(view, self._avoided(view), now_s):
                source, targets = wanted.source.worker_id, {report.worker_id for report in wanted.targets}
                can_give = source not in (self._giving if wanted.is_urgent else self._busy)
                if can_give and not self._busy & targets:
                    self._giving.add(source)
                    self._taking |= targets
                    self._tasks.start(self._move(wanted, targets), name=f"move-{source}")
            await asyncio.sleep(self._params.pause_s)

    @property
    def _busy(self) -> set[WorkerId]:
        """Who is in a move."""
        return self._giving | self._taking

    async def _move(self, wanted: Wanted, targets: set[WorkerId]) -> None:
        """Have carried out what is wanted; whoever takes part is in no other move until it is over, see the module."""
        source = wanted.source.worker_id
        try:
            running = (await self._running(wanted)).requests
            spent = set() if wanted.is_urgent else self._budget.spent(source)
            chosen = wanted.choose(running, (self._busy - targets) | spent)
            divided = self._budget.divide(source, chosen)
            moves = [(move, kind) for move, kind in divided if kind is not MoveKind.LATER]
            targets |= {move.target.worker_id for move, _ in moves}
            self._taking |= targets
            await self._carry_out_all(wanted, moves)
            if moves or wanted.targets:
                await asyncio.sleep(self._params.pause_s)
        except (BusError, WireError) as error:
            for target in targets:
                self._note(source, target, has_failed=True)
            _log.warning("not_moved", source=source, targets=sorted(targets), error=str(error))
        finally:
            self._giving.discard(source)
            self._taking -= targets

    async def _carry_out_all(self, wanted: Wanted, moves: Sequence[tuple[WantedMove, MoveKind]]) -> None:
        """Have requests fetched one after the other, until one cannot go, or their worker is not to be emptied now."""
        named, is_closing = wanted.open_worker, False
        for number, (move, kind) in enumerate(moves):
            if named is not None:
                close = Close(begins=not number, for_s=CLOSE_S, open_worker=named, why=wanted.tell(move))
                is_closing = await self._close(wanted, close)
                if not is_closing:
                    break
                if close.begins:
                    await self._announce("worker_closing", f"{close.why}; it takes no new requests")
            if not await self._carry_out(wanted, move, kind):
                break
        if is_closing and named is not None:
            await self._close(wanted, Close(for_s=0.0, open_worker=named))

    async def _close(self, wanted: Wanted, close: Close) -> bool:
        """Have the source refuse new requests, or take them again; return whether it refuses them now."""
        subject = self._subjects.fetch(wanted.source.worker_id)
        return decode(await self._bus.request(subject, encode(close), timeout_s=LIST_LIMIT_S), Closed).is_closing

    async def _carry_out(self, wanted: Wanted, move: WantedMove, kind: MoveKind) -> bool:
        """Have all choices of a request fetched; return whether all have gone."""
        source, target = wanted.source.worker_id, move.target.worker_id
        how = " as tokens" if kind is MoveKind.TOKENS else ""
        for request_id, attempt in move.part.choices:
            fetch = Fetch(
                request_id=request_id,
                attempt=attempt,
                source=source,
                source_address=wanted.source.stage_address,
                reason=wanted.reason,
                as_tokens=kind is MoveKind.TOKENS,
            )
            outcome = await self._fetch(target, fetch)
            if outcome is FetchOutcome.MOVED:
                told = f"{request_id} goes from {source} to {target}{how}: {wanted.tell(move)}"
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
            self._failures.setdefault((source, target), Backoff(self._params.patience)).failed(now_s)
        else:
            self._failures.pop((source, target), None)

    async def _fetch(self, target: WorkerId, fetch: Fetch) -> FetchOutcome:
        """Have a choice fetched; return what came of it."""
        subject = self._subjects.fetch(target)
        return decode(await self._bus.request(subject, encode(fetch), timeout_s=FETCH_LIMIT_S), Fetched).outcome

    async def _running(self, wanted: Wanted) -> RunningList:
        subject = self._subjects.fetch(wanted.source.worker_id)
        asked = ListRunning(most_blocks=wanted.most_blocks, limit=wanted.most_requests)
        return decode(await self._bus.request(subject, encode(asked), timeout_s=LIST_LIMIT_S), RunningList)


async def tell_filling(plans: KeyValue, rule: ByClass, can_tell: Callable[[], bool]) -> None:
    """Write who is filled next by requests of each size into the plan bucket whenever that changes, until cancelled."""
    told: Filling | None = None
    while can_tell():
        filling = rule.filling
        if filling != told:
            try:
                await plans.put(FILLING_KEY, encode_json(filling))
                told = filling
            except BusError as error:
                _log.warning("filling_not_told", error=str(error))
        await asyncio.sleep(FILLING_S)
