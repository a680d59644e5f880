"""How much of the line of prompts is due in the next microbatch, so that neighbours cost the same.

    line     R0 ......................... R1 ..... R2 .......... R3 ...     all prompts, first come first
    shares   |          |          |          |          |          |       the same work in each microbatch

Few microbatches pay γ seldom, many small ones leave the stages less to wait for. A long line is cut into steps that are
all but full. A short one into `STEPS_PER_LANE` per lane, so that there is something to compute beside the decodes until
more comes; without decodes into one per lane, so that all stages have part in it. While nothing comes or goes, the line
is cut as it was begun; when something does, into pieces as large as the last one if those are about right, or nearly.

Source: KunServe, version 2, section 4.3, figures 10 and 11, and appendix: m microbatches of cost / m each. Deviations:

- Equation (3) sums γ over the chunks, though the text says that a batch amortises it; here it counts once.
- The paper has no term for decodes; here each adds its token and the reading of its KV. They are spread evenly, so what
  is cut is the prompts' work alone.
- The paper halves until a microbatch would fall under MIN tokens. Tokens and cost are not proportional, so this ends at
  different depths in different places, and neighbours differ twofold. Here m is chosen first, and each gets the m-th
  part; for m = 2, 4, 8 these are the halves. And m is not ⌈tokens / MIN⌉: in a long line it is as small as the limits
  of a step allow, since more would only pay γ more often.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from services.worker.scheduling.view import Limits
from shared.cost import CostModel

STEPS_PER_LANE = 3
"""Of a line that is short; raising it makes neighbours more equal, and prompts wait for more steps."""
MIN_TOKENS = 64
"""Of a microbatch that is cut smaller than a step allows; below that γ is most of it."""
MIN_TOKENS_ALONE = 256
"""The same if nobody decodes beside it: then nothing shares γ."""
SHARE_LEEWAY = 1.5
"""Pieces of the last size are kept while they are within this factor of what would be chosen now; beyond, they come
nearer by this factor a step."""
FULL_RATIO = 0.85
"""And in a long line while they are at least this part of a full step."""
_CHANGE_RATIO = 0.1
"""What comes or goes is noticed from this part of a share on."""
_SPARE_TOKENS = 2
"""Of a microbatch, for what the ones before left over because tokens cannot be cut."""
_LEEWAY = 1e-9
"""Relative; keeps rounding from asking for one microbatch more."""


class Room(NamedTuple):
    """What fits a microbatch besides its decodes."""

    work_s: float
    """Work that fits whatever it consists of: that of as many tokens as fit, were they all the first of a prompt."""
    num_tokens: int
    num_rows: int

    @classmethod
    def beside(cls, num_decodes: int, limits: Limits, cost: CostModel) -> Room:
        """Return what fits beside so many decodes; at least one token and one row, so that there is progress."""
        tokens = max(limits.max_batch_tokens - num_decodes, 1)
        return cls(tokens * cost.token_s, tokens, max(limits.max_batch_rows - num_decodes, 1))

    def without(self, num_tokens: int) -> Room:
        """Return the room that is left beside a few tokens more, of which at least one is."""
        tokens = max(self.num_tokens - num_tokens, 1)
        return self._replace(work_s=self.work_s * tokens / self.num_tokens, num_tokens=tokens)


class Line(NamedTuple):
    """What is left of all prompts that can be computed: they were begun, or wait and fit the memory."""

    work_s: float
    num_tokens: int
    num_prompts: int


class Shares:
    """From call to call, the size of the pieces and how many are left."""

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._num_left = 0
        self._due_s = 0.0
        """Work that the line has left if nothing has come or gone."""
        self._share_s = 0.0
        """Of a microbatch; 0 if there was none before this line."""

    def next_s(self, line: Line, room: Room, *, is_alone: bool) -> float:
        """Return the work of the next microbatch, and count it as taken; limits of the step may cut it a little.

        Args:
            line: as it is now.
            room: of a microbatch.
            is_alone: nobody decodes.
        """
        if not line.num_prompts:
            self._num_left, self._share_s = 0, 0.0
            return 0.0
        over_s = line.work_s - self._due_s  # what the piece before left over: mostly part of a token
        if (
            not self._num_left
            or abs(over_s) > _CHANGE_RATIO * self._share_s
            or self._share_s > room.work_s  # there are more decodes than before
        ):
            self._num_left = self._choose(line, room.without(_SPARE_TOKENS), is_alone=is_alone)
            self._share_s, self._due_s = line.work_s / self._num_left, line.work_s
        self._num_left -= 1
        self._due_s = self._due_s - self._share_s if self._num_left else 0.0
        return (line.work_s - self._due_s) * (1 + _LEEWAY)

    def _choose(self, line: Line, room: Room, *, is_alone: bool) -> int:
        """Return how many microbatches the line is cut into."""
        least = self._least(line, room)
        if least >= self.num_lanes * STEPS_PER_LANE:
            number, most = least, least / FULL_RATIO
        else:
            per_lane, tokens = (1, MIN_TOKENS_ALONE) if is_alone else (STEPS_PER_LANE, MIN_TOKENS)
            number = max(min(self.num_lanes * per_lane, line.num_tokens // tokens), least)
            most = number * SHARE_LEEWAY
        if not self._share_s:
            return number
        kept = max(round(line.work_s / self._share_s), least)
        if kept > most:
            return max(number, int(kept / SHARE_LEEWAY))
        if kept < number / SHARE_LEEWAY:
            return min(number, int(kept * SHARE_LEEWAY))
        return kept

    def _least(self, line: Line, room: Room) -> int:
        """Return how many microbatches surely hold the line."""
        by_work = ceil(line.work_s / room.work_s * (1 - _LEEWAY))
        return max(by_work, ceil(line.num_prompts / room.num_rows), 1)
