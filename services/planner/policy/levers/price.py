"""What a drop costs, in seconds of readers' stalls: the currency in which the ladder compares its levers.

For a group that forms from several, with n running and q queued requests in all:

    price = n · remap                                    every running request stands still while pages are mapped anew
          + T · (n + 1) / 2                              their KV arrives one by one: the k-th of n waits T · k / n
          + (n + q) · hold · max(0, 1 - after / before)  steps are slower for as long as the group lasts

    T = max over members of max(bytes out, bytes in) / bandwidth of its link, which carries both ways at once
    bytes out = KV tokens of its old group · (layers it held - layers it keeps) · KV bytes of a token in a layer
    bytes in  = KV tokens of the other old groups · layers it keeps · KV bytes of a token in a layer

    or, where KV is not exchanged but computed again (`DropParams.kv`), one request after the other by the new group:

    T = KV tokens of all old groups · seconds per token of the slowest member, alone · thpt(1) / thpt(new size)
    before    = Σ thpt of the old groups' sizes, after = thpt of the new one's (profile)

What is unknown (a link, the time of a token) costs nothing here. How long a group lasts nobody knows: `hold_s` is a
guess, and the price is as good as it.

Pure. Source: the project's own design; that KV is exchanged and requests stall for it, or would be computed again at a
high price: KunServe v2, section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.planner.policy.plans.columns import F64, I64
from services.planner.policy.plans.drop_facts import DropParams, KvFate, ModelFacts


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of stalls, summed over requests."""

    remap_s: float
    exchange_s: float
    """Until KV is where it is needed: exchanged, or computed again."""
    slower_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.remap_s + self.exchange_s + self.slower_s


@dataclass(frozen=True, slots=True, eq=False)
class Merges:
    """New groups of one size, [g] each, and their members by stage, [g, s] each."""

    running: I64
    queued: I64
    throughput_before: F64
    throughput_after: F64
    own_tokens: I64
    """[g, s] KV tokens of the old group of the member."""
    all_tokens: I64
    """[g] of all old groups together."""
    held: I64
    """[g, s] layers"""
    kept: I64
    """[g, s] layers"""
    link_bytes_per_s: F64
    """[g, s]; 0: unknown"""
    token_s: F64
    """[g] seconds in which the new group computes the KV of one token again; 0: unknown"""


def kv_times_s(model: ModelFacts, kv: KvFate, merges: Merges) -> F64:
    """Return T of each group, seconds: until running requests' KV lies where it is needed; [g]."""
    again_s: F64 = merges.all_tokens * merges.token_s
    if kv is KvFate.RECOMPUTE:
        return again_s
    exchange_s = _exchange_times_s(model, merges)
    if kv is KvFate.EXCHANGE:
        return exchange_s
    times_s: F64 = np.where((merges.link_bytes_per_s > 0).any(axis=1), exchange_s, again_s)
    return times_s


def _exchange_times_s(model: ModelFacts, merges: Merges) -> F64:
    """Return T of each group, seconds: until running requests' KV lies where it is needed; [g]."""
    leaving = merges.own_tokens * (merges.held - merges.kept)
    arriving = (merges.all_tokens[:, np.newaxis] - merges.own_tokens) * merges.kept
    num_bytes = np.maximum(leaving, arriving) * model.kv_bytes_per_token
    is_known = merges.link_bytes_per_s > 0
    times: F64 = np.divide(num_bytes, merges.link_bytes_per_s, out=np.zeros(is_known.shape), where=is_known)
    slowest: F64 = times.max(axis=1)
    return slowest


def prices_s(params: DropParams, merges: Merges, exchange_s: F64) -> F64:
    """Return the three parts of each group's price, seconds: [3, g]; remap, exchange, slower steps."""
    running = merges.running
    loss = np.maximum(1 - merges.throughput_after / merges.throughput_before, 0)
    return np.stack(
        (
            running * params.remap_s,
            np.where(running > 0, exchange_s * (running + 1) / 2, 0),
            (running + merges.queued) * params.hold_s * loss,
        )
    )
