"""Device, type and memory of the workers where nobody names them, by what the machine has free and the model takes.

    device   a card, if there is one that torch can use, else the CPU
    dtype    bfloat16 on a card; on the CPU float32, unless its parameters take more than three quarters of the memory
    memory   on a card nine tenths of what is free there; on the CPU the parameters, and as much again for KV, a GiB at
             least: that much, or what is free; workers share it

A control group's limit counts as the machine's, so that a container is not killed for what it was not given.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cli.cluster.children import num_devices
from cli.cluster.settings import AUTO, UpSettings
from cli.model_sizes import CheckpointSizes
from shared.errors import StartupError
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
class Cards:
    """The CUDA devices that workers may use."""

    count: int = 0
    free_bytes: int = 0
    """Of the one that has least; 0: unknown."""


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


def size(settings: UpSettings, model: CheckpointSizes, free_bytes: int, cards: Cards) -> tuple[UpSettings, str]:
    """Return the settings with what was not named, and what to tell of it; "" if all was named.

    Args:
        settings: of the cluster.
        model: which is to be served.
        free_bytes: memory of this machine that nobody has.
        cards: of this machine.

    Raises:
        StartupError: the model does not fit into a worker's share of what is free.
    """
    device = settings.device if settings.device != AUTO else "cuda" if cards.count else "cpu"
    if device == "cpu":
        free, sharing = free_bytes, settings.workers
        share = max(free - PROCESS_BYTES, 0) // sharing - PROCESS_BYTES
    else:
        free = cards.free_bytes
        sharing = -(-settings.workers // cards.count) if device == "cuda" and cards.count else settings.workers
        share = int(CARD_SHARE * free) // sharing
    budget = settings.memory or share
    dtype = settings.dtype
    if dtype == AUTO:
        is_large = model.parameter_bytes("float32") > PARAMETER_SHARE * budget
        dtype = "bfloat16" if device != "cpu" or is_large else "float32"
    parameter_bytes = model.parameter_bytes(dtype)
    memory = settings.memory
    if memory is None:
        if free and share < parameter_bytes + LEAST_BYTES:
            raise _too_large(settings, model, dtype, max(share, 0))
        wanted = parameter_bytes + max(parameter_bytes, USUAL_BYTES) if device == "cpu" else share
        memory = min(wanted, share) if free else USUAL_BYTES
    why = "" if cards.count else " (no card that torch can use)"
    each = f" for each of {settings.workers} workers" if settings.workers > 1 else ""
    chosen = [
        *([f"device {device}{why}"] if settings.device == AUTO else []),
        *([f"dtype {dtype}"] if settings.dtype == AUTO else []),
        *([f"memory {describe_bytes(memory)}{each}"] if settings.memory is None else []),
    ]
    known = [f"the parameters take {describe_bytes(parameter_bytes)}"] if parameter_bytes else []
    known += [f"{describe_bytes(free)} are free"] if free else []
    told = f"chosen: {', '.join(chosen)}{'; ' if known else ''}{', '.join(known)}" if chosen else ""
    return settings.model_copy(update={"device": device, "dtype": dtype, "memory": memory}), told


def _too_large(settings: UpSettings, model: CheckpointSizes, dtype: str, share: int) -> StartupError:
    each = f"each of {settings.workers} workers" if settings.workers > 1 else "a worker"
    said = f"{model.name} takes {describe_bytes(model.parameter_bytes(dtype))} in {dtype}, besides room for KV"
    smaller = " and --dtype bfloat16" if dtype == "float32" else ""
    fewer = "fewer --workers, " if settings.workers > 1 else ""
    hint = f"Give {fewer}another model, or --memory{smaller} to try all the same"
    return StartupError(f"{said}, and {each} could have {describe_bytes(share)} of what is free here", hint, "memory")
