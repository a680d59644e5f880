"""Device, type and memory of the workers where nobody names them, by what the machine has free and the model takes.

    device   a card, if there is one that torch can use, else the CPU
    dtype    bfloat16 on a card; on the CPU float32, unless its parameters take more than three quarters of the memory
    memory   on a card nine tenths of what is free there; on the CPU the parameters, and as much again for KV, a GiB at
             least: that much, or what is free; workers share it

A control group's limit counts as the machine's, so that a container is not killed for what it was not given; the limit
of a container that a worker has for itself is not shared.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import StartupError
from shared.host import FreeMemory
from shared.model_sizes import CheckpointSizes
from shared.process.config import visible_devices
from shared.process.config_fields import AUTO
from shared.sizes import describe_bytes

USUAL_BYTES: Final = 2**30
"""Of a worker whose model says nothing of its size; and the least KV memory on the CPU, if there is so much."""
LEAST_BYTES: Final = 128 * 2**20
"""Beside the parameters: workspace, and KV for a short request."""
PROCESS_BYTES: Final = 512 * 2**20
"""Of a worker's process beside its budget, torch's libraries above all, and of all other services together."""
CARD_SHARE: Final = 0.9
PARAMETER_SHARE: Final = 0.75
"""Of the memory, up to which parameters are kept in float32 on the CPU."""
ASK_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What each worker has, or what somebody has named of it."""

    device: str = AUTO
    """`cpu`, `cuda`, `cuda:<index>` or `auto`."""
    dtype: str = AUTO
    """`float32`, `bfloat16` or `auto`."""
    memory: int | None = None
    """Bytes; None: not named."""


@dataclass(frozen=True, slots=True)
class Cards:
    """The CUDA devices that workers may use."""

    count: int = 0
    free_bytes: int = 0
    """Of the one that has least; 0: unknown."""


def num_devices() -> int:
    """Return how many CUDA devices workers may use, without loading a CUDA library."""
    visible = visible_devices()
    if visible is not None:
        return len(visible)
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def find_cards() -> Cards:
    """Return those that the installed torch could use."""
    count = num_devices()
    with suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            count = 0
    if not count:
        return Cards()
    command = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    try:
        told = subprocess.run(  # noqa: S603  no words but these
            command, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True
        ).stdout
        return Cards(count, min(2**20 * int(line) for line in told.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return Cards(count)


def size(named: Sizes, num_workers: int, model: CheckpointSizes, free: FreeMemory, cards: Cards) -> tuple[Sizes, str]:
    """Return what each worker has, and what to tell of what was not named; "" if all was.

    Args:
        named: by somebody.
        num_workers: on this machine, who share what it has.
        model: which is to be served.
        free: memory that nobody has.
        cards: of this machine.

    Raises:
        StartupError: the model does not fit into a worker's share of what is free.
    """
    device = named.device if named.device != AUTO else "cuda" if cards.count else "cpu"
    free_bytes, share = _on_cpu(free, num_workers) if device == "cpu" else _on_cards(cards, device, num_workers)
    budget = named.memory or share
    dtype = named.dtype
    if dtype == AUTO:
        is_large = model.parameter_bytes("float32") > PARAMETER_SHARE * budget
        dtype = "bfloat16" if device != "cpu" or is_large else "float32"
    taken = model.parameter_bytes(dtype)
    memory = named.memory
    if memory is None:
        if free_bytes and share < taken + LEAST_BYTES:
            each = f"each of {num_workers} workers" if num_workers > 1 else "a worker"
            said = f"{model.name} takes {describe_bytes(taken)} in {dtype}, besides room for KV, and {each} could have"
            hint = _instead(num_workers, dtype, free)
            raise StartupError(f"{said} {describe_bytes(max(share, 0))} of what is free here", hint, "memory")
        wanted = taken + max(taken, USUAL_BYTES) if device == "cpu" else share
        memory = min(wanted, share) if free_bytes else USUAL_BYTES
    why = "" if cards.count else " (no card that torch can use)"
    each = f" for each of {num_workers} workers" if num_workers > 1 else ""
    chosen = [
        *([f"device {device}{why}"] if named.device == AUTO else []),
        *([f"dtype {dtype}"] if named.dtype == AUTO else []),
        *([f"memory {describe_bytes(memory)}{each}"] if named.memory is None else []),
    ]
    known = [f"the parameters take {describe_bytes(taken)}"] if taken else []
    known += [f"{describe_bytes(free_bytes)} are free"] if free_bytes else []
    told = f"chosen: {', '.join(chosen)}{'; ' if known else ''}{', '.join(known)}" if chosen else ""
    return Sizes(device, dtype, memory), told


def _on_cpu(free: FreeMemory, num_workers: int) -> tuple[int, int]:
    """Return the bytes that are free for workers' steps, and one worker's share, which may be below 0."""
    shares = [(free.shared_bytes, num_workers)]
    shares += [(free.own_bytes, 1)] if free.own_bytes is not None else []
    share = min(max(num_bytes - PROCESS_BYTES, 0) // count - PROCESS_BYTES for num_bytes, count in shares)
    return min(num_bytes for num_bytes, _ in shares), share


def _on_cards(cards: Cards, device: str, num_workers: int) -> tuple[int, int]:
    sharing = -(-num_workers // cards.count) if device == "cuda" and cards.count else num_workers
    return cards.free_bytes, int(CARD_SHARE * cards.free_bytes) // sharing


def _instead(num_workers: int, dtype: str, free: FreeMemory) -> str:
    """Return what to do where a model does not fit."""
    is_contained = free.own_bytes is not None
    more = "its container more memory (compose: SLUICE_WORKER_LIMIT), " if is_contained else ""
    fewer = "fewer workers, " if num_workers > 1 else ""
    smaller = " and --dtype bfloat16" if dtype == "float32" else ""
    return f"Give {more}{fewer}another model, or --memory{smaller} to try all the same"
