"""The runner on a CUDA device: the same text as the reference's, within the budget."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, RowInit
from services.worker.contract.executor import HostCopy
from services.worker.executor.selftest import prove_deterministic
from services.worker.sampling.logit_rules import LogitRules
from services.worker.sampling.logprobs import LogprobTable
from services.worker.sampling.sampler import SamplingTable, TokenSampler
from shared.errors import StartupError
from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape, difference_from, greedy_text, stored_checkpoint
from tests.support.gpu import NEEDS_FLASHINFER, WIDE, WITH_LIBRARIES
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner

pytestmark = WITH_LIBRARIES

WITH_FLASHINFER = pytest.param("flashinfer", marks=NEEDS_FLASHINFER)

SHAPE = CheckpointShape(seed=7)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, SHAPE.vocab_size) for _ in range(length)] for length in lengths]


def test_greedy_text_on_the_gpu_equals_the_references_on_the_cpu() -> None:
    """The reference's choices are at least 1e-3 apart along these texts (asserted by the CPU's oracle)."""
    driver = Driver(open_runner(SHAPE, device="cuda", memory_bytes=256 * MIB))
    sequences = [driver.add(prompt) for prompt in prompts((1, 9, 47, 150))]
    driver.run(64, chunk=41, max_tokens=96)
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.output == greedy_text(stored_checkpoint(SHAPE)[1], prompt, 64)


def test_kv_comes_back_from_pinned_host_memory_into_other_blocks() -> None:
    runner = open_runner(SHAPE, device="cuda", memory_bytes=256 * MIB, host_memory_bytes=4 * MIB)
    driver = Driver(runner, num_blocks=64)
    (prompt,) = prompts((47,))
    sequence = driver.add(prompt)
    driver.step([(sequence, 47)])
    old, host = np.array(sequence.blocks, dtype=np.int32), np.arange(len(sequence.blocks), dtype=np.int32)
    runner.copy(HostCopy(0, old, host, to_host=True))
    for pool in (*runner.cache.keys, *runner.cache.values):
        pool[old.tolist()] = torch.nan
    driver.preempt(sequence)
    new = 100 + host
    runner.copy(HostCopy(1, new, host, to_host=False))
    driver.give(sequence, new.tolist(), 47)
    for _ in range(15):
        driver.step([(sequence, 1)])
    assert sequence.output == greedy_text(stored_checkpoint(SHAPE)[1], prompt, 16)


@pytest.mark.parametrize("kernels", ["torch", WITH_FLASHINFER])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_logits_on_the_gpu_stay_near_the_references(dtype: str, limit: float, kernels: str) -> None:
    if (dtype, kernels) == ("float32", "flashinfer"):
        with pytest.raises(StartupError, match="does not compute in float32"):
            open_runner(WIDE, device="cuda", dtype=dtype, memory_bytes=512 * MIB, kernels=kernels)
        return
    driver = Driver(open_runner(WIDE, device="cuda", dtype=dtype, memory_bytes=512 * MIB, kernels=kernels))
    assert driver.runner.info.kernels.startswith(kernels)
    (tokens,) = prompts((300,))
    sequence = driver.add(tokens)
    for count in (90, 77, 1, 90, 41, 1):
        driver.step_logits([(sequence, count)], [None])
    with torch.inference_mode():
        expected = stored_checkpoint(WIDE)[1](torch.tensor([tokens])).logits[0, -1]
    assert difference_from(sequence.logits[-1].cpu(), expected) < limit


@pytest.mark.parametrize("kernels", ["torch", WITH_FLASHINFER])
def test_full_batches_stay_within_the_budget(kernels: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    limits = {"memory_bytes": 512 * MIB, "max_batch_tokens": 2048, "max_batch_rows": 64, "max_rows": 64}
    runner = open_runner(WIDE, device="cuda", dtype="bfloat16", kernels=kernels, **limits)
    assert runner.info.kernels.startswith(kernels)
    torch.cuda.reset_peak_memory_stats()
    driver = Driver(runner)
    for prompt in prompts(tuple(range(100, 420, 5))):
        driver.add(prompt)
    driver.run(4, chunk=512, max_tokens=2048)
    assert torch.cuda.max_memory_reserved() - before <= 512 * MIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_proves_itself_on_the_gpu(dtype: str) -> None:
    runner = open_runner(WIDE, device="cuda", dtype=dtype, memory_bytes=512 * MIB, deterministic=True)
    prove_deterministic(runner, 96)


def test_sampling_on_the_gpu_chooses_what_the_cpu_chooses_from_the_same_logits() -> None:
    """Rounding may move a point across a border of the CDF: one draw in a thousand."""
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    table, rows, positions = SamplingTable(64), np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int64)
    rules, asked = LogitRules(64, (1,), 20_000), LogprobTable(64)
    for row in rows.tolist():
        sampling = SamplingParams(
            max_tokens=9,
            temperature=0.3 * (row % 5),
            top_k=(0, 40, 3000)[row % 3],
            top_p=(1.0, 0.9)[row % 2],
            min_p=(0.0, 0.01)[row % 4 // 2],
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            logit_bias=((row, 4.0),),
            min_tokens=5,
            logprobs=4,
            seed=row,
        )
        table.put(row, sampling)
        init = RowInit(row, sampling, 30, np.arange(50, dtype=np.int32) * 7)
        rules.take_in(replace(batch_of_nothing(), admits=(init,)))
        asked.put(init)
    chosen = []
    for device in ("cpu", "cuda"):
        own = logits.to(device, copy=True)
        put_back = rules.apply(own, rows, positions + 31)
        chosen.append(TokenSampler().sample(own, table.take(rows), positions))
        put_back()
        assert torch.equal(own.cpu(), logits)
        said = asked.of_tokens(own, rows, chosen[-1])
        expected = logits.log_softmax(-1)
        assert all(abs(said[row].logprob - float(expected[row, token])) < 1e-4 for row, token in enumerate(chosen[-1]))
    assert np.count_nonzero(chosen[0] != chosen[1]) <= 1


def batch_of_nothing() -> Batch:
    return Batch(0, EMPTY_I32, EMPTY_I32, EMPTY_I32, EMPTY_I32, np.zeros(0, dtype=np.bool_))
