"""Whether a request moves as KV, over a link, or as tokens, which its target computes again.

Both are used only as far as nobody else notices: a link carries so many tokens of KV in a tick, and a worker computes
so many tokens of prompts beside its decodes (the *boundaries*). Dividing all moves of a tick is a packing into two
kinds of bins: the largest first, each as KV if every link on its way has room left, else as tokens if its target has,
else in the next tick. What is larger than both boundaries takes several ticks, as few as can be. Those whose worker
overflows come first, wait for nothing, and go the way that takes fewer ticks.

    moves of a tick ─► divide ─► as KV, as tokens, later        workers' reports ─► MoveBudget ─► divide ─► the same

A planner divides what a rule wants to move, by what reports say of links and of computing (`MoveBudget`).

Pure. Source: Mell, section V. The paper has each instance compute the same division; here there is one who decides.
That who overflows does not wait, and what takes more than a tick, is the project's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.planner.policy.moves import WantedMove, move_rate
from services.planner.policy.packing.bins import Name
from services.planner.policy.packing.consolidation import needed_blocks, num_sequences
from shared.ids import WorkerId
from shared.messages.report import ClusterView, WorkerReport, cost_beside_prompts

NEVER: Final = 1e-9
"""Tokens per tick of what has no boundary."""
TICK_S: Final = 10.0
"""Over which a planner divides. A move or two of a large model's requests take a fifth of it."""

Link = Hashable


class MoveKind(StrEnum):
    """How a request moves."""

    KV = "kv"
    TOKENS = "tokens"
    LATER = "later"


ALL_KINDS = frozenset({MoveKind.KV, MoveKind.TOKENS})


@dataclass(frozen=True, slots=True)
class AskedMove:
    """A request that is to go elsewhere."""

    name: Name
    num_tokens: int
    """Of its KV."""
    links: tuple[Link, ...]
    """On the way to its target."""
    target: Hashable
    overflows: bool = False
    """Its worker has no room for it any more."""


class TickBudget:
    """What is left of boundaries in this tick, in tokens; what is exceeded is taken from the next ticks."""

    def __init__(self) -> None:
        self._boundaries: dict[Hashable, int] = {}
        self._left: dict[Hashable, int] = {}

    def refill(self, boundaries: Mapping[Hashable, int]) -> None:
        """Begin a tick; who is not named is forgotten, but for those of whom next ticks have been taken."""
        owing = {each: boundary for each, boundary in self._boundaries.items() if self._left.get(each, 0) < 0}
        self._boundaries = {**owing, **boundaries}
        self._left = {
            each: boundary + min(self._left.get(each, 0), 0) for each, boundary in self._boundaries.items() if boundary
        }

    def add(self, boundaries: Mapping[Hashable, int]) -> None:
        """Have more of them in the tick that there is."""
        self._boundaries |= boundaries
        self._left |= boundaries

    def ticks(self, users: Iterable[Hashable], num_tokens: int) -> float:
        """Return how many of the next ticks it takes besides, at whoever has least; 0: there is room in this one."""
        lacking = {each: num_tokens - self._left.get(each, 0) for each in users}
        late = {each: lack for each, lack in lacking.items() if lack > 0}
        return max((lack / (self._boundaries.get(each) or NEVER) for each, lack in late.items()), default=0.0)

    def fits(self, users: Iterable[Hashable], num_tokens: int) -> bool:
        """Return whether there is room for a move at all of these.

        What is larger than a boundary fits if nothing of that has been used.
        """
        return all(
            self._left.get(each, 0) >= min(num_tokens, self._boundaries.get(each, 0) or num_tokens) for each in users
        )

    def take(self, users: Iterable[Hashable], num_tokens: int) -> None:
        """Use so much of each."""
        for each in users:
            self._left[each] = self._left.get(each, 0) - num_tokens


def divide(
    moves: Iterable[AskedMove], links: TickBudget, prefills: TickBudget, kinds: frozenset[MoveKind] = ALL_KINDS
) -> dict[Name, MoveKind]:
    """Return how each request moves in this tick, and take that from what is left.

    Args:
        moves: of the tick.
        links: KV that links carry.
        prefills: tokens of prompts that workers compute beside their decodes.
        kinds: that there are.
    """
    chosen: dict[Name, MoveKind] = {}
    for move in sorted(moves, key=lambda each: (not each.overflows, -each.num_tokens)):
        users = {MoveKind.KV: (links, move.links), MoveKind.TOKENS: (prefills, (move.target,))}
        ticks = {kind: users[kind][0].ticks(users[kind][1], move.num_tokens) for kind in users if kind in kinds}
        able = [each for each in ticks if move.overflows or users[each][0].fits(users[each][1], move.num_tokens)]
        kind = min(able, key=lambda each: ticks[each], default=MoveKind.LATER)
        if kind is not MoveKind.LATER:
            users[kind][0].take(users[kind][1], move.num_tokens)
        chosen[move.name] = kind
    return chosen


def link_boundary(bytes_per_s: float, kv_bytes_per_token: int, tick_s: float) -> int:
    """Return the tokens of KV that a link carries in a tick."""
    return int(bytes_per_s * tick_s / kv_bytes_per_token)


def prefill_boundary(step_s: Callable[[int], float], tick_s: float, slowdown: float = 0.05) -> int:
    """Return the tokens of prompts that a worker computes in a tick while its steps take so much longer at most.

    Args:
        step_s: how long a step takes that computes so many besides; more never take less.
        tick_s: the tick.
        slowdown: share of a step.
    """
    limit_s = (1 + slowdown) * step_s(0)
    low, high = 0, 1
    while step_s(high) <= limit_s:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= limit_s else (low, middle)
    return int(low * tick_s / limit_s)


class MoveBudget:
    """What is left for moves in a planner's tick: of workers' links, whichever way, and of their computing.

    Args:
        link_share: of a link's time that moves may have.
        kinds: that there are.
    """

    def __init__(self, link_share: float, kinds: frozenset[MoveKind] = ALL_KINDS) -> None:
        self._link_share = link_share
        self._kinds = kinds
        self._links, self._prefills = TickBudget(), TickBudget()
        self._workers: tuple[WorkerId, ...] = ()
        self._next_s = -math.inf
        self._has_rate = False

    def refill(self, view: ClusterView, now_s: float) -> None:
        """Begin a tick, if the last one is over, or the first rate of a link is known.

        Who has come meanwhile takes part in what is left of it.
        """
        reports = [status.report for status in view.workers]
        rate = self._link_share * move_rate(reports)
        is_due = now_s >= self._next_s or (rate > 0 and not self._has_rate)
        here = {report.worker_id: report for report in reports if is_due or report.worker_id not in self._workers}
        if not here:
            return
        self._has_rate = rate > 0
        links: dict[Hashable, int] = {worker_id: _link_tokens(report, rate) for worker_id, report in here.items()}
        prefills: dict[Hashable, int] = {worker_id: _prefill_tokens(report) for worker_id, report in here.items()}
        if is_due:
            self._next_s = now_s + TICK_S
            self._links.refill(links)
            self._prefills.refill(prefills)
        else:
            self._links.add(links)
            self._prefills.add(prefills)
        self._workers = tuple(report.worker_id for report in reports)

    def spent(self, source: WorkerId) -> set[WorkerId]:
        """Return to whom nothing goes from there in this tick, unless it is urgent."""
        return {
            target
            for target in self._workers
            if not (MoveKind.KV in self._kinds and self._links.fits((source, target), 1))
            and not (MoveKind.TOKENS in self._kinds and self._prefills.fits((target,), 1))
        }

    def divide(self, source: WorkerId, moves: Sequence[WantedMove]) -> Sequence[tuple[WantedMove, MoveKind]]:
        """Return how each goes; see `divide`."""
        asked = [
            AskedMove(
                number,
                needed_blocks(move.part, move.target) * move.target.block_size,
                (source, move.target.worker_id),
                move.target.worker_id,
                move.overflows,
            )
            for number, move in enumerate(moves)
        ]
        kinds = divide(asked, self._links, self._prefills, self._kinds)
        return [(move, kinds[number]) for number, move in enumerate(moves)]


def _link_tokens(report: WorkerReport, bytes_per_s: float) -> int:
    """Return the tokens of KV that moves may bring there or take from there in a tick; all, where no rate is known."""
    num_tokens = report.num_blocks * report.block_size
    if not (bytes_per_s and report.kv_bytes and num_tokens):
        return sys.maxsize
    return link_boundary(bytes_per_s, math.ceil(report.kv_bytes / num_tokens), TICK_S)


def _prefill_tokens(report: WorkerReport) -> int:
    """Return the tokens that a worker computes in a tick beside its decodes; 0 where it does not say what they cost."""
    held = report.num_used_blocks * report.block_size
    decode_s = cost_beside_prompts(report).of(num_sequences(report), held)
    if not (decode_s and report.token_s):
        return 0
    return prefill_boundary(lambda num_tokens: decode_s + num_tokens * report.token_s, TICK_S)
