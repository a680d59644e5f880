"""How much of the host's memory a worker takes for KV that leaves its device, beside its budget. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.worker.config import ExecutorKind, WorkerSettings
from services.worker.memory.budget import count_host_blocks
from shared.errors import StartupError
from shared.host import free_memory
from shared.systems import find_system

_SHARE: Final = 1 / 10
"""Of what is free on the host, for all its workers together where no setting says how much."""
_MOST_BYTES: Final = 16 * 2**30
"""For one worker then: on a GPU it is pinned at the start, needed or not."""


@dataclass(frozen=True, slots=True)
class HostShare:
    """Memory of the host for KV of preempted sequences."""

    num_bytes: int
    """Whole blocks; 0: none."""
    num_blocks: int
    is_given: bool
    """By a setting; else by default."""


def host_share(settings: WorkerSettings, block_kv_bytes: int) -> HostShare:
    """Return what a worker takes. It is only taken as KV comes there, on a GPU at the start.

    Args:
        settings: of this worker.
        block_kv_bytes: of one KV block, in all layers.

    Raises:
        StartupError: `host_memory` is given and holds no block, or the system has no use for it, or there is none for
            a system that swaps.
    """
    system, given = find_system(settings.system), settings.host_memory
    if given and not system.keeps_on_host:
        said = f"host_memory is given, but system '{system.name}' keeps no KV on the host"
        raise StartupError(said, "Leave it out, or choose another system")
    num_blocks = 0
    if given:
        num_blocks = count_host_blocks(given, block_kv_bytes)
    elif given is None and system.keeps_on_host:
        num_blocks = _default_bytes(settings) // block_kv_bytes
    if system.swaps and not num_blocks:
        said = (
            f"system '{system.name}' moves KV to the host, where it has no memory for a block of {block_kv_bytes} bytes"
        )
        raise StartupError(said, "Give some with --host-memory, or choose another system")
    return HostShare(num_blocks * block_kv_bytes, num_blocks, given is not None)


def _default_bytes(settings: WorkerSettings) -> int:
    """Return a share of what is free; the budget is on the host too where steps are computed on the CPU."""
    is_on_host = settings.executor is ExecutorKind.TORCH and settings.device == "cpu"
    free_bytes = free_memory() - (settings.memory if is_on_host else 0)
    return max(0, min(int(free_bytes * _SHARE) // settings.host_workers, settings.memory, _MOST_BYTES))
