"""Triton kernels of what lies between a layer's products: norms, heads, gates. One token, or a part of it, per program.

Numbers are rounded to the model's type where torch's operators round them, so that the two differ by the order of sums
alone. Everything that is the same for all steps of a model is a constant: a kernel is compiled once, before the worker
is ready. Lists of a step begin anywhere in a buffer, so nothing is made of where they begin.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_rows(
    hidden,
    weight,
    bias,
    out,
    eps,
    WIDTH: tl.constexpr,
    IS_RMS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise a row of `hidden` [t, WIDTH] into `out`, of the same shape."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    is_there = column < WIDTH
    numbers = tl.load(hidden + first + column, mask=is_there, other=0.0).to(tl.float32)
    if not IS_RMS:
        numbers = tl.where(is_there, numbers - tl.sum(numbers) / WIDTH, 0.0)
    numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers) / WIDTH + eps)
    if HAS_WEIGHT:
        numbers = numbers * tl.load(weight + column, mask=is_there, other=0.0).to(tl.float32)
    if HAS_BIAS:
        numbers = numbers + tl.load(bias + column, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + first + column, numbers.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _store(part, place, is_there, heads, keys, values, is_query, is_key, is_value):
    """Store a part of some heads where each kind of head belongs."""
    tl.store(heads + place, part, mask=is_there & is_query)
    tl.store(keys + place, part, mask=is_there & is_key)
    tl.store(values + place, part, mask=is_there & is_value)


@triton.jit
def _normed(part, scale, q_norm, k_norm, place, is_there, is_query, is_value, dtype: tl.constexpr):
    """Return a part of some heads, normalised but for values."""
    weight = tl.where(
        is_query,
        tl.load(q_norm + place, mask=is_there & is_query, other=0.0),
        tl.load(k_norm + place, mask=is_there & (is_query == 0), other=0.0),
    )
    normed = (part * scale * weight.to(tl.float32)).to(dtype).to(tl.float32)
    return tl.where(is_value, part, normed)


@triton.jit
def _pointer(address, dtype: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return an address as a pointer to numbers of a type."""
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit(do_not_specialize=["keys", "values"], do_not_specialize_on_alignment=["positions", "slots"])
def rotate_heads(
    heads,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    keys,
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Normalise and rotate some heads of a token; queries stay in `heads`, keys and values go to their slot.

    The heads' first ROTARY_DIM dimensions are two halves that turn against each other, the rest stays. `heads` is
    [t, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM], `cos` and `sin` [positions, ROTARY_DIM] (the first half of `sin` is
    negated, see `RopeTable`), `keys` and `values` the addresses of [slots, NUM_KV_HEADS, HEAD_DIM]: numbers, since what
    starts a kernel asks the driver for each pointer, and there need not be memory at the first slot. IS_ALIGNED: both
    are multiples of 16.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    is_query = head < NUM_HEADS
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    slot = tl.load(slots + token)
    dtype: tl.constexpr = heads.dtype.element_ty
    heads = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    keys = _pointer(keys, dtype, IS_ALIGNED) + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM
    values = _pointer(values, dtype, IS_ALIGNED) + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM

    if ROTARY_DIM > 0:
        half = tl.arange(0, HALF_BLOCK)[None, :]
        in_half = half < ROTARY_DIM // 2
        first = tl.load(heads + half, mask=is_head & in_half, other=0.0).to(tl.float32)
        second = tl.load(heads + ROTARY_DIM // 2 + half, mask=is_head & in_half, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        beyond = ROTARY_DIM + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = beyond < HEAD_DIM
        rest = tl.load(heads + beyond, mask=is_head & in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.zeros((HEADS_BLOCK, 1), dtype=tl.float32)
        if ROTARY_DIM > 0:
            squares += tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        if ROTARY_DIM > 0:
            first = _normed(first, scale, q_norm, k_norm, half, in_half, is_query, is_value, dtype)
            behind = ROTARY_DIM // 2 + half
            second = _normed(second, scale, q_norm, k_norm, behind, in_half, is_query, is_value, dtype)
        if REST_BLOCK > 0:
            rest = _normed(rest, scale, q_norm, k_norm, beyond, in_rest, is_query, is_value, dtype)
    if ROTARY_DIM > 0:
        angle = tl.load(positions + token) * ROTARY_DIM + half
        cos_first = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + ROTARY_DIM // 2, mask=in_half, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + ROTARY_DIM // 2, mask=in_half, other=0.0).to(tl.float32)
        turned_first = (first * cos_first).to(dtype).to(tl.float32) + (second * sin_first).to(dtype).to(tl.float32)
        turned_second = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
        first = tl.where(is_value, first, turned_first).to(dtype)
        second = tl.where(is_value, second, turned_second).to(dtype)
        _store(first, half, in_half, heads, keys, values, is_query, is_key, is_value)
        _store(second, ROTARY_DIM // 2 + half, in_half, heads, keys, values, is_query, is_key, is_value)
    if REST_BLOCK > 0:
        _store(rest.to(dtype), beyond, in_rest, heads, keys, values, is_query, is_key, is_value)


@triton.jit
def gate_rows(pair, out, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Put a part of a row of activated gates times the other half of `pair` [t, 2 * WIDTH] into `out` [t, WIDTH]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < WIDTH
    gate = tl.load(pair + token * 2 * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(pair + token * 2 * WIDTH + WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "relu":
        gate = tl.where(gate > 0, gate, gate * 0.0)  # what is no number stays none
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # (1 + tanh x) / 2 = 1 - 1 / (1 + e^(2 x))
    dtype: tl.constexpr = out.dtype.element_ty
    product = gate.to(dtype).to(tl.float32) * factor
    tl.store(out + token * WIDTH + column, product.to(dtype), mask=is_there)
