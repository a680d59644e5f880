"""Triton's kernels on a CUDA device: what torch's operators compute, and nothing is compiled once a worker is ready."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.memory.cuda import CudaMemory
from services.worker.sampling.draw import RowSampling, draw
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner, soil

pytest.importorskip("triton", reason="triton is not installed")

from services.worker.fused import choice_kernels, layer_kernels
from services.worker.fused.drawing import choose
from services.worker.fused.library import open_fused
from services.worker.models.spec import read_spec
from tests.support.gpu import WIDE, WITH_LIBRARIES
from tests.support.late_blocks import stored_behind_nothing

pytestmark = WITH_LIBRARIES

PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3000, "num_layers": 1}
SHAPES = {
    "llama": CheckpointShape(**LARGE, num_heads=8, num_kv_heads=2, head_dim=128),
    "qwen3": CheckpointShape(family="qwen3", **LARGE, num_heads=8, num_kv_heads=2, head_dim=128),
    "phi3": CheckpointShape(
        family="phi3", **LARGE, num_heads=8, num_kv_heads=8, head_dim=96, extra={"rope_parameters": PARTIAL}
    ),
    "opt": CheckpointShape(family="opt", **LARGE, num_heads=16),
}
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_trial_accepts_them(name: str, dtype: torch.dtype) -> None:
    spec = replace(read_spec(stored_checkpoint(SHAPES[name])[0]), vocab_size=32_000)
    assert open_fused(spec, dtype, torch.device(DEVICE, 0))[1] is None


def test_keys_go_to_blocks_before_which_there_is_no_memory() -> None:
    pytest.importorskip("cuda.bindings")
    ours, theirs = stored_behind_nothing(CudaMemory(2 * MIB, 2, torch.device(DEVICE, 0)), torch.device(DEVICE, 0))
    torch.testing.assert_close(ours, theirs)


def test_tokens_are_drawn_as_the_cpu_draws_them() -> None:
    """Rounding may move a point across a border of the CDF: one draw in a thousand."""
    rng, count, vocab_size = np.random.default_rng(0), 256, 128_256
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    sampling = RowSampling(
        temperature=rng.choice([0.0, 0.3, 1.0], count),
        top_p=rng.choice([1.0, 0.95, 0.5], count),
        top_k=rng.choice([0, 40, 5000], count),
        min_p=rng.choice([0.0, 0.02], count),
        seed=np.arange(count),
    )
    points = rng.random(count)
    expected = logits.argmax(dim=-1).numpy().copy()
    drawn = np.flatnonzero(sampling.temperature)
    expected[drawn] = draw(logits[drawn], sampling.select(drawn), points[drawn])
    found = choose(logits.to(DEVICE), sampling, points).cpu().numpy()
    assert np.count_nonzero(found != expected) <= 2


def num_compiled() -> int:
    kernels = (layer_kernels.norm_rows, layer_kernels.rotate_heads, layer_kernels.gate_rows)
    others = (choice_kernels.finite_rows, choice_kernels.largest_rows, choice_kernels.draw_rows)
    return sum(len(of_device[0]) for kernel in (*kernels, *others) for of_device in kernel.device_caches.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_compiled_once_a_worker_is_ready(dtype: str) -> None:
    """Whatever the batches: to compile takes half a second, in which everybody's text stands still."""
    limits = {"memory_bytes": 512 * MIB, "max_batch_rows": 16, "max_rows": 16}
    driver = Driver(open_runner(WIDE, device=DEVICE, dtype=dtype, **limits))
    assert driver.runner.info.kernels.endswith("fused")
    before, rng = num_compiled(), random.Random(0)
    for row in range(11):
        prompt = [rng.randrange(3, WIDE.vocab_size) for _ in range(rng.randrange(1, 60))]
        temperature = row % 3 / 2
        driver.add(prompt, SamplingParams(max_tokens=99, temperature=temperature, top_p=1 - row % 2 / 5, seed=row))
    driver.run(30, chunk=13, max_tokens=96)
    assert num_compiled() == before > 0


def test_logits_are_those_of_torchs_operators() -> None:
    drivers = []
    for fused in (True, False):
        runner = open_runner(WIDE, device=DEVICE, dtype="bfloat16", fused=fused, memory_bytes=512 * MIB)
        assert runner.info.kernels.endswith("fused") == fused
        driver = Driver(runner)
        soil(runner)
        sequence = driver.add(np.random.default_rng(2).integers(3, WIDE.vocab_size, 250).tolist())
        for count in (90, 96, 1, 40, 22, 1):
            driver.step_logits([(sequence, count)], [None])
        drivers.append(driver)
    ours, theirs = (driver.sequences[0].logits[-1] for driver in drivers)
    torch.testing.assert_close(ours, theirs, atol=5e-2 * float(theirs.abs().amax()), rtol=0)
