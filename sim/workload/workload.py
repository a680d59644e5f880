"""A workload: requests in order of arrival, as columns, and the best effort that is always there beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.api_keys import Tier
from shared.types import LatencyLimits

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
_BEST_EFFORT: Final = 4
"""Stream of its generators (`sim.scenarios.streams`)."""


def best_effort_of(tier: U8) -> Bool:
    """Return [n]: whether nobody waits for requests of these tiers."""
    best_effort: Bool = np.isin(tier, [each for each in Tier if each.is_best_effort])
    return best_effort


@dataclass(frozen=True, slots=True)
class BestEffort:
    """Requests that nobody waits for, in a closed loop: each batch is submitted when the one before it is done.

    Source: BROS, section 7.1. Deviation: several batches at a time, each followed by a next one of its own.
    """

    draw_lengths: Callable[[np.random.Generator], tuple[int, int]]
    """Returns prompt and output tokens of one request, at least 1 each."""
    max_tokens: int
    """Of a prompt and its answer together."""
    batch: int
    """Requests that are submitted at once."""
    num_batches: int
    """Batches at a time."""
    seed: int

    def request(self, index: int, first_token_id: int, vocab_size: int) -> tuple[I32, int]:
        """Return the prompt, [num_prompt] random token ids, and the output tokens of the request of this index.

        They depend on the seed and the index alone: whichever system asks, and whenever, the work is the same.
        """
        random = np.random.default_rng((self.seed, _BEST_EFFORT, index + 1))
        num_prompt, num_output = self.draw_lengths(random)
        return random.integers(first_token_id, vocab_size, num_prompt, dtype=np.int32), num_output


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
    """Output tokens, at least 1, thinking included."""
    num_thinking: I32
    """Of these the first ones, which are thinking; the last of them is the closing tag. 0: it does not think."""
    qoe_ttft_s: F64
    """Time to first token that the reader expects; NaN when no reader follows."""
    qoe_speed: F64
    """Tokens per second at which the reader reads; NaN when no reader follows."""
    tier: U8
    """`Tier`; best effort is what nobody waits for."""
    seed: int
    """Prompts are drawn from it."""
    slo: LatencyLimits | None = None
    """What its requests are to keep, but for best effort; None: nobody has said."""
    best_effort: BestEffort | None = None
    """What is always there beside these requests."""

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together, best effort included; 1 without any request."""
        tokens = (self.num_prompt + self.num_output).max(initial=1)
        return max(int(tokens), 0 if self.best_effort is None else self.best_effort.max_tokens)

    def without_best_effort(self) -> Workload:
        """Return the requests that somebody waits for."""
        names = ("arrival_s", "num_prompt", "num_output", "num_thinking", "qoe_ttft_s", "qoe_speed", "tier")
        columns = {name: getattr(self, name)[~best_effort_of(self.tier)] for name in names}
        return replace(self, best_effort=None, **columns)

    def prompt(self, index: int, first_token_id: int, vocab_size: int) -> I32:
        """Return the prompt's token ids, [num_prompt]: random, so that no two prompts share a block of KV."""
        random = np.random.default_rng((self.seed, index))
        return random.integers(first_token_id, vocab_size, int(self.num_prompt[index]), dtype=np.int32)
