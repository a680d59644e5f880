"""Divides a worker's memory budget: parameters, a reserve for activations and workspace, and KV blocks from the rest.

| parameters | reserve | KV: num_blocks * bytes_per_block ............ | less than a block |
|<------------------------------- memory_bytes ---------------------------------------->|

A longer context needs more reserve (keys and values are gathered), so how long it may be is found out by trials:

    reserve   |                  _x  longest: does not fit           1. the longest: does it fit, it is served
              |             _.o'                                     2. else the least: if not even that, it is refused
              |  o----'''    └── between: where the line through     3. else between, some more times
              |  least           both says that it fits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from services.worker.memory.reserve import MIN_RESERVE_BYTES
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import NumberType
from shared.errors import StartupError
from shared.layers import LayerRange

MIN_CONTEXT_TOKENS: Final = 64
"""A context that was not asked for is never lowered below this (or the model's own, if that is shorter)."""
MAX_TRIALS: Final = 6
"""Contexts whose reserve is measured at most."""
_WORTH_RATIO: Final = 1 / 32
"""A trial is not worth its time if the context becomes longer by less."""
_LINE_MARGIN: Final = 1.01
"""Between two measurements the reserve is taken for this much more than the line through them."""
_REPEAT_MARGIN: Final = 1.1
"""The reserve may be this much more when it is measured again: whoever gives what a refusal names is not refused."""


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


@dataclass(frozen=True, slots=True)
class Trial:
    """A reserve that was measured."""

    context: int
    """Tokens of the longest sequence."""
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """The result."""

    num_blocks: int
    max_model_len: int


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: NumberType, layers: LayerRange | None = None) -> int:
    """Return the memory of one block: keys and values of `block_size` tokens in some layers; None: in all."""
    num_layers = spec.num_layers if layers is None else len(layers)
    return 2 * num_layers * block_size * spec.kv_size * dtype.itemsize


def count_host_blocks(host_memory_bytes: int, block_kv_bytes: int) -> int:
    """Return the KV blocks that so much memory of the host holds.

    Raises:
        StartupError: none.
    """
    if host_memory_bytes < block_kv_bytes:
        said = f"host_memory holds no KV block of {block_kv_bytes} bytes"
        raise StartupError(said, f"Give at least {block_kv_bytes}, or 0 for none")
    return host_memory_bytes // block_kv_bytes


def longest_context(demand: Demand, reserve_bound: int | None) -> int:
    """Return the longest context that could be served if steps took the least reserve.

    Args:
        demand: what is to be divided.
        reserve_bound: surely enough for steps over the least context, for a refusal to name; None: not known.

    Raises:
        StartupError: the context asked for cannot fit even so.
    """
    num_tokens = _kv_tokens(demand, MIN_RESERVE_BYTES)
    if num_tokens < least_context(demand):
        if reserve_bound is None:
            raise _too_little(demand, "workspace", MIN_RESERVE_BYTES, " and some more for workspace")
        raise _too_little(demand, f"{_mib(reserve_bound)} of workspace at most", reserve_bound)
    return demand.max_model_len or min(demand.max_positions, num_tokens)


def divide(demand: Demand, trials: Sequence[Trial]) -> tuple[int, Division]:
    """Return the reserve, the KV blocks that the budget leaves, and the longest context that was tried and fits.

    Raises:
        StartupError: one request of the context that was asked for (or of the least useful one) does not fit.
    """
    fitting = [trial for trial in trials if _fits(demand, trial)]
    if not fitting:
        measured = min(trial.reserve_bytes for trial in trials)
        raise _too_little(demand, f"{_mib(measured)} of workspace", int(measured * _REPEAT_MARGIN))
    best = max(fitting, key=lambda trial: trial.context)
    num_blocks = _kv_tokens(demand, best.reserve_bytes) // demand.block_size
    return best.reserve_bytes, Division(num_blocks, best.context)


def next_context(demand: Demand, longest: int, trials: Sequence[Trial]) -> int | None:
    """Return the context whose reserve is to be measured next, or None if `divide` has the last word.

    Args:
        demand: what is to be divided.
        longest: context that is possible.
        trials: so far.
    """
    if not trials:
        return longest
    fitting = [trial for trial in trials if _fits(demand, trial)]
    failing = [trial for trial in trials if not _fits(demand, trial)]
    least = least_context(demand)
    if not failing or any(trial.context <= least for trial in failing) or len(trials) >= MAX_TRIALS:
        return None
    if not fitting:
        return least
    below = max(fitting, key=lambda trial: trial.context)
    context = _crossing(demand, below, min(failing, key=lambda trial: trial.context))
    return context if context > below.context * (1 + _WORTH_RATIO) else None


def least_context(demand: Demand) -> int:
    """Return the context below which serving makes no sense."""
    return demand.max_model_len or min(MIN_CONTEXT_TOKENS, demand.max_positions)


def least_memory(demand: Demand, reserve_bytes: int) -> int:
    """Return the smallest budget that holds one request of the least context."""
    needed = demand.parameter_bytes + reserve_bytes + _kv_bytes(demand, least_context(demand))
    return -(-needed // demand.page_bytes) * demand.page_bytes


def _kv_bytes(demand: Demand, num_tokens: int) -> int:
    """Return the memory of KV for so many tokens, each pool in whole pages."""
    num_blocks = -(-num_tokens // demand.block_size)
    pool_pages = -(-num_blocks * (demand.bytes_per_block // demand.num_pools) // demand.page_bytes)
    return demand.num_pools * pool_pages * demand.page_bytes


def _crossing(demand: Demand, below: Trial, above: Trial) -> int:
    """Return the longest context between two that still fits, if the reserve grows evenly from one to the other."""
    slope = max(above.reserve_bytes - below.reserve_bytes, 0) / (above.context - below.context)
    fits, fails = below.context, above.context
    while fails - fits > 1:
        middle = (fits + fails) // 2
        reserve_bytes = below.reserve_bytes + slope * (middle - below.context)
        if _fits(demand, Trial(middle, int(reserve_bytes * _LINE_MARGIN))):
            fits = middle
        else:
            fails = middle
    return fits


def _fits(demand: Demand, trial: Trial) -> bool:
    return _kv_tokens(demand, trial.reserve_bytes) >= trial.context


def _kv_tokens(demand: Demand, reserve_bytes: int) -> int:
    left = demand.memory_bytes // demand.page_bytes * demand.page_bytes - demand.parameter_bytes - reserve_bytes
    pool_pages = max(left, 0) // demand.page_bytes // demand.num_pools
    return pool_pages * demand.page_bytes // (demand.bytes_per_block // demand.num_pools) * demand.block_size


def _too_little(demand: Demand, workspace: str, reserve_bytes: int, more: str = "") -> StartupError:
    """Return a refusal; what it names is rounded up to whole MiB."""
    num_tokens = least_context(demand)
    kv = _mib(_kv_bytes(demand, num_tokens))
    in_pages = f" in pages of {_mib(demand.page_bytes)}" if demand.page_bytes > 1 else ""
    return StartupError(
        f"a memory budget of {_mib(demand.memory_bytes)} is too small: parameters take {_mib(demand.parameter_bytes)}, "
        f"one request of {num_tokens} tokens takes {kv}{in_pages}, besides {workspace}",
        f"Give at least {ceil(least_memory(demand, reserve_bytes) / 2**20)}MiB{more}",
        "memory",
    )


def _mib(num_bytes: int) -> str:
    return f"{ceil(num_bytes / 2**20 * 100) / 100:.2f} MiB"
