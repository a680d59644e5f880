"""Whose KV is attended where it lies while it moves, and whose readers wait for it: by price.

    coordinated    a sequence waits for its last block; nobody else is delayed
    live           it waits for its last split, which moves first; then it and all others decode at a slower step, and
                   the links that carry queries and states carry less KV meanwhile

The price is in reader-seconds: how much later, summed over the running sequences, their next tokens come than they
would if all KV were there. Lots share a link block by block, so block i of a lot has come when of each lot that
uses the same link min(i + 1, its blocks) have. With D the time until all KV that is attended elsewhere has come, s the
time of a step, l the messages of a step, and b the time for which remote attention keeps the busiest link busy in it:

    a step takes s + l + b, and the exchange is longer by (s + l + b) / (s + l)
    price = Σ over sequences: wait + max((D - wait) · (l + b) / (s + l + b), l + b)

where a wait, and D, are those of the longer exchange; the second part is of those who go on before D: a step that has
begun with remote attention ends with it. What each sequence asks counts from its wait to its last block,
on average over D.

If none is live, what has not come within a limit is computed again, block after block: whoever needs it waits for that.

Neither mode of one lot can be priced without the others', since they share links and steps. So two choices are
improved, one lot at a time, while the price falls: that all lots are coordinated, and that all are live. The better
one is taken: never dearer than either paper's, and coordinated where it makes no difference.

Source: KunServe v1, section 4.2 (live exchange with remote attention) and v2, section 4.2 (coordinated exchange).
Deviations: the choice between them, which neither has. Assumptions: a link carries one thing at a time, each way or
back; whoever comes new is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.scheduling.view import F64, I32


@dataclass(frozen=True, slots=True)
class LotWork:
    """Blocks that travel together, and what they cost."""

    num_blocks: int
    tails: I32
    """[m] places, ascending, of blocks in the last split of their sequence, if it is not whole."""
    ends: I32
    """[q] places, ascending, of the last block of each running sequence."""
    sends_s: F64
    """[k] By stage: seconds for which a block keeps what goes out of it busy."""
    takes_s: F64
    """[k] Likewise what comes in."""
    asks_s: F64
    """[k] By stage: seconds for which the queries and states of one token, in all layers, keep its link busy."""
    messages_s: float
    """Latency of the messages of a step in which some of it is attended elsewhere."""
    can_be_live: bool = True
    """Its link and the step are known, and its blocks make whole splits."""

    def __post_init__(self) -> None:
        if self.ends.size and not 0 <= int(self.ends[0]) <= int(self.ends[-1]) < self.num_blocks:
            raise ValueError(f"sequences end at {self.ends}, which is not among {self.num_blocks} blocks")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the group is."""

    step_s: float
    """Time of a step in which nothing is attended elsewhere; 0: unknown."""
    limit_s: float = math.inf
    """What has not come by then is computed again, unless something is live."""
    again_s: float = 0.0
    """Per block that is."""


def choose_live(lots: Sequence[LotWork], pace: Pace) -> tuple[bool, ...]:
    """Return for each lot whether its sequences go on while it moves.

    Args:
        lots: all of one exchange.
        pace: of the group; if a step's time is unknown, none is live.
    """
    if pace.step_s <= 0:
        return (False,) * len(lots)
    may = [index for index, lot in enumerate(lots) if lot.can_be_live and _attends(lot).any()]
    priced = Prices(lots, pace)
    found = [_improve([False] * len(lots), may, priced), _improve([i in may for i in range(len(lots))], may, priced)]
    return min(found, key=priced.of)


def _improve(live: Sequence[bool], may: Sequence[int], prices: Prices) -> tuple[bool, ...]:
    """Change one lot's mode after the other, the most useful change first, while that lowers the price."""
    best, best_s = tuple(live), prices.of(live)
    while True:
        others = [(*best[:i], not best[i], *best[i + 1 :]) for i in may]
        found = min(others, key=prices.of, default=best)
        if prices.of(found) >= best_s:
            return best
        best, best_s = found, prices.of(found)


class Prices:
    """What choices of modes cost, in reader-seconds.

    Args:
        lots: of one exchange.
        pace: of the group; a step's time is above 0.
    """

    def __init__(self, lots: Sequence[LotWork], pace: Pace) -> None:
        self._lots = lots
        self._step_s = pace.step_s
        self._attends = [_attends(lot) for lot in lots]
        arrivals = [_arrivals_s(lots, lot) for lot in lots]
        self._last_s = [float(times[-1]) if times.size else 0.0 for times in arrivals]
        self._waits_s = [
            (times[lot.ends], np.array(_live_waits(lot, times))) for lot, times in zip(lots, arrivals, strict=True)
        ]
        """By lot, then by mode: of each sequence, if remote attention took no time."""
        self._cut_s = [times[lot.ends] for lot, times in zip(lots, _cut(lots, arrivals, pace), strict=True)]
        """By lot: of each sequence, if none is live."""
        self._ends_s = [times[_live_places(lot)] for lot, times in zip(lots, arrivals, strict=True)]
        """By lot: when each sequence asks no more, if it is live."""
        self._known: dict[tuple[bool, ...], float] = {}

    def of(self, live: Sequence[bool]) -> float:
        """Return the price of a choice, reader-seconds.

        Args:
            live: by lot.
        """
        key = tuple(live)
        if key not in self._known:
            self._known[key] = self._price(key)
        return self._known[key]

    def _price(self, live: tuple[bool, ...]) -> float:
        if not any(live):
            return float(sum(waits.sum() for waits in self._cut_s))
        waits_s = [self._waits_s[i][is_live] for i, is_live in enumerate(live)]
        last_s = max((self._last_s[i] for i, is_live in enumerate(live) if is_live), default=0.0)
        messages_s, busy_s = 0.0, np.zeros(1)
        if last_s:
            for i in (i for i, is_live in enumerate(live) if is_live):
                asking_s = (self._ends_s[i] - waits_s[i])[self._attends[i]]
                busy_s = busy_s + self._lots[i].asks_s * float(asking_s.sum()) / last_s
                messages_s = max(messages_s, self._lots[i].messages_s)
        link_s = float(busy_s.max(initial=0.0))
        longer = (self._step_s + messages_s + link_s) / (self._step_s + messages_s)
        lag = (messages_s + link_s) / (self._step_s + messages_s + link_s)
        total = 0.0
        for waits in waits_s:
            late = waits * longer
            left = last_s * longer - late
            total += float((late + np.where(left > 0, np.maximum(left * lag, messages_s + link_s), 0.0)).sum())
        return total


def _arrivals_s(lots: Sequence[LotWork], lot: LotWork) -> F64:
    """Return [n]: when each block of a lot has come, seconds, the lots sharing every link block by block."""
    count = np.arange(1, lot.num_blocks + 1)
    arrived: F64 = np.zeros(lot.num_blocks)
    for own, of_all in ((lot.sends_s, [each.sends_s for each in lots]), (lot.takes_s, [each.takes_s for each in lots])):
        for stage in np.flatnonzero(own):
            busy = sum(
                np.minimum(count, other.num_blocks) * costs[stage] for other, costs in zip(lots, of_all, strict=True)
            )
            arrived = np.maximum(arrived, busy)
    return arrived


def _cut(lots: Sequence[LotWork], arrivals_s: Sequence[F64], pace: Pace) -> list[F64]:
    """Return by lot [n]: when each block has come or been computed again, if none is live."""
    come = [int(np.searchsorted(times, pace.limit_s, side="right")) for times in arrivals_s]
    if all(count == lot.num_blocks for count, lot in zip(come, lots, strict=True)):
        return list(arrivals_s)
    cut = []
    for times in arrivals_s:
        places = np.arange(1, len(times) + 1)
        num_before = sum(
            np.maximum(np.minimum(places, lot.num_blocks) - count, 0) for lot, count in zip(lots, come, strict=True)
        )
        cut.append(np.where(times <= pace.limit_s, times, pace.limit_s + num_before * pace.again_s))
    return cut


def _attends(lot: LotWork) -> np.typing.NDArray[np.bool_]:
    """Return [q]: whether a sequence has a whole split among the blocks that are its own."""
    whole = np.ones(lot.num_blocks, dtype=np.int64)
    whole[lot.tails] = 0
    until = np.concatenate([[0], whole.cumsum()[lot.ends]])
    found: np.typing.NDArray[np.bool_] = np.diff(until) > 0
    return found


def _live_waits(lot: LotWork, arrivals_s: F64) -> F64:
    """Return [q]: how long each sequence waits where tails travel first."""
    at = np.searchsorted(lot.tails, lot.ends)
    has_tail = np.isin(lot.ends, lot.tails)
    waits: F64 = np.zeros(len(lot.ends))
    waits[has_tail] = arrivals_s[at[has_tail]]
    return waits


def _live_places(lot: LotWork) -> np.typing.NDArray[np.intp]:
    """Return [q]: at which place the last whole block of each sequence travels where tails travel first."""
    is_tail = np.isin(np.arange(lot.num_blocks), lot.tails)
    before = np.cumsum(~is_tail)[lot.ends]
    found: np.typing.NDArray[np.intp] = np.maximum(len(lot.tails) + before - 1, 0)
    return found
