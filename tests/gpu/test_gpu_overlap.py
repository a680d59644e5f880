"""Steps on a CUDA device that are launched before those before them have ended."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from shared.types import SamplingParams
from tests.support.checkpoints import CheckpointShape
from tests.support.overlap import KINDS, answers, driven_texts, requests
from tests.support.runner_driver import Driver
from tests.support.runners import MIB, open_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(900),  # FlashInfer's kernels are compiled when they are first used
    pytest.mark.filterwarnings("default"),  # its dependencies' warnings are not ours
]

WIDE = CheckpointShape(
    hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, head_dim=64, weight_std=0.05
)
LIMITS = {"dtype": "bfloat16", "kernels": "flashinfer", "memory_bytes": 768 * MIB, "max_batch_rows": 40, "max_rows": 64}


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[:3], KINDS])
async def test_answers_are_those_of_steps_one_after_the_other(kinds: tuple[str, ...]) -> None:
    """By torch's attention in deterministic mode: whatever decodes together, the bits are the same."""
    news = requests(kinds, 9 // len(kinds) + 1)
    half = len(news) // 2
    calm, _ = await answers([[new] for new in news], overlap=False, device="cuda", kernels="torch")
    said, num_ahead = await answers([news[:half], news[half:]], overlap=True, device="cuda", kernels="torch")
    assert said == calm
    assert num_ahead > 20


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_the_same_rows_choose_the_same_tokens_by_flashinfer(seed: int, *, graphs: bool) -> None:
    """Nothing is waited for between the steps, so plans, inputs and samples of several are under way at once."""
    texts = []
    for is_ahead in (False, True):
        random = np.random.default_rng(seed)
        driver = Driver(open_runner(WIDE, device="cuda", graphs=graphs, **LIMITS))
        for row in range(int(random.integers(1, 24))):
            prompt = random.integers(3, WIDE.vocab_size, int(random.integers(1, 80))).tolist()
            driver.add(prompt, SamplingParams(max_tokens=60, temperature=0.8 * (row % 2), seed=row))
        for sequence in driver.sequences:
            driver.step([(sequence, len(sequence.tokens))])
        texts.append(driven_texts(driver, 40, seed, is_ahead=is_ahead))
        driver.runner.close()
    assert texts[0] == texts[1]
    assert len({token for text in texts[0] for token in text}) > 5
