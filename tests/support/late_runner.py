"""A runner whose arithmetic a late device does: what it is given is read, and what it gives is written, later."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import KvCapacity
from shared.layers import LayerRange
from tests.support.late_stages import LateStream

MAX_TOKENS, HIDDEN_SIZE = 12, 5


class LateRunner:
    """Adds its layers' numbers to hidden states, which are the tokens at first; samples a row's sum.

    Attributes:
        skipped: steps of which only what they say of rows was taken in.
        num_refused: so many of the next steps fail when they are launched.
    """

    def __init__(self, layers: LayerRange, num_layers: int, stream: LateStream, dtype: torch.dtype) -> None:
        self.info = SimpleNamespace(
            layers=layers,
            is_last=layers.end == num_layers,
            hidden_size=HIDDEN_SIZE,
            max_batch_tokens=MAX_TOKENS,
        )
        self.capacity = KvCapacity(8, 4)
        self.cache = SimpleNamespace(keys=[torch.empty(0, dtype=dtype)])
        self.skipped: list[int] = []
        self.num_refused = 0
        self._stream = stream

    def advance(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        if self.num_refused:
            self.num_refused -= 1
            raise RuntimeError("the device has no memory left")
        shape = (batch.tokens.size, HIDDEN_SIZE)
        output = torch.zeros(shape, dtype=self.cache.keys[0].dtype)

        def compute() -> None:
            given = torch.from_numpy(batch.tokens).unsqueeze(1).expand(shape) if hidden is None else hidden
            output.copy_(given + sum(self.info.layers))

        self._stream.put(compute)
        return output

    def launch(self, batch: Batch, hidden: torch.Tensor | None) -> Any:
        output = self.advance(batch, hidden)
        return _LateSums(batch, output, self._stream.mark())

    def skip(self, batch: Batch) -> None:
        self.skipped.append(batch.step_id)

    def close(self) -> None:
        pass


@dataclass
class _LateSums:
    batch: Batch
    hidden: torch.Tensor
    reached: Any
    is_done: bool = False

    def end(self) -> BatchOutput:
        self.reached.synchronize()
        sums = self.hidden.float().sum(dim=1).numpy().astype(np.int32)
        return BatchOutput(self.batch.step_id, np.add.reduceat(sums, _firsts(self.batch)), 0.0)


def sums_of(batch: Batch, num_layers: int) -> list[int]:
    """Return what is sampled in a step, computed here."""
    sums = HIDDEN_SIZE * (batch.tokens + sum(range(num_layers)))
    return [int(each) for each in np.add.reduceat(sums, _firsts(batch))]


def _firsts(batch: Batch) -> Any:
    return np.cumsum(batch.num_tokens) - batch.num_tokens
