"""Who reads the answers: when they expect the first token, and how fast they read. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from sim.workload.workload import F64, I32

MEAN_SPEED: Final = 4.8
"""Mean of Andes's readers, tokens per second (section 2.2, caption of figure 4)."""
AGE_GROUPS: Final = ((0.280, 236.0), (0.519, 200.0), (0.112, 192.0), (0.056, 185.0), (0.033, 175.0))
"""Share of people and words per minute: 18 to 24, 25 to 44, 45 to 54, 55 to 64, 65 years and older."""
_SECONDS_PER_PROMPT_TOKEN: Final = 1 / 5000
_MIN_TTFT_S: Final = 1.0


def andes_readers(num_prompt: I32, random: np.random.Generator) -> tuple[F64, F64]:
    """Return time to first token (seconds) and speed (tokens per second) that each reader expects, [num_requests].

    The first token is expected after max(prompt / 5000, 1) s; speeds are those of age groups.

    Source: Andes, section 6.1 and figure 2(a); deviations: the text states the mean speed alone, so the groups (as the
    first version of the paper tabulates them) are scaled to it, by 1.07.
    """
    shares, words = (np.array(column) for column in zip(*AGE_GROUPS, strict=True))
    speeds = words * (MEAN_SPEED / float(shares @ words))
    groups = random.choice(shares.size, size=num_prompt.size, p=shares / shares.sum())
    return np.maximum(num_prompt * _SECONDS_PER_PROMPT_TOKEN, _MIN_TTFT_S), speeds[groups]
