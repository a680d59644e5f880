"""Chooses the tokens of all rows by one kernel: greedy ones and drawn ones, whatever their filters."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from services.worker.contract.arrays import F64
from services.worker.fused import choice_kernels, launching
from services.worker.fused.operators import row_constants
from services.worker.memory.host_link import send
from services.worker.sampling.draw import RowSampling

_LOG2_E: Final = math.log2(math.e)


def choose(logits: torch.Tensor, sampling: RowSampling, points: F64) -> torch.Tensor:
    """Return the chosen ids [n] int64, on the device, which may not have computed them yet.

    What each row draws is what `draw.py` draws from the same logits, but for sums that round in another order.

    Args:
        logits: [n, vocab_size] float32, contiguous; unchanged. Minus infinity excludes a token; one in each row is
            finite.
        sampling: of the same rows; those with temperature 0 take their largest logit, the lowest id on a tie.
        points: [n] in [0, 1), where the CDF is searched.
    """
    num_rows, vocab_size = logits.shape
    drawn = sampling.temperature > 0
    parameters = np.empty((5, num_rows))
    parameters[0] = np.where(drawn, _LOG2_E / np.maximum(sampling.temperature, 1e-30), 0.0)
    parameters[1] = np.where(sampling.top_k < vocab_size, sampling.top_k, 0)
    parameters[2] = sampling.top_p
    parameters[3] = sampling.min_p
    parameters[4] = points
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launching.launch(
        choice_kernels.draw_rows,
        (num_rows,),
        logits.contiguous(),
        send(parameters, logits.device),
        ids,
        num_rows,
        **row_constants(vocab_size),
    )
    return ids
