"""Which worker gets a request: the least loaded one of the last snapshot, plus what was sent there since.

Pure: a snapshot in, a choice with its reason out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shared.hot import hot_dataclass
from shared.ids import WorkerId


@hot_dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker as placement sees it; own submissions since the snapshot are counted in."""

    worker_id: WorkerId
    ready: bool
    """Loaded, alive and not draining."""
    num_sequences: int
    """Sequences that run or wait there."""
    max_sequences: int
    """Sequences that it takes; 0 if unknown."""
    num_demanded_blocks: int
    """KV blocks that are held or asked for."""
    num_blocks: int
    """KV blocks in all; 0 if unknown."""
    max_request_tokens: int
    """Most tokens of prompt and output together that ever fit one request there; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The choice."""

    worker_id: WorkerId
    reason: str


Placement = Callable[[Sequence[WorkerLoad], int, Collection[WorkerId]], Placed | None]
"""(workers, tokens of prompt and output together, workers that refused just now) -> a choice, or None."""


def place_least_loaded(
    workers: Sequence[WorkerLoad], num_tokens: int, refused: Collection[WorkerId] = ()
) -> Placed | None:
    """Choose the worker whose KV memory is asked for least; None if none can take the request now.

    Ties: fewer sequences, then the smaller id, so that one input has one answer.
    """
    best: tuple[float, int, WorkerId] | None = None
    for worker in workers:
        if worker.worker_id in refused or not _can_take(worker, num_tokens):
            continue
        ratio = worker.num_demanded_blocks / worker.num_blocks if worker.num_blocks else 0.0
        key = (ratio, worker.num_sequences, worker.worker_id)
        best = key if best is None or key < best else best
    if best is None:
        return None
    return Placed(best[2], f"least loaded: {best[0]:.0%} of its KV memory asked for, {best[1]} sequences")


def _can_take(worker: WorkerLoad, num_tokens: int) -> bool:
    if not worker.ready or (worker.max_request_tokens and num_tokens > worker.max_request_tokens):
        return False
    return not worker.max_sequences or worker.num_sequences < worker.max_sequences


PLACEMENTS: dict[str, Placement] = {"least-loaded": place_least_loaded}
"""By the name that a system gives (`shared.systems`)."""
