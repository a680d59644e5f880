"""Random numbers by counter: the draw for a token depends on (seed, position) and on nothing else.

So a sequence continued on another worker, in another row of another batch, draws the same. Source: the output function
of SplitMix64 (Steele, Lea, Flood 2014), applied to the seed and then to the seed's result and the position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.contract.arrays import F64, I64

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: I64, positions: I64) -> F64:
    """Return one draw per row, in [0, 1).

    Args:
        seeds: [n] any 64-bit integers.
        positions: [n] position in the sequence of the token that is drawn.
    """
    key = _mix(seeds.view(np.uint64) + _GOLDEN)
    bits = _mix(key + positions.view(np.uint64) * _GOLDEN)
    return np.asarray((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
