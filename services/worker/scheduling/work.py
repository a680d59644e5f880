"""What prefill adds to the cost of a step: by tokens, and by pairs of a token and one at or before it.

A chunk of c tokens behind a prefix of p costs α·(p·c + (c² + c)/2) + β·c. Cutting a prompt neither adds to that nor
saves any, so prompts and whole queues have a work too, and equal work is equal cost beside equal decodes.

Source: KunServe, version 2, section 4.3, equation (1). Deviation: γ is not part of it; a microbatch pays it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from shared.cost import CostModel, KunServeCost, prefill_pairs


@dataclass(frozen=True, slots=True)
class Work:
    """What prefill adds to the cost of a step, by tokens and by query-key pairs, and what decodes read; in seconds."""

    beta_s: float
    """Per token, above 0."""
    alpha_s: float
    """Per pair of a token and one at or before it, at least 0."""
    read_s: float = 0.0
    """Per token of KV that a decode reads, at least 0."""

    def __post_init__(self) -> None:
        if not (self.beta_s > 0 and self.alpha_s >= 0 and self.read_s >= 0):
            raise ValueError(
                f"{self.beta_s} s per token, {self.alpha_s} s per pair and {self.read_s} s per token of KV: "
                "there is nothing to balance by"
            )

    @classmethod
    def of(cls, cost: CostModel, num_tokens: int) -> Work:
        """Return what prefill adds to steps of about this many tokens."""
        first = cost.g0_s + cost.b0_s * num_tokens >= cost.g1_s + cost.b1_s * num_tokens
        return cls(cost.b0_s if first else cost.b1_s, cost.a_s, cost.d_s)

    def chunk_s(self, prefix: int, num_tokens: int) -> float:
        """Return the work of a chunk."""
        return self.alpha_s * prefill_pairs(prefix, num_tokens) + self.beta_s * num_tokens

    def largest(self, prefix: int, limit_s: float) -> int:
        """Return the most tokens whose work is at most `limit_s`: α/2·c² + (β + α·(p + 1/2))·c ≤ limit."""
        if limit_s <= 0:
            return 0
        slope = self.beta_s + self.alpha_s * (prefix + 0.5)
        chunk = int(2 * limit_s / (slope + sqrt(slope * slope + 2 * self.alpha_s * limit_s)))
        if self.chunk_s(prefix, chunk + 1) <= limit_s:
            return chunk + 1
        return chunk - 1 if self.chunk_s(prefix, chunk) > limit_s else chunk


def kunserve_form(kunserve: KunServeCost, d_s: float) -> CostModel:
    """Return the paper's own α, β, γ as a cost model; decodes cost `d_s` per token of their KV."""
    return CostModel(g0_s=kunserve.gamma_s, b0_s=kunserve.beta_s, g1_s=0, b1_s=0, d_s=d_s, a_s=kunserve.alpha_s)
