"""The reserve: what the steps of a model take beside parameters and KV. Sizes only: no torch, nothing is measured here.

measured peak of a step, or an estimate | what no measurement shows: waiting activations, splits | a margin | angles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.worker.contract.remote import SPLIT_KEYS
from services.worker.models.spec import ModelSpec

RESERVE_MARGIN: Final = 1.1
"""The measured reserve is multiplied by this: the allocator's fragments differ from run to run."""
MIN_RESERVE_BYTES: Final = 4 * 2**20
"""Least reserve; a measurement by resident memory is no finer than this."""
GROUP_BYTES: Final = 32 * 2**20
"""Gathered keys and values of one group of decodes by torch's operators, unless a single row has more."""
DRAW_ELEMENTS: Final = 2**20
"""Logits that are weighed and summed at a time, unless one row has more: bounds the workspace, and stays in caches."""
WAITING_ACTIVATIONS: Final = 4
"""Hidden states of the largest batch that a stage of a group keeps besides those of the step under way: one that is
received, one that waits, one that is computed from, one that is sent. A device beside the host has the third alone: the
others are in host memory, and what steps that are launched behind each other let go of, the next one takes."""
_ITEM_ROWS, _SPREAD, _MAX_PARTS = 16, 4, 16 * 2**20
"""kItemRows, kSpread and kMaxParts in native/src/attention_work.h."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the steps of a worker depend on, as far as their memory goes."""

    spec: ModelSpec
    item_bytes: int
    """Of a number of the parameters, activations and KV."""
    max_tokens: int
    """Of one batch."""
    max_rows: int
    """Of one batch."""
    in_pages: bool
    """The worker may become a stage of a group."""


def estimated_peak(sizes: StepSizes, context: int) -> int:
    """Return a bound for the peak of a step over sequences of so many tokens, where it cannot be measured.

    Counted as if nothing were freed inside a layer: hidden states and projections of each token; for each row its
    logits and a copy in float32; three gathered groups (keys and values, slots, mask); of the logits that are drawn
    from at a time four numbers in float32 and three of 64 bits. Not for CUDA, where kernels have workspaces of their
    own.
    """
    spec, item_bytes = sizes.spec, sizes.item_bytes
    per_token = 6 * spec.hidden_size + 4 * (spec.q_size + 2 * spec.kv_size) + 4 * spec.intermediate_size
    row_bytes = 2 * context * spec.kv_size * item_bytes
    gathered = max(min(GROUP_BYTES, sizes.max_rows * row_bytes), row_bytes)
    drawn = max(min(DRAW_ELEMENTS, sizes.max_rows * spec.vocab_size), spec.vocab_size) * (4 * 4 + 3 * 8)
    logits = sizes.max_rows * spec.vocab_size * 2 * 4
    return sizes.max_tokens * per_token * item_bytes + logits + 3 * gathered + drawn + listed_bytes(sizes, context)


def reserve_bytes(sizes: StepSizes, peak_bytes: int, context: int, *, num_angles: int = 1) -> int:
    """Return the reserve for sequences of so many tokens.

    Args:
        sizes: of the steps.
        peak_bytes: of a step, with all that it keeps.
        context: most tokens of a sequence.
        num_angles: tables of the angles of that many positions that are kept side by side.
    """
    spec, item_bytes = sizes.spec, sizes.item_bytes
    if sizes.in_pages:
        peak_bytes += WAITING_ACTIVATIONS * sizes.max_tokens * spec.hidden_size * item_bytes
    angle_bytes = num_angles * 2 * context * spec.rotary_dim * item_bytes
    return max(int(peak_bytes * RESERVE_MARGIN), MIN_RESERVE_BYTES) + angle_bytes


def reserve_bound(sizes: StepSizes, context: int, num_threads: int) -> int:
    """Return a reserve that is surely enough on the CPU, whichever kernels compute, by that many threads."""
    return reserve_bytes(sizes, estimated_peak(sizes, context) + split_bytes(sizes.spec, context, num_threads), context)


def listed_bytes(sizes: StepSizes, context: int) -> int:
    """Return the most memory for what attention by torch's operators lists of each row's keys: slot and mask, in bytes.

    All layers of a step share it, but for those with another window. In a dry step few rows see the whole context.
    """
    seen = sum(min(window or context, context) for window in set(sizes.spec.windows))
    return min(sizes.max_rows, sizes.max_tokens) * seen * (8 + sizes.item_bytes)


def split_bytes(spec: ModelSpec, context: int, num_threads: int) -> int:
    """Return the most memory that native attention takes for splits of a context computed side by side, in bytes.

    It is taken only in steps of few rows, so a measurement of a large step does not show it.
    """
    if context <= 2 * SPLIT_KEYS:
        return 0
    units = (_SPREAD * num_threads - 1) // spec.num_kv_heads * spec.num_kv_heads
    rows = max(_ITEM_ROWS // spec.group_size, 1) * spec.group_size
    return 4 * min(units * -(-context // SPLIT_KEYS) * rows * (spec.head_dim + 2), _MAX_PARTS)
