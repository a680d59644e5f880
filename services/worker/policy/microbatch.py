"""Microbatches of equal cost, formed ahead from everything that is queued: a pipeline idles where neighbours differ.

    lane 0   | R0 ........... | .. R0 | R3 .. | R3 ......... |     each lane is cut into pieces of equal cost, not of
    lane 1   | R1 .. | R2 ... | ... R2 ...... | R2 | R4 .... |     equal length: a later chunk attends to more tokens
             |    round 0     |    round 1    |   round 2    |     pipeline: lane 0, lane 1, lane 0, lane 1, ...

A chunk of c tokens behind a prefix of p costs α·(p·c + (c² + c)/2) + β·c: its `Work`. A microbatch costs the work of
its chunks, what its decodes cost, and γ: together `CostModel.step_s`, where α = a, β = b1 and γ = g1 beyond some
hundred tokens. Cutting a prompt neither adds to its work nor saves any, so queues have a work too.

A sequence is in at most one batch in flight. So each prompt is given to one lane (a lane has one batch in flight), and
all lanes cut their prompts, first come first, into pieces of the same work.

Source: KunServe, version 2, section 4.3, figures 10 and 11, and appendix. Deviations:

- Equation (3) sums γ over the chunks, though the text says that a batch amortises it; here it counts once.
- The paper has no term for decodes; here each adds its token and the reading of its KV. They are spread evenly, so what
  is cut is the prompts' work alone.
- The paper cuts one line of all prompts, and neighbours may hold chunks of the same one. That needs a sequence to be in
  two batches in flight. Lanes do not, and are as even as whole prompts can be dealt out.
- The paper halves until a microbatch would fall under MIN tokens (`formations.py`). Tokens and cost are not
  proportional, so this ends at different depths in different places, and neighbours differ twofold. Here the number m
  of microbatches is chosen first and each gets the m-th part, the cost_upper = cost / m of the appendix; for m = 2, 4,
  8 these are the halves. And m is not ⌈tokens / MIN⌉ but as small as the limits of a step allow: more would only pay γ
  more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple

from services.worker.policy.view import Limits
from shared.cost import CostModel, KunServeCost, prefill_pairs

WINDOW_PER_LANE = 8
"""Prompts per lane that are dealt out together, most work first; raising it evens the lanes and keeps order less."""
_SPARE_TOKENS = 2
"""Of a microbatch, for what the turn before left over because tokens cannot be cut."""
_LEEWAY = 1e-9
"""Relative; keeps rounding from asking for one round more."""


class Waiting(NamedTuple):
    """A prompt of which some tokens are to be computed."""

    prefix: int
    """Tokens computed already, or cached; at least 0."""
    num_tokens: int
    """Tokens to compute; at least 1."""


class Chunk(NamedTuple):
    """A piece of a prompt."""

    index: int
    """Of the prompt in the queue."""
    prefix: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch; without chunks and decodes it is a turn in which its lane has nothing to do."""

    chunks: tuple[Chunk, ...]
    decodes: tuple[int, ...]
    """Indices of decodes, one token each."""
    cost_s: float
    """0 if it is empty."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class Work:
    """What prefill adds to the cost of a step, by tokens and by query-key pairs; all in seconds."""

    beta_s: float
    """Per token, above 0."""
    alpha_s: float
    """Per pair of a token and one at or before it, at least 0."""

    def __post_init__(self) -> None:
        if not (self.beta_s > 0 and self.alpha_s >= 0):
            raise ValueError(f"{self.beta_s} s per token and {self.alpha_s} s per pair: there is nothing to balance by")

    @classmethod
    def of(cls, cost: CostModel, num_tokens: int) -> Work:
        """Return what prefill adds to steps of about this many tokens."""
        first = cost.g0_s + cost.b0_s * num_tokens >= cost.g1_s + cost.b1_s * num_tokens
        return cls(cost.b0_s if first else cost.b1_s, cost.a_s)

    def chunk_s(self, prefix: int, num_tokens: int) -> float:
        """Return the work of a chunk."""
        return self.alpha_s * prefill_pairs(prefix, num_tokens) + self.beta_s * num_tokens

    def largest(self, prefix: int, limit_s: float) -> int:
        """Return the most tokens whose work is at most `limit_s`: α/2·c² + (β + α·(p + 1/2))·c ≤ limit."""
        if limit_s <= 0:
            return 0
        slope = self.beta_s + self.alpha_s * (prefix + 0.5)
        chunk = int(2 * limit_s / (slope + sqrt(slope * slope + 2 * self.alpha_s * limit_s)))
        if self.chunk_s(prefix, chunk + 1) <= limit_s:
            return chunk + 1
        return chunk - 1 if self.chunk_s(prefix, chunk) > limit_s else chunk


def kunserve_form(kunserve: KunServeCost, d_s: float) -> CostModel:
    """Return the paper's own α, β, γ as a cost model; decodes cost `d_s` per token of their KV."""
    return CostModel(g0_s=kunserve.gamma_s, b0_s=kunserve.beta_s, g1_s=0, b1_s=0, d_s=d_s, a_s=kunserve.alpha_s)


def microbatch_s(cost: CostModel, chunks: Sequence[Chunk], decode_kv_tokens: Sequence[int]) -> float:
    """Return what one microbatch costs, all layers: 0 if it is empty.

    Args:
        cost: of a step.
        chunks: of prompts.
        decode_kv_tokens: tokens of KV that each of its decodes reads.
    """
    if not chunks and not decode_kv_tokens:
        return 0.0
    num_tokens = sum(chunk.num_tokens for chunk in chunks) + len(decode_kv_tokens)
    pairs = sum(prefill_pairs(chunk.prefix, chunk.num_tokens) for chunk in chunks)
    return cost.step_s(num_tokens, sum(decode_kv_tokens), pairs)


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
        """Begin anew, with as few rounds as the fullest lane needs.

        Args:
            work_s: of each lane.
            num_prompts: of each lane.
            room: of a microbatch.
        """
        spare = room.without(_SPARE_TOKENS)
        rounds = max(spare.num_microbatches(*lane) for lane in zip(work_s, num_prompts, strict=True))
        self._left = [rounds] * self.num_lanes
        self._due_s = list(work_s)
        self._share_s = max(work_s) / max(rounds, 1)

    def share_s(self, lane: int, work_s: Sequence[float], num_prompts: Sequence[int], room: Room) -> float:
        """Return the work of the next microbatch of a lane, given what the lanes have left; 0 if there is none."""
        if num_prompts[lane] and not self._left[lane]:  # the limits of a step cut in
            self.begin(work_s, num_prompts, room)
        self._left[lane] = max(self._left[lane] - 1, 0)
        over_s = max(work_s[lane] - self._due_s[lane], 0.0)  # what the turn before left over: mostly part of a token
        share_s = self._share_s + over_s if self._left[lane] else work_s[lane]
        self._due_s[lane] = work_s[lane] - share_s
        return share_s * (1 + _LEEWAY)


class _Lane:
    """The prompts of one lane, and what is left of them."""

    def __init__(self, work: Work, prompts: Sequence[tuple[int, Waiting]]) -> None:
        self._work = work
        self._prompts = [(index, *waiting) for index, waiting in reversed(prompts)]
        self.work_s = sum(work.chunk_s(*waiting) for _, waiting in prompts)

    @property
    def num_prompts(self) -> int:
        """Prompts that are not done."""
        return len(self._prompts)

    def cut(self, share_s: float, room: Room) -> list[Chunk]:
        """Return the next chunks: of as much work as is due, within the room; at least a token."""
        chunks: list[Chunk] = []
        left_s, tokens = share_s, room.num_tokens
        while self._prompts and tokens and len(chunks) < room.num_rows:
            index, prefix, num_tokens = self._prompts.pop()
            size = min(num_tokens, tokens, self._work.largest(prefix, left_s) or int(not chunks))
            if size:
                chunks.append(Chunk(index, prefix, size))
                tokens -= size
                left_s -= self._work.chunk_s(prefix, size)
            if size < num_tokens:
                self._prompts.append((index, prefix + size, num_tokens - size))
                break
        self.work_s = self.work_s - share_s + left_s if self._prompts else 0.0
        return chunks


def form_ahead(
    queue: Sequence[Waiting], decode_kv_tokens: Sequence[int], cost: CostModel, limits: Limits
) -> list[Microbatch]:
    """Return microbatches of equal cost that compute the whole queue; number i is of lane i mod `num_lanes`.

    Args:
        queue: prompts, first come first.
        decode_kv_tokens: tokens of KV that each running decode reads; each takes part once in every round.
        cost: of a step; only proportions matter, so that of the whole model will do for its stages.
        limits: of a step.

    Raises:
        ValueError: a prompt has no tokens to compute, or the decodes leave no place for prompts.
    """
    check_queue(queue, decode_kv_tokens, limits)
    decodes = spread(decode_kv_tokens, limits.num_lanes)
    work = Work.of(cost, limits.max_batch_tokens)
    room = Room.beside(max(map(len, decodes)), limits, work)
    dealt = deal([work.chunk_s(*waiting) for waiting in queue], [0.0] * limits.num_lanes)
    lanes = [
        _Lane(work, [(index, queue[index]) for index, chosen in enumerate(dealt) if chosen == lane])
        for lane in range(limits.num_lanes)
    ]
    rounds = Rounds(limits.num_lanes)
    formed: list[Microbatch] = []
    while any(lane.num_prompts for lane in lanes):
        number = len(formed) % limits.num_lanes
        works, counts = [lane.work_s for lane in lanes], [lane.num_prompts for lane in lanes]
        if not formed:
            rounds.begin(works, counts, room)
        chunks = lanes[number].cut(rounds.share_s(number, works, counts, room), room)
        cost_s = microbatch_s(cost, chunks, [decode_kv_tokens[i] for i in decodes[number]])
        formed.append(Microbatch(tuple(chunks), tuple(decodes[number]), cost_s))
    return formed


def check_queue(queue: Sequence[Waiting], decode_kv_tokens: Sequence[int], limits: Limits) -> None:
    """Refuse what cannot be formed.

    Raises:
        ValueError: see `form_ahead`.
    """
    for waiting in queue:
        if waiting.prefix < 0 or waiting.num_tokens < 1:
            raise ValueError(f"{waiting.num_tokens} tokens behind a prefix of {waiting.prefix} cannot be queued")
    most = ceil(len(decode_kv_tokens) / limits.num_lanes)
    if most > min(limits.max_batch_tokens, limits.max_batch_rows) - bool(queue):
        raise ValueError(f"{most} decodes in a step leave no place for prompts")
