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
from pathlib import Path
from typing import Any, Final

from cli.cluster.children import num_devices
from cli.cluster.settings import AUTO, UpSettings
from shared.errors import StartupError
from shared.reading import parse_json
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
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


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


def size(settings: UpSettings, folder: Path, free_bytes: int, cards: Cards) -> tuple[UpSettings, str]:
    """Return the settings with what was not named, and what to tell of it; "" if all was named.

    Args:
        settings: of the cluster.
        folder: of the checkpoint.
        free_bytes: memory of this machine that nobody has.
        cards: of this machine.

    Raises:
        StartupError: the model does not fit into a worker's share of what is free.
    """
    device = settings.device if settings.device != AUTO else "cuda" if cards.count else "cpu"
    num_parameters = _num_parameters(folder)
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
        is_large = num_parameters * _BYTES["float32"] > PARAMETER_SHARE * budget
        dtype = "bfloat16" if device != "cpu" or is_large else "float32"
    parameter_bytes = num_parameters * _BYTES[dtype]
    memory = settings.memory
    if memory is None:
        if free and share < parameter_bytes + LEAST_BYTES:
            raise _too_large(settings, folder, dtype, parameter_bytes, max(share, 0))
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


def _too_large(settings: UpSettings, folder: Path, dtype: str, parameter_bytes: int, share: int) -> StartupError:
    each = f"each of {settings.workers} workers" if settings.workers > 1 else "a worker"
    said = f"{folder.name} takes {describe_bytes(parameter_bytes)} in {dtype}, besides room for KV"
    smaller = " and --dtype bfloat16" if dtype == "float32" else ""
    fewer = "fewer --workers, " if settings.workers > 1 else ""
    hint = f"Give {fewer}another model, or --memory{smaller} to try all the same"
    return StartupError(f"{said}, and {each} could have {describe_bytes(share)} of what is free here", hint, "memory")


def parameter_bytes(folder: Path, dtype: str) -> tuple[int, int]:
    """Return what the parameters of a checkpoint take in a type, 0 if that is not known, and a number of that type."""
    return _num_parameters(folder) * _BYTES[dtype], _BYTES[dtype]


def _num_parameters(folder: Path) -> int:
    """Return how many parameters a checkpoint has by the size of its files; 0 if that is not known."""
    index = _json(folder / "model.safetensors.index.json")
    files = index.get("weight_map")
    names = set(files.values()) if isinstance(files, dict) else {path.name for path in folder.glob("*.safetensors")}
    config = _json(folder / "config.json")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    itemsize = _BYTES.get(stored, 4) if isinstance(stored, str) else 4
    try:
        return sum((folder / str(name)).stat().st_size for name in names) // itemsize
    except OSError:
        return 0


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes(), allow_inf_nan=True)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
