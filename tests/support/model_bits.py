"""What a model in pages computes and holds, to the bit, and what an undisturbed one does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from services.worker.contract.batch import Batch
from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.model_runner import ModelRunner
from tests.support.live_groups import SHAPES, tokens_of
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner


class Chain:
    """Runners of consecutive layers behind what the driver knows of one."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        self.runners = runners
        self.capacity = min((runner.capacity for runner in runners), key=lambda capacity: capacity.num_blocks)

    def logits(self, batch: Batch) -> torch.Tensor:
        hidden: torch.Tensor | None = None
        for runner in self.runners[:-1]:
            hidden = runner.advance(batch, hidden)
        return self.runners[-1].logits(batch, hidden)


def logits_of(*runners: ModelRunner) -> torch.Tensor:
    """Return the bits of some logits: of two sequences, in chunks, blocks in a shuffled order from all there are."""
    driver = Driver(Chain(runners), seed=3)  # type: ignore[arg-type]
    first, second = driver.add(tokens_of(1, 60)), driver.add(tokens_of(2, 41))
    for counts in ((17, 40), (42, 0), (1, 1)):
        work = [(s, n) for s, n in zip((first, second), counts, strict=True) if n]
        driver.step_logits(work, [None] * len(work))
    return torch.stack(first.logits + second.logits).view(torch.int32)


@cache
def calm_logits(name: str, dtype: str, kernels: str) -> torch.Tensor:
    runner = open_runner(SHAPES[name], deterministic=True, dtype=dtype, kernels=kernels)
    found = logits_of(runner)
    assert torch.isfinite(found.view(torch.float32)).all()
    runner.close()
    return found


def parameters_of(model: ElasticModel) -> list[torch.Tensor]:
    weights = model._opener.weights
    return [weights.outer.storage.clone(), *(layer.storage.clone() for layer in weights.layers)]
