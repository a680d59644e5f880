"""Microbatches of equal cost, formed ahead from everything that is queued: a pipeline idles where neighbours differ.

    | R0 ........... | R0 . R1 ...... | R2 R3 ... R4 ..... | R4 ....... |     one line, cut into pieces of equal cost,
    |    lane 0      |    lane 1      |       lane 0       |   lane 1   |     not of equal length: a later chunk attends
                                                                             to more tokens

A chunk of c tokens behind a prefix of p costs α·(p·c + (c² + c)/2) + β·c: its work. A microbatch costs the work of
its chunks, what its decodes cost, and γ: together `CostModel.step_s`, where α = a, β = b1 and γ = g1 beyond some
hundred tokens. Cutting a prompt neither adds to its work nor saves any, so queues have a work too.

Source: KunServe, version 2, section 4.3, figures 10 and 11, and appendix. Deviations:

- Equation (3) sums γ over the chunks, though the text says that a batch amortises it; here it counts once.
- The paper has no term for decodes; here each adds its token and the reading of its KV. They are spread evenly, so what
  is cut is the prompts' work alone.
- The paper halves until a microbatch would fall under MIN tokens (`formations.py`). Tokens and cost are not
  proportional, so this ends at different depths in different places, and neighbours differ twofold. Here the number m
  of microbatches is chosen first (`shares.py`) and each gets the m-th part, the cost_upper = cost / m of the appendix;
  for m = 2, 4, 8 these are the halves. And m is not ⌈tokens / MIN⌉: in a long line it is as small as the limits of a
  step allow, since more would only pay γ more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from services.worker.scheduling.shares import Line, Room, Shares
from services.worker.scheduling.view import Limits
from shared.cost import CostModel, prefill_pairs


class Waiting(NamedTuple):
    """A prompt of which some tokens are to be computed."""

    prefix: int
    """Tokens computed already, or cached; at least 0."""
    num_tokens: int
    """Tokens to compute; at least 1."""


class Chunk(NamedTuple):
    """A piece of a prompt."""

    prompt: int
    """Its place in the queue."""
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


def branch_of(cost: CostModel, num_tokens: int) -> CostModel:
    """Return the formula with one branch, that of steps of about this many tokens."""
    first = cost.g0_s + cost.b0_s * num_tokens >= cost.g1_s + cost.b1_s * num_tokens
    g_s, b_s = (cost.g0_s, cost.b0_s) if first else (cost.g1_s, cost.b1_s)
    return replace(cost, g0_s=0, b0_s=0, g1_s=g_s, b1_s=b_s)


class _Cutter:
    """The line of prompts, and what is left of them."""

    def __init__(self, cost: CostModel, queue: Sequence[Waiting]) -> None:
        self._cost = cost
        self._prompts = [(index, *waiting) for index, waiting in reversed(list(enumerate(queue)))]

    @property
    def line(self) -> Line:
        """What is left."""
        works = sum(self._cost.chunk_s(prefix, left) for _, prefix, left in self._prompts)
        return Line(works, sum(left for *_, left in self._prompts), len(self._prompts))

    def cut(self, share_s: float, room: Room) -> list[Chunk]:
        """Return the next chunks: of as much work as is due, within the room; at least a token."""
        chunks: list[Chunk] = []
        left_s, tokens = share_s, room.num_tokens
        while self._prompts and tokens and len(chunks) < room.num_rows:
            index, prefix, num_tokens = self._prompts.pop()
            size = min(num_tokens, tokens, self._cost.largest(prefix, left_s) or int(not chunks))
            if size:
                chunks.append(Chunk(index, prefix, size))
                tokens -= size
                left_s -= self._cost.chunk_s(prefix, size)
            if size < num_tokens:
                self._prompts.append((index, prefix + size, num_tokens - size))
                break
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
    branch = branch_of(cost, limits.max_batch_tokens)
    room = Room.beside(max(map(len, decodes)), limits, branch)
    cutter, shares = _Cutter(branch, queue), Shares(limits.num_lanes)
    formed: list[Microbatch] = []
    while (line := cutter.line).num_prompts:
        own = decodes[len(formed) % limits.num_lanes]
        chunks = cutter.cut(shares.next_s(line, room, is_alone=not decode_kv_tokens), room)
        cost_s = microbatch_s(cost, chunks, [decode_kv_tokens[i] for i in own])
        formed.append(Microbatch(tuple(chunks), tuple(own), cost_s))
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
