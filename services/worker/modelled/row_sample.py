"""Which rows of a step the shadow KV looks at anew."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowSample:
    """Which rows of a step have their sums taken anew: those out of order, and a share at random, each alike."""

    def __init__(self, ratio: float, random: np.random.Generator) -> None:
        self._ratio = ratio
        self._random = random
        self._left = self._gap() - 1
        """Rows before the next one."""

    def among(self, in_order: NDArray[np.bool_]) -> list[int]:
        """Return their places in a step; [n] which of its rows go on where their running sum ends."""
        size, chosen = in_order.size, []
        while self._left < size:
            chosen.append(self._left)
            self._left += self._gap()
        self._left -= size
        if np.count_nonzero(in_order) == size:
            return chosen
        return sorted({*chosen, *(~in_order).nonzero()[0].tolist()})

    def _gap(self) -> int:
        """Draw how many rows it is from one that is chosen to the next one."""
        return int(self._random.geometric(self._ratio)) if self._ratio else 2**62
