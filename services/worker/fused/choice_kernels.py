"""Triton kernels of what follows the head: which rows are made of numbers, the largest logits, and draws.

One program has one row. It reads the row again for every question, which is cheap: a row of 128 000 logits takes half a
megabyte and stays in the second-level cache. Nothing waits for the host, however far a filter reaches.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_BITS = tl.constexpr(0x3F800000)
"""Of the number 1, the largest weight. Numbers that are not negative have the order of their bits."""
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize_on_alignment=["last", "finite"])
def finite_rows(hidden, last, finite, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Put into `finite` [n] whether the rows `last` [n] of `hidden` [t, WIDTH] are made of numbers."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    place = tl.load(last + row) * WIDTH + column
    numbers = tl.load(hidden + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(finite + row, tl.abs(tl.sum(numbers)) < float("inf"))


@triton.jit(do_not_specialize_on_alignment=["ids"])
def largest_rows(products, logits, ids, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Put a row of `products` [k, VOCAB] into `logits` as float32, and the id of the largest into `ids` [k].

    The lowest id on a tie; VOCAB if one is no number, or the largest is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((), float("-inf"), dtype=tl.float32)
    best_id = tl.full((), VOCAB, dtype=tl.int32)
    num_broken = tl.full((), 0, dtype=tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_there = column < VOCAB
        numbers = tl.load(products + row * VOCAB + column, mask=is_there, other=float("-inf")).to(tl.float32)
        tl.store(logits + row * VOCAB + column, numbers, mask=is_there)
        num_broken += tl.sum(((numbers != numbers) | (numbers == float("inf"))).to(tl.int32))
        top = tl.max(numbers)
        top_id = tl.min(tl.where(numbers == top, column, VOCAB))
        best_id = tl.where(top > best, top_id, best_id)
        best = tl.maximum(best, top)
    tl.store(ids + row, tl.where(num_broken > 0, VOCAB, best_id).to(tl.int64))


@triton.jit
def _weights(row, start, largest, slope, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weights of some ids of a row, 0 behind its end."""
    column = start + tl.arange(0, BLOCK)
    logits = tl.load(row + column, mask=column < VOCAB, other=float("-inf"))
    return tl.exp2((logits - largest) * slope)


@triton.jit
def _border(row, largest, slope, low, goal, BY_COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest weight, as its bits, such that those that are not smaller reach a goal.

    Args:
        low: bits of a weight of the row, or 0, of which this is true.
        goal: number of weights, or their sum.
    """
    up = tl.full((), ONE_BITS, dtype=tl.int32)
    while low < up:  # the border is a weight from `low` to `up`, or 0
        middle = low + (up - low + 1) // 2
        reached = tl.full((), 0.0, dtype=tl.float64)
        lowest = tl.full((), INFINITE_BITS, dtype=tl.int32)
        highest = tl.full((), 0, dtype=tl.int32)
        for start in range(0, VOCAB, BLOCK):
            weights = _weights(row, start, largest, slope, VOCAB, BLOCK)
            bits = weights.to(tl.int32, bitcast=True)
            is_above = bits >= middle
            if BY_COUNT:
                reached += tl.sum(is_above.to(tl.int32)).to(tl.float64)
            else:
                reached += tl.sum(tl.where(is_above, weights, 0.0).to(tl.float64))
            lowest = tl.minimum(lowest, tl.min(tl.where(is_above, bits, INFINITE_BITS)))
            highest = tl.maximum(highest, tl.max(tl.where(is_above, 0, bits)))
        if reached >= goal:
            low = lowest
        else:
            up = highest
    return low


@triton.jit
def _sum_from(row, largest, slope, border, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the weights that are not below a border."""
    total = tl.full((), 0.0, dtype=tl.float64)
    for start in range(0, VOCAB, BLOCK):
        weights = _weights(row, start, largest, slope, VOCAB, BLOCK)
        total += tl.sum(tl.where(weights >= border, weights, 0.0).to(tl.float64))
    return total


@triton.jit
def _draw(row, largest, slope, border, point, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id at which the CDF of the weights that are not below a border passes a point in [0, 1)."""
    target = point * _sum_from(row, largest, slope, border, VOCAB, BLOCK)
    before = tl.full((), 0.0, dtype=tl.float64)
    found, last = tl.full((), -1, dtype=tl.int32), tl.full((), 0, dtype=tl.int32)
    found_before, last_before = before, before
    for start in range(0, VOCAB, BLOCK):
        weights = _weights(row, start, largest, slope, VOCAB, BLOCK)
        mass = tl.sum(tl.where(weights >= border, weights, 0.0).to(tl.float64))
        is_it = (found < 0) & (before + mass > target)
        found = tl.where(is_it, start, found)
        found_before = tl.where(is_it, before, found_before)
        last = tl.where(mass > 0, start, last)
        last_before = tl.where(mass > 0, before, last_before)
        before += mass
    # sums in another order may round past the last id
    start, before = tl.where(found < 0, last, found), tl.where(found < 0, last_before, found_before)
    column = start + tl.arange(0, BLOCK)
    weights = _weights(row, start, largest, slope, VOCAB, BLOCK)
    weights = tl.where(weights >= border, weights, 0.0)
    cdf = before + tl.cumsum(weights.to(tl.float64), 0)
    passed = tl.min(tl.where((cdf > target) & (weights > 0), column, VOCAB))
    return tl.where(passed < VOCAB, passed, tl.max(tl.where(weights > 0, column, 0)))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ids"])
def draw_rows(logits, parameters, ids, num_rows, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Put the chosen id of a row of `logits` [num_rows, VOCAB] (float32) into `ids` [num_rows].

    `parameters` is [5, num_rows] float64: slope of the weights' exponents (0: the row takes its largest logit), top-k
    (0: all), top-p (1: all), min-p (0: all), point.
    """
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * VOCAB
    slope = tl.load(parameters + place).to(tl.float32)
    top_k = tl.load(parameters + num_rows + place)
    top_p = tl.load(parameters + 2 * num_rows + place)
    min_p = tl.load(parameters + 3 * num_rows + place).to(tl.float32)
    point = tl.load(parameters + 4 * num_rows + place)
    largest = tl.full((), float("-inf"), dtype=tl.float32)
    chosen = tl.full((), 0, dtype=tl.int32)
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        numbers = tl.load(row + column, mask=column < VOCAB, other=float("-inf"))
        top = tl.max(numbers)
        top_id = tl.min(tl.where(numbers == top, column, VOCAB - 1))
        chosen = tl.where(top > largest, top_id, chosen)
        largest = tl.maximum(largest, top)
    if slope > 0:
        low = tl.full((), 0, dtype=tl.int32)
        if top_k > 0:
            low = _border(row, largest, slope, low, top_k, True, VOCAB, BLOCK)
        if top_p < 1:
            goal = top_p * _sum_from(row, largest, slope, low.to(tl.float32, bitcast=True), VOCAB, BLOCK)
            low = _border(row, largest, slope, low, goal, False, VOCAB, BLOCK)
        border = tl.maximum(low.to(tl.float32, bitcast=True), min_p)
        chosen = _draw(row, largest, slope, border, point, VOCAB, BLOCK)
    tl.store(ids + place, chosen.to(tl.int64))
