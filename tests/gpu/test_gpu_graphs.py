"""Recorded steps of decodes on a CUDA device: the same numbers as computed ones, through drops and restores too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.executor.elastic_model import load_elastic_model
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.step import TorchForward
from services.worker.executor.step_graphs import StepGraphs
from shared.layers import LayerRange
from tests.support.checkpoints import stored_checkpoint
from tests.support.gpu import LIMITS, NEEDS_FLASHINFER, WIDE, WITH_LIBRARIES
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner, runner_settings, soil

pytestmark = [*WITH_LIBRARIES, NEEDS_FLASHINFER]


def random_prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, WIDE.vocab_size, int(random.integers(1, 90))).tolist() for _ in range(count)]


def graphs_of(runner: ModelRunner) -> StepGraphs | None:
    forward = runner._open()
    assert isinstance(forward, TorchForward)
    assert forward._record is None or isinstance(forward._record, StepGraphs)
    return forward._record


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 33, 40])
def test_logits_of_recorded_steps_are_those_of_computed_ones(num_rows: int) -> None:
    """The KV is full of NaN where nothing was written: a copy of a row that reads more than that row's shows."""
    runners = [open_runner(WIDE, device="cuda", graphs=graphs, **LIMITS) for graphs in (True, False)]
    assert [graphs_of(runner) is not None for runner in runners] == [True, False]
    drivers = [Driver(runner) for runner in runners]
    following = np.random.default_rng(1).integers(3, WIDE.vocab_size, (20, num_rows)).tolist()
    for driver in drivers:
        soil(driver.runner)
        own = [driver.add(prompt) for prompt in random_prompts(num_rows)]
        for sequence, token in zip(own, following[0], strict=True):
            driver.step_logits([(sequence, len(sequence.tokens))], [token])
        for tokens in following[1:]:
            driver.step_logits([(sequence, 1) for sequence in own], tokens)
    for recorded, computed in zip(*(driver.sequences for driver in drivers), strict=True):
        for ours, theirs in zip(recorded.logits, computed.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-2 * float(theirs.abs().amax()), rtol=0)


def test_rows_with_blocks_from_the_right_are_computed_among_recorded_steps() -> None:
    """A tenth of the blocks of ten rows; steps of one row without such are recorded ones. The logits stay close."""
    drivers = []
    for share in (0.0, 0.1):
        runner = open_runner(WIDE, device="cuda", **LIMITS)
        soil(runner)
        driver = Driver(runner, num_blocks=512, from_right=share)
        own = [driver.add(prompt) for prompt in random_prompts(10)]
        for sequence in own:
            driver.step_logits([(sequence, len(sequence.tokens))], [7])
        for token in range(20, 40):
            driver.step_logits([(sequence, 1) for sequence in own], [token] * 10)
            driver.step_logits([(own[token % 10], 1)], [token])
        drivers.append(driver)
    for ordinary, other in zip(*(driver.sequences for driver in drivers), strict=True):
        for expected, found in zip(ordinary.logits, other.logits, strict=True):
            torch.testing.assert_close(found, expected, atol=5e-2 * float(expected.abs().amax()), rtol=0)


def test_graphs_stay_within_the_budget() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    driver = Driver(open_runner(WIDE, device="cuda", **LIMITS))
    assert graphs_of(driver.runner) is not None
    for prompt in random_prompts(40):
        driver.add(prompt)
    driver.run(30, chunk=90, max_tokens=90)
    assert torch.cuda.max_memory_reserved() - before <= 768 * MIB


def test_layers_that_were_dropped_and_came_back_are_computed_by_the_same_graphs() -> None:
    """The addresses that graphs hold have other pages behind them then."""
    pytest.importorskip("cuda.bindings")
    settings = runner_settings(stored_checkpoint(WIDE)[0], device="cuda", page_bytes=2 * MIB, **LIMITS)
    model = load_elastic_model(settings, lambda _done, _what: None)
    texts, graphs = [], []
    for _ in range(2):
        driver = Driver(model.open(), num_blocks=model.info.capacity.num_blocks)
        graphs.append(graphs_of(driver.runner))
        for prompt in random_prompts(5):
            driver.add(prompt)
        driver.run(12, chunk=90, max_tokens=90)
        texts.append([sequence.output for sequence in driver.sequences])
        model.keep(LayerRange(0, 1))
        assert graphs_of(model.open()) is None
        model.restore()
    assert graphs[0] is graphs[1] is not None
    assert texts[0] == texts[1]
    model.close()
