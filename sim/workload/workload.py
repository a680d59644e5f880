"""A workload: requests in order of arrival, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival; every column is [num_requests]. An answer ends by its length only."""

    name: str
    """What it is, for reports: `burstgpt_640s x28, conversation lengths`."""
    arrival_s: F64
    """Seconds from the beginning of the run, ascending."""
    num_prompt: I32
    """Prompt tokens, at least 1."""
    num_output: I32
    """Output tokens, at least 1."""
    qoe_ttft_s: F64
    """Time to first token that the reader expects; NaN when no reader follows."""
    qoe_speed: F64
    """Tokens per second at which the reader reads; NaN when no reader follows."""
    tier: U8
    """`shared.api_keys.Tier` of each."""
    seed: int
    """Prompts are drawn from it."""

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def prompt(self, index: int, first_token_id: int, vocab_size: int) -> I32:
        """Return the prompt's token ids, [num_prompt]: random, so that no two prompts share a block of KV."""
        random = np.random.default_rng((self.seed, index))
        return random.integers(first_token_id, vocab_size, int(self.num_prompt[index]), dtype=np.int32)
