"""Divides a worker's memory budget: parameters, a reserve for activations and workspace, and KV blocks from the rest.

| parameters | reserve | KV: num_blocks * bytes_per_block ............ | less than a block |
|<------------------------------- memory_bytes ---------------------------------------->|
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from services.worker.memory.layout import ceil_div
from services.worker.models.spec import ModelSpec
from shared.errors import StartupError

MIN_CONTEXT_TOKENS = 64
"""A context that was not asked for is never lowered below this (or the model's own, if that is shorter)."""
RESERVE_MARGIN = 1.1
"""The measured reserve is multiplied by this: the allocator's fragments differ from run to run."""
MIN_RESERVE_BYTES = 4 * 2**20
"""Least reserve; a measurement by resident memory is no finer than this."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the budget is divided by."""

    memory_bytes: int
    parameter_bytes: int
    bytes_per_block: int
    block_size: int
    max_positions: int
    """The model's own longest context."""
    max_model_len: int | None
    """Context that was asked for; None: as long as fits."""
    num_pools: int = 1
    """KV is divided into so many pools, equal parts of every block."""
    page_bytes: int = 1
    """Each pool takes whole pages; so do the parameters, in `parameter_bytes`, and the reserve."""
    most_reserve_bytes: int = 0
    """No reserve for the least context is larger: what a refusal counts with that comes before anything is measured."""


@dataclass(frozen=True, slots=True)
class Division:
    """The result."""

    num_blocks: int
    max_model_len: int


def longest_context(demand: Demand) -> int:
    """Return the longest context that could be served if no workspace were needed.

    Raises:
        StartupError: the context asked for cannot fit even so.
    """
    return divide(demand, 0, demand.max_positions).max_model_len


def divide(demand: Demand, reserve_bytes: int, context: int) -> Division:
    """Return the KV blocks that the budget leaves, and the context that they hold.

    Args:
        demand: what is to be divided.
        reserve_bytes: enough for contexts up to `context`.
        context: the longest to serve, if none was asked for.

    Raises:
        StartupError: one request of the context that was asked for (or of the least useful one) does not fit.
    """
    num_tokens = _kv_tokens(demand, reserve_bytes)
    if num_tokens < _least(demand):
        raise _too_little(demand, reserve_bytes)
    return Division(num_tokens // demand.block_size, demand.max_model_len or min(context, num_tokens))


def next_context(demand: Demand, reserve_bytes: int, context: int) -> int | None:
    """Return a shorter context to measure the reserve for, or None if `divide` has the last word.

    A longer context needs more workspace (keys and values are gathered), so where `context` does not fit, a shorter one
    may. The reserve is taken as proportional to the context; its fixed part makes that too hopeful, hence the factor,
    and another round.
    """
    if demand.max_model_len is not None or context <= _least(demand) or _kv_tokens(demand, reserve_bytes) >= context:
        return None
    bytes_per_token = demand.bytes_per_block / demand.block_size + reserve_bytes / context
    fits = int((demand.memory_bytes - demand.parameter_bytes) / bytes_per_token * 0.95)
    return max(min(fits, context - 1), _least(demand))


def _kv_tokens(demand: Demand, reserve_bytes: int) -> int:
    left = demand.memory_bytes // demand.page_bytes * demand.page_bytes - demand.parameter_bytes - reserve_bytes
    pool_pages = max(left, 0) // demand.page_bytes // demand.num_pools
    return pool_pages * demand.page_bytes // (demand.bytes_per_block // demand.num_pools) * demand.block_size


def least_context(max_model_len: int | None, max_positions: int) -> int:
    """Return the context below which serving makes no sense: the one that was asked for, if there is one."""
    return max_model_len or min(MIN_CONTEXT_TOKENS, max_positions)


def _least(demand: Demand) -> int:
    return least_context(demand.max_model_len, demand.max_positions)


def least_budget(demand: Demand, reserve_bytes: int) -> int:
    """Return the smallest budget that `divide` takes beside such a reserve, in bytes."""
    pool_bytes = ceil_div(_least(demand), demand.block_size) * (demand.bytes_per_block // demand.num_pools)
    fixed_pages = ceil_div(demand.parameter_bytes + reserve_bytes, demand.page_bytes)
    return (fixed_pages + ceil_div(pool_bytes, demand.page_bytes) * demand.num_pools) * demand.page_bytes


def _too_little(demand: Demand, reserve_bytes: int) -> StartupError:
    num_tokens = _least(demand)
    kv_bytes = ceil_div(num_tokens, demand.block_size) * demand.bytes_per_block
    enough = ceil_div(least_budget(demand, reserve_bytes or demand.most_reserve_bytes), 2**20)
    workspace = f"{_mib(reserve_bytes)} of workspace" if reserve_bytes else "workspace"
    return StartupError(
        f"a memory budget of {_mib(demand.memory_bytes)} is too small: parameters take {_mib(demand.parameter_bytes)}, "
        f"one request of {num_tokens} tokens takes {_mib(kv_bytes)}, besides {workspace}",
        f"Give at least {enough}MiB"
        if reserve_bytes
        else f"{enough}MiB is enough; less may be, which is measured then",
    )


def _mib(num_bytes: int) -> str:
    return f"{ceil(num_bytes / 2**20 * 100) / 100:.2f} MiB"


def estimated_reserve(spec: ModelSpec, max_tokens: int, max_rows: int, fixed_bytes: int, item_bytes: int) -> int:
    """Return a bound for the workspace of a step, where it cannot be measured.

    Counted as if nothing were freed inside a layer: hidden states and projections of each token, for each row its
    logits and a copy in float32, and `fixed_bytes` for what has a limit of its own (gathered keys, logits drawn from).
    """
    per_token = 6 * spec.hidden_size + 4 * (spec.q_size + 2 * spec.kv_size) + 4 * spec.intermediate_size
    per_row = spec.vocab_size * 2 * 4
    return max_tokens * per_token * item_bytes + max_rows * per_row + fixed_bytes
