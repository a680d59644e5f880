"""Random numbers of one seed, in independent streams."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Streams:
    """One generator per kind of choice, so that, for one seed, other lengths leave the arrivals as they are."""

    seed: int
    arrivals: np.random.Generator = field(init=False)
    spread: np.random.Generator = field(init=False)
    lengths: np.random.Generator = field(init=False)
    readers: np.random.Generator = field(init=False)
    best_effort: np.random.Generator = field(init=False)
    thinking: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        for number, name in enumerate(("arrivals", "spread", "lengths", "readers", "best_effort", "thinking")):
            object.__setattr__(self, name, np.random.default_rng((self.seed, number)))
