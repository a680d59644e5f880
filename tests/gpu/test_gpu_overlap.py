"""Steps on a CUDA device that are launched before those before them have ended."""

from __future__ import annotations

import numpy as np
import pytest

from shared.types import SamplingParams
from tests.support.gpu import LIMITS, NEEDS_FLASHINFER, WIDE, WITH_LIBRARIES
from tests.support.overlap import KINDS, answers, driven_texts, requests
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

pytestmark = WITH_LIBRARIES


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[:3], KINDS])
async def test_answers_are_those_of_steps_one_after_the_other(kinds: tuple[str, ...]) -> None:
    """By torch's attention in deterministic mode: whatever decodes together, the bits are the same."""
    news = requests(kinds, 9 // len(kinds) + 1)
    half = len(news) // 2
    calm, _ = await answers([[new] for new in news], overlap=False, device="cuda", kernels="torch")
    said, num_ahead = await answers([news[:half], news[half:]], overlap=True, device="cuda", kernels="torch")
    assert said == calm
    assert num_ahead > 20


@NEEDS_FLASHINFER
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
