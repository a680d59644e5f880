"""Models computed by Triton's kernels, interpreted: they say what the reference says, in all families.

Nothing of it needs a GPU, and nothing is timed: what is seen is that the right numbers go to the right places.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.executor import opening
from services.worker.executor import runner as runner_module
from services.worker.executor.kernels import Kernels
from services.worker.executor.model_runner import ModelRunner
from services.worker.fused import launching
from services.worker.fused.library import FusedKernels
from services.worker.memory import host_link
from shared.layers import LayerRange
from shared.types import SamplingParams
from tests.support import fake_flashinfer
from tests.support.checkpoints import CheckpointShape, greedy_text, stored_checkpoint
from tests.support.interpreted import interpret
from tests.support.live_groups import stated_peak
from tests.support.replay import record_with
from tests.support.runner_driver import Driver
from tests.support.runners import load, soil
from tests.support.seeds import first_of

pytestmark = [pytest.mark.kernels, pytest.mark.slow]

PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.8}
SHAPES = {
    "llama": CheckpointShape(seed=7),
    "llama, biases": CheckpointShape(extra={"attention_bias": True, "mlp_bias": True}, seed=3),
    "qwen2, tied": CheckpointShape(family="qwen2", seed=2, tied=True),
    "qwen3": CheckpointShape(family="qwen3", num_kv_heads=1, head_dim=24, seed=12),
    "phi3": CheckpointShape(family="phi3", head_dim=20, extra={"rope_parameters": PARTIAL}, seed=1),
    "opt": CheckpointShape(family="opt", tied=True),
    "opt, norms behind": CheckpointShape(
        family="opt", tied=True, extra={"do_layer_norm_before": False, "word_embed_proj_dim": 40}
    ),
}
WIDE = CheckpointShape(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, weight_std=0.05)
"""With heads that FlashInfer computes."""


@pytest.fixture(autouse=True)
def num_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Every runner that opens is on fused kernels. How often each was started, by name."""
    interpret(monkeypatch)
    monkeypatch.setattr(opening, "peak_bytes", stated_peak)
    monkeypatch.setattr(runner_module, "choose_kernels", lambda *_, **__: Kernels("torch, fused", fused=FusedKernels()))
    started: dict[str, int] = {}
    launch = launching.launch

    def count(kernel: Any, *arguments: Any, **constants: Any) -> None:
        started[kernel.fn.__name__] = started.get(kernel.fn.__name__, 0) + 1
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(launching, "launch", count)
    yield started
    fake_flashinfer._WRAPPERS.clear()


def open_runner(shape: CheckpointShape, **changes: Any) -> ModelRunner:
    return load(stored_checkpoint(shape)[0], **{"max_batch_rows": 4, "max_batch_tokens": 8, **changes})


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 384) for _ in range(draw.randrange(3, 14))] for _ in range(count)]


@pytest.mark.parametrize("name", first_of([*SHAPES], in_ci=4))
def test_greedy_texts_equal_the_references(name: str, num_started: dict[str, int]) -> None:
    """The prompts come in chunks beside decodes, blocks lie anywhere, and nothing that was not written is read."""
    shape = SHAPES[name]
    runner = open_runner(shape)
    soil(runner)
    driver = Driver(runner, seed=len(name))
    for prompt in prompts(2):
        driver.add(prompt)
    num_started.clear()
    driver.run(7, chunk=5, max_tokens=8)
    reference = stored_checkpoint(shape)[1]
    for sequence in driver.sequences:
        assert sequence.output == greedy_text(reference, sequence.tokens[: sequence.num_prompt], 7)
    gates = set() if shape.family == "opt" else {"gate_rows"}
    assert set(num_started) == {"norm_rows", "rotate_heads", "finite_rows", "largest_rows", *gates}


def test_a_step_of_a_layer_starts_four_kernels_beside_its_products_and_attention(num_started: dict[str, int]) -> None:
    driver = Driver(open_runner(SHAPES["llama"]))
    sequence = driver.add([5, 6, 7])
    driver.step([(sequence, 3)])
    num_started.clear()
    driver.step([(sequence, 1)])
    assert num_started == {
        "norm_rows": 2 * 2 + 1,
        "rotate_heads": 2,
        "gate_rows": 2,
        "finite_rows": 1,
        "largest_rows": 1,
    }


def said_by(runner: ModelRunner, sampling: list[SamplingParams]) -> list[list[int]]:
    driver = Driver(runner)
    for prompt, each in zip(prompts(len(sampling), seed=4), sampling, strict=True):
        driver.add(prompt, each)
    driver.run(10, chunk=8, max_tokens=8)
    return [sequence.output for sequence in driver.sequences]


SAMPLING = [
    SamplingParams(max_tokens=10, temperature=0.0),
    SamplingParams(max_tokens=10, temperature=0.9, top_p=0.8, seed=1),
    SamplingParams(max_tokens=10, temperature=0.9, top_k=9, min_p=0.01, seed=2, logprobs=2),
    SamplingParams(max_tokens=10, temperature=1.0, seed=3, repetition_penalty=1.5, logit_bias=((7, 4.0),)),
]


def test_texts_are_drawn_as_by_torchs_operators(num_started: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = said_by(open_runner(SHAPES["llama"]), SAMPLING)
    assert num_started["draw_rows"] >= 10
    monkeypatch.setattr(runner_module, "choose_kernels", lambda *_, **__: Kernels("torch"))
    assert ours == said_by(open_runner(SHAPES["llama"]), SAMPLING)
    assert len({tuple(text) for text in ours}) == 4


def test_rows_whose_filters_reach_far_do_not_need_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators they may, and their steps end where they are launched."""
    monkeypatch.setattr(host_link, "BESIDE", ("cpu",))
    is_done = []
    for kernels in (Kernels("torch, fused", fused=FusedKernels()), Kernels("torch")):
        monkeypatch.setattr(runner_module, "choose_kernels", lambda *_, kernels=kernels, **__: kernels)
        shape = CheckpointShape(vocab_size=1500)
        driver = Driver(open_runner(shape))
        for seed in range(2):
            driver.add([5, 6], SamplingParams(max_tokens=9, temperature=1.0, top_p=0.99, seed=seed))
        driver.step([(sequence, 2) for sequence in driver.sequences])
        launched = driver.runner.launch(driver.batch([(sequence, 1) for sequence in driver.sequences]))
        is_done.append(launched.is_done)
        assert (launched.end().tokens >= 0).all()
    assert is_done == [False, True]


def test_recorded_steps_are_those_of_computed_ones(
    num_started: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python says while a step is recorded, it says once: a kernel that is given a number of that step shows."""
    chosen = Kernels("flashinfer, fused", flashinfer=fake_flashinfer, fused=FusedKernels())
    recorder = record_with(monkeypatch, chosen)
    drivers = [Driver(open_runner(WIDE, dtype="bfloat16", graphs=graphs, max_batch_rows=2)) for graphs in (True, False)]
    following = np.random.default_rng(1).integers(3, 384, (5, 2)).tolist()
    for driver in drivers:
        soil(driver.runner)
        own = [driver.add(prompt[:8]) for prompt in prompts(2)]
        for sequence, token in zip(own, following[0], strict=True):
            driver.step_logits([(sequence, len(sequence.tokens))], [token])
        for tokens in following[1:]:
            driver.step_logits([(sequence, 1) for sequence in own], tokens)
    for recorded, computed in zip(*(driver.sequences for driver in drivers), strict=True):
        assert len(recorded.logits) == 5
        for ours, theirs in zip(recorded.logits, computed.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
    assert recorder.num_starts == 4
    assert num_started["rotate_heads"]


def test_stages_compute_what_the_whole_model_does() -> None:
    """A stage may overwrite the hidden states that it is given."""
    shape = SHAPES["llama"]
    whole = Driver(open_runner(shape))
    stages = [Driver(open_runner(shape, layers=LayerRange(*span))) for span in ((0, 1), (1, 2))]
    tokens = [5, 6, 7, 8, 9]
    logits = []
    for driver in (whole, *stages):
        driver.add(tokens)
    logits.append(whole.runner.logits(whole.batch([(whole.sequences[0], 5)])))
    hidden = stages[0].runner.advance(stages[0].batch([(stages[0].sequences[0], 5)]))
    logits.append(stages[1].runner.logits(stages[1].batch([(stages[1].sequences[0], 5)]), hidden.clone()))
    torch.testing.assert_close(*logits)
