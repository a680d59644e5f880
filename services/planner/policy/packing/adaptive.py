"""Whether a request moves as KV, over a link, or as tokens, which its target computes again.

Both are used only as far as nobody else notices: a link carries so many tokens of KV in a tick, and a worker computes
so many tokens of prompts beside its decodes (the *boundaries*). What is larger than a boundary takes several ticks.
Dividing all moves of a tick is a packing into two
kinds of bins: the largest first, each as KV if every link on its way has room left, else as tokens if its target has,
else in the next tick. Those whose worker overflows come first and wait for nothing: what they exceed least takes them.

Pure. Source: Mell, section V. The paper has each instance compute the same division; here there is one who decides.
That who overflows does not wait, and what
takes more than a tick, is the project's own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.planner.policy.packing.bins import Name

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
    target: int
    overflows: bool = False
    """Its worker has no room for it any more."""


class TickBudget:
    """What is left of boundaries in this tick, in tokens; what is exceeded is taken from the next ticks."""

    def __init__(self) -> None:
        self._boundaries: dict[Hashable, int] = {}
        self._left: dict[Hashable, int] = {}

    def refill(self, boundaries: Mapping[Hashable, int]) -> None:
        """Begin a tick; who is not named has the boundary that it had."""
        self._boundaries |= boundaries
        self._left = {
            each: boundary + min(self._left.get(each, 0), 0) for each, boundary in self._boundaries.items() if boundary
        }

    def room(self, users: Iterable[Hashable], num_tokens: int) -> int:
        """Return what would be left at the least of all of these; below 0: it does not fit.

        What is larger than a boundary fits if nothing of that has been used.
        """
        return min(
            self._left.get(each, 0) - min(num_tokens, self._boundaries.get(each, 0) or num_tokens) for each in users
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
        room = {kind: users[kind][0].room(users[kind][1], move.num_tokens) for kind in users if kind in kinds}
        kind = next((each for each in room if room[each] >= 0), MoveKind.LATER)
        if kind is MoveKind.LATER and move.overflows:
            kind = max(room, key=lambda each: room[each])
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
