"""Cuts the workload of a replay to what the server takes. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.workload.lengths import fit_context as fit_lengths
from sim.workload.workload import I32, Workload


def fit_context(workload: Workload, max_tokens: int, *, is_exact: bool) -> tuple[Workload, int]:
    """Return the requests cut to a model's context, and how many had to be cut.

    Args:
        workload: as the trace wants it.
        max_tokens: of prompt and answer together; 2 or more.
        is_exact: whether prompts are as long as asked; else a twentieth of the room stays free.
    """
    num_prompt, num_output = fit_lengths(workload.num_prompt, workload.num_output, max_tokens)
    if not is_exact:
        num_prompt = _at_most(num_prompt, (max_tokens - num_output) * 19 // 20)
    is_cut = (num_prompt != workload.num_prompt) | (num_output != workload.num_output)
    return replace(workload, num_prompt=num_prompt, num_output=num_output), int(is_cut.sum())


def _at_most(lengths: I32, most: I32) -> I32:
    return np.minimum(lengths, np.maximum(most, 1)).astype(np.int32)
