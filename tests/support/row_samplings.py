"""What rows ask of sampling, all of them the same."""

from __future__ import annotations

import numpy as np

from services.worker.sampling.draw import RowSampling


def row_sampling(
    count: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: float = 0, min_p: float = 0.0
) -> RowSampling:
    """Return the parameters of rows that ask for the same, each with a seed of its own."""
    return RowSampling(
        temperature=np.full(count, temperature),
        top_p=np.full(count, top_p),
        top_k=np.full(count, top_k, dtype=np.int64),
        min_p=np.full(count, min_p),
        seed=np.arange(count, dtype=np.int64),
    )
