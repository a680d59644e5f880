"""Two other ways to form microbatches from a queue, to compare with: by token count, and by halving.

`by_tokens` is Sarathi-Serve (Agrawal et al., 2024), section 4, as KunServe describes its baseline: steps are filled to
a budget of tokens one after the other; neighbours may hold chunks of one prompt. Deviations: none.

`by_halving` is KunServe, version 2, section 4.3, to the letter: one line of all prompts is cut in two of equal cost,
and those again, until one would fall under MIN tokens. Deviations: γ counts once per microbatch; decodes are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from benchmarks.paper_lookahead.microbatch import Chunk, Microbatch, Waiting, check_queue, microbatch_s, spread
from services.worker.scheduling.view import Limits
from shared.cost import CostModel, prefill_pairs


def by_tokens(
    queue: Sequence[Waiting],
    decode_kv_tokens: Sequence[int],
    cost: CostModel,
    limits: Limits,
) -> list[Microbatch]:
    """Return microbatches of `max_batch_tokens`, first come first; number i is of lane i mod `num_lanes`.

    Args:
        queue: prompts, first come first.
        decode_kv_tokens: tokens of KV that each running decode reads; each takes part once in every round.
        cost: of a step.
        limits: of a step.

    Raises:
        ValueError: a prompt has no tokens to compute, or the decodes leave no place for prompts.
    """
    check_queue(queue, decode_kv_tokens, limits)
    decodes = spread(decode_kv_tokens, limits.num_lanes)
    prompts = [(index, *waiting) for index, waiting in reversed(list(enumerate(queue)))]
    formed: list[Microbatch] = []
    while prompts:
        own = decodes[len(formed) % limits.num_lanes]
        tokens, rows = limits.max_batch_tokens - len(own), limits.max_batch_rows - len(own)
        chunks: list[Chunk] = []
        while prompts and tokens and len(chunks) < rows:
            index, prefix, left = prompts.pop()
            size = min(left, tokens)
            chunks.append(Chunk(index, prefix, size))
            tokens -= size
            if size < left:
                prompts.append((index, prefix + size, left - size))
        cost_s = microbatch_s(cost, chunks, [decode_kv_tokens[i] for i in own])
        formed.append(Microbatch(tuple(chunks), tuple(own), cost_s))
    return formed


def by_halving(queue: Sequence[Waiting], cost: CostModel, min_tokens: int) -> list[Microbatch]:
    """Return microbatches of one line of prompts, halved by cost while no half has fewer than `min_tokens`.

    Args:
        queue: prompts, first come first.
        cost: of a step.
        min_tokens: MIN of the paper, at least 1.

    Raises:
        ValueError: a prompt has no tokens to compute, or `min_tokens` is below 1.
    """
    if min_tokens < 1:
        raise ValueError(f"a microbatch has at least 1 token, not {min_tokens}")
    line = _Line(queue, cost)
    formed: list[Microbatch] = []
    parts = [(0, line.num_tokens)] if queue else []
    while parts:
        begin, end = parts.pop()
        middle = line.middle(begin, end) if end - begin >= 2 * min_tokens else begin
        if min(middle - begin, end - middle) < min_tokens:
            formed.append(Microbatch(tuple(line.chunks(begin, end)), (), line.cost_s(begin, end)))
        else:
            parts += [(middle, end), (begin, middle)]
    return formed


class _Line:
    """All tokens of a queue in one line, numbered through."""

    def __init__(self, queue: Sequence[Waiting], cost: CostModel) -> None:
        check_queue(queue, (), Limits(1, 1))
        self._queue = queue
        self._cost = cost
        self._begins = list(accumulate((waiting.num_tokens for waiting in queue), initial=0))
        self._pairs = list(accumulate((prefill_pairs(*waiting) for waiting in queue), initial=0))

    @property
    def num_tokens(self) -> int:
        return self._begins[-1]

    def cost_s(self, begin: int, end: int) -> float:
        """Return the cost of the tokens [begin, end) as one microbatch."""
        return self._cost.step_s(end - begin, 0, self._pairs_before(end) - self._pairs_before(begin))

    def middle(self, begin: int, end: int) -> int:
        """Return where to cut [begin, end), so that the costs of the two parts differ least; by bisection."""
        low, high = begin, end
        while high - low > 1:
            between = (low + high) // 2
            if self.cost_s(begin, between) <= self.cost_s(between, end):
                low = between
            else:
                high = between
        return min(low, high, key=lambda cut: (abs(self.cost_s(begin, cut) - self.cost_s(cut, end)), cut))

    def chunks(self, begin: int, end: int) -> list[Chunk]:
        """Return the pieces of prompts in [begin, end)."""
        found = []
        while begin < end:
            index = bisect_right(self._begins, begin) - 1
            stop = min(end, self._begins[index + 1])
            found.append(Chunk(index, self._queue[index].prefix + begin - self._begins[index], stop - begin))
            begin = stop
        return found

    def _pairs_before(self, token: int) -> int:
        index = min(bisect_right(self._begins, token), len(self._queue)) - 1
        return self._pairs[index] + prefill_pairs(self._queue[index].prefix, token - self._begins[index])
