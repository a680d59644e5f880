"""The bound of QoE that no queue takes part in: what readers would see if each had an instance for itself. Pure.

    arrival ── prompt, in chunks of max_batch_tokens ──► first token ── one step of one row per token ──► last token

What the cost model says of one instance, and nothing else: no queue, no message, no other row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.cost import CostModel, prefill_pairs
from sim.experiment.records import Records
from sim.experiment.summary import SystemFacts, summarise
from sim.workload.workload import F64, Workload


def alone(
    workloads: Sequence[Workload], cost: CostModel, max_batch_tokens: int, *, warm_up_s: float = 0.0
) -> dict[str, float | None]:
    """Return `qoe_mean` and `qoe_share_ge_0_95` of requests that are alone, means over the workloads; None of nobody.

    Args:
        workloads: one per seed.
        cost: of one instance's steps, the engine's CPU time included.
        max_batch_tokens: of one step.
        warm_up_s: requests that arrived before are left out.
    """
    found = [
        summarise(alone_records(each, cost, max_batch_tokens), SystemFacts(), warm_up_s=warm_up_s)["qoe"]
        for each in workloads
    ]
    return {
        f"qoe_{name}": None if any(each[name] is None for each in found) else float(np.mean([q[name] for q in found]))
        for name in ("mean", "share_ge_0_95")
    }


def alone_records(workload: Workload, cost: CostModel, max_batch_tokens: int) -> Records:
    """Return the records of the requests if each is alone on an instance."""
    prompts, arrivals, counts = workload.num_prompt.tolist(), workload.arrival_s, workload.num_output
    first_s = arrivals + [prefill_s(num_prompt, cost, max_batch_tokens) for num_prompt in prompts]
    tokens = [_tokens_s(*each, cost) for each in zip(first_s.tolist(), prompts, counts.tolist(), strict=True)]
    return Records(
        arrivals,
        workload.num_prompt,
        counts,
        workload.num_thinking,
        workload.qoe_ttft_s,
        workload.qoe_speed,
        workload.tier,
        np.zeros(len(workload)),
        ("",) * len(workload),
        np.concatenate([np.zeros(0), *tokens]),
        np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
    )


def prefill_s(num_prompt: int, cost: CostModel, max_batch_tokens: int) -> float:
    """Return how long a prompt takes alone, seconds: the pairs of all chunks together are those of the whole."""
    num_full, rest = divmod(num_prompt, max_batch_tokens)
    chunks_s = num_full * cost.step_s(max_batch_tokens, 0, 0) + (cost.step_s(rest, 0, 0) if rest else 0.0)
    return chunks_s + cost.a_s * prefill_pairs(0, num_prompt)


def _tokens_s(first_s: float, num_prompt: int, num_output: int, cost: CostModel) -> F64:
    """Return [num_output] instants: a decode reads the KV of the prompt and of all tokens so far, its own too."""
    count = np.arange(num_output)
    kv_tokens = count * num_prompt + count * (count + 1) / 2
    tokens_s: F64 = first_s + count * cost.step_s(1, 0, 0) + cost.d_s * kv_tokens
    return tokens_s
