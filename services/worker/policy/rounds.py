"""Lanes that take turns: who computes what in which lane, and how much of it is due in a turn.

    lane 0   | R0 ........... | .. R0 | R3 .. | R3 ......... |     a round is one microbatch of each lane; each has
    lane 1   | R1 .. | R2 ... | ... R2 ...... | R2 | R4 .... |     the same share of the work, so all lanes end in
             |    round 0     |    round 1    |   round 2    |     the same round

A sequence is in at most one batch in flight, and a lane has one batch in flight: so a sequence keeps to one lane.

Source: KunServe, version 2, section 4.3 and appendix: m microbatches of cost / m each. Deviation: the paper has no
lanes, see `microbatch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from services.worker.policy.view import Limits
from services.worker.policy.work import Work

WINDOW_PER_LANE = 8
"""Prompts per lane that are dealt out together, most work first; raising it evens the lanes and keeps order less."""
DEEP_ROUNDS = 4
"""From more rounds on a queue is deep: what comes or goes changes how long it lasts, not how large its shares are."""
KEPT_RATIO = 0.85
"""Shares of at least this part of a full step are kept then; raising it pays γ less often, and changes shares more."""
_SPARE_TOKENS = 2
"""Of a microbatch, for what the turn before left over because tokens cannot be cut."""
_LEEWAY = 1e-9
"""Relative; keeps rounding from asking for one round more."""


def spread(decode_kv_tokens: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Return the decodes of each lane: as many in each, give or take one, and about as much KV.

    One for each lane at a time, those with the most KV first: the most to the lane that has least of it.
    """
    order = sorted(range(len(decode_kv_tokens)), key=lambda i: (-decode_kv_tokens[i], i))
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    sums = [0] * num_lanes
    for begin in range(0, len(order), num_lanes):
        emptiest = sorted(range(num_lanes), key=lambda lane: (sums[lane], lane))
        for lane, index in zip(emptiest, order[begin : begin + num_lanes], strict=False):
            lanes[lane].append(index)
            sums[lane] += decode_kv_tokens[index]
    return lanes


def deal(work_s: Sequence[float], given_s: Sequence[float]) -> list[int]:
    """Return the lane of each prompt: the one with the least work so far.

    One window of prompts is dealt out after the other, so that order is kept roughly; in a window those with the most
    work come first, so that the lanes end about even. The last window is a full one: it is what evens the ends.

    Args:
        work_s: of each prompt, first come first.
        given_s: what each lane has to do already.
    """
    loads = list(given_s)
    lanes = [0] * len(work_s)
    window = WINDOW_PER_LANE * len(loads)
    for end in range(len(work_s) % window or window, len(work_s) + window, window):
        for index in sorted(range(max(end - window, 0), min(end, len(work_s))), key=lambda i: (-work_s[i], i)):
            lanes[index] = lane = loads.index(min(loads))
            loads[lane] += work_s[index]
    return lanes


class Room(NamedTuple):
    """What fits a microbatch besides its decodes."""

    work_s: float
    """Work that fits whatever it consists of: that of as many tokens as fit, were they all the first of a prompt."""
    num_tokens: int
    num_rows: int

    @classmethod
    def beside(cls, num_decodes: int, limits: Limits, work: Work) -> Room:
        """Return what fits beside so many decodes; at least one token and one row, so that there is progress."""
        tokens = max(limits.max_batch_tokens - num_decodes, 1)
        return cls(tokens * work.beta_s, tokens, max(limits.max_batch_rows - num_decodes, 1))

    def without(self, num_tokens: int) -> Room:
        """Return the room that is left beside a few tokens more, of which at least one is."""
        tokens = max(self.num_tokens - num_tokens, 1)
        return self._replace(work_s=self.work_s * tokens / self.num_tokens, num_tokens=tokens)

    def num_microbatches(self, work_s: float, num_prompts: int) -> int:
        """Return how many microbatches surely hold so much."""
        by_work = ceil(work_s / self.work_s * (1 - _LEEWAY))
        return max(by_work, ceil(num_prompts / self.num_rows), int(num_prompts > 0))


class Rounds:
    """How much work is due in a lane's next microbatch: the same in all lanes, give or take a token, to the end."""

    def __init__(self, num_lanes: int) -> None:
        self._left = [0] * num_lanes
        self._share_s = 0.0
        self._due_s = [0.0] * num_lanes
        """Work that each lane would have left now if tokens could be cut."""

    @property
    def num_lanes(self) -> int:
        """Lanes that take turns."""
        return len(self._left)

    def begin(self, work_s: Sequence[float], num_prompts: Sequence[int], room: Room) -> None:
        """Begin anew, with as few rounds as the fullest lane needs; in a deep queue with the shares of the last time.

        Neighbours have to be equal across a new beginning too, and while a queue builds up there is one in every turn.

        Args:
            work_s: of each lane.
            num_prompts: of each lane.
            room: of a microbatch.
        """
        spare, most_s = room.without(_SPARE_TOKENS), max(work_s)
        rounds = max(spare.num_microbatches(*lane) for lane in zip(work_s, num_prompts, strict=True))
        if rounds > DEEP_ROUNDS and KEPT_RATIO * spare.work_s <= self._share_s <= spare.work_s:
            rounds = max(rounds, ceil(most_s / self._share_s * (1 - _LEEWAY)))
        else:
            self._share_s = most_s / max(rounds, 1)
        self._left = [rounds] * self.num_lanes
        self._due_s = list(work_s)

    def share_s(self, lane: int, work_s: Sequence[float], num_prompts: Sequence[int], room: Room) -> float:
        """Return the work of the next microbatch of a lane, given what the lanes have left; 0 if there is none."""
        if num_prompts[lane] and not self._left[lane]:  # the limits of a step cut in
            self.begin(work_s, num_prompts, room)
        self._left[lane] = max(self._left[lane] - 1, 0)
        over_s = max(work_s[lane] - self._due_s[lane], 0.0)  # what the turn before left over: mostly part of a token
        share_s = self._share_s + over_s if self._left[lane] else work_s[lane]
        self._due_s[lane] = work_s[lane] - share_s
        return share_s * (1 + _LEEWAY)
