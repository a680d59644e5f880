"""Small workloads for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.api_keys import Tier
from sim.workload.workload import Workload


def plain_workload(
    arrival_s: Sequence[float] | NDArray[np.floating],
    num_prompt: int | Sequence[int] | NDArray[np.integer] = 5,
    num_output: int | Sequence[int] | NDArray[np.integer] = 9,
    *,
    num_thinking: int | Sequence[int] | NDArray[np.integer] = 0,
    has_reader: bool = True,
    ttft_s: float = 1.0,
    speed: float = 4.8,
    seed: int = 0,
    name: str = "plain",
) -> Workload:
    """Return requests at these instants, read at this speed after this time, or by nobody."""
    size = len(arrival_s)
    return Workload(
        name=name,
        arrival_s=np.array(arrival_s, dtype=np.float64),
        num_prompt=np.broadcast_to(np.asarray(num_prompt, dtype=np.int32), size).copy(),
        num_output=np.broadcast_to(np.asarray(num_output, dtype=np.int32), size).copy(),
        num_thinking=np.broadcast_to(np.asarray(num_thinking, dtype=np.int32), size).copy(),
        qoe_ttft_s=np.full(size, ttft_s if has_reader else np.nan),
        qoe_speed=np.full(size, speed if has_reader else np.nan),
        tier=np.full(size, Tier.DEFAULT, dtype=np.uint8),
        seed=seed,
    )
