"""What a worker's own steps say of their cost: kinds apart, noise and outliers, too little, and always the same."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.cost.fitting import FIRST_STEPS, CostFitting
from services.worker.cost.steps import MAX_KINDS, PER_KIND, MeasuredStep, StepSample, StepShape, shape_of
from shared.cost import CostModel, load_profile

COST = CostModel(g0_s=4e-4, b0_s=2.5e-5, g1_s=0, b1_s=0, d_s=3e-7, a_s=8e-8)
TRIED = [
    StepShape(1, 1, 0),
    StepShape(1, 1024, 0),
    StepShape(16, 16, 0),
    StepShape(16, 16_384, 0),
    StepShape(256, 0, 32_896),
    StepShape(64, 0, 2080),
    StepShape(256, 0, 229_504),
]


def taken(shape: StepShape, cost: CostModel = COST, factor: float = 1.0) -> MeasuredStep:
    return MeasuredStep(shape, factor * cost.step_s(*shape))


def sample_of(steps: list[MeasuredStep]) -> StepSample:
    sample = StepSample()
    for step in steps:
        sample.add(step)
    return sample


def fitted(steps: list[MeasuredStep]) -> CostModel:
    found = sample_of(steps).fit()
    assert found is not None
    return found


def decodes(count: int, random: np.random.Generator) -> list[MeasuredStep]:
    rows = random.integers(1, 40, count).tolist()
    return [taken(StepShape(n, n * int(random.integers(20, 900)), 0)) for n in rows]


def test_a_shape_counts_tokens_kv_of_decodes_and_pairs_of_chunks() -> None:
    """Two decodes behind 9 and 4 tokens read 10 and 5; 3 tokens behind 7 are 3 · 7 + 6 pairs, 2 behind 0 are 3."""
    start, num_tokens = np.array([9, 4, 7, 0], dtype=np.int32), np.array([1, 1, 3, 2], dtype=np.int32)
    assert shape_of(start, num_tokens) == (7, 15, 30)
    assert shape_of(start[:2], num_tokens[:2]) == (2, 15, 0)


def test_a_few_steps_say_what_they_cost_and_the_same_ones_the_same() -> None:
    found = fitted([taken(shape) for shape in TRIED])
    assert astuple(found) == pytest.approx(astuple(COST), rel=1e-6)
    assert found == fitted([taken(shape) for shape in TRIED]), "to the last bit"


def test_thousands_of_decodes_do_not_push_out_what_prefill_costs() -> None:
    random = np.random.default_rng(1)
    found = fitted([*map(taken, TRIED), *decodes(3000, random)])
    assert (found.token_s, found.d_s, found.a_s) == pytest.approx((COST.token_s, COST.d_s, COST.a_s), rel=1e-4)


def test_steps_follow_a_device_that_has_become_slower() -> None:
    """Everything takes twice as long: after a few of each kind nothing is left of before."""
    steps = [taken(shape) for shape in TRIED] + [taken(shape, factor=2.0) for shape in TRIED] * PER_KIND
    found = fitted(steps)
    assert found.token_s == pytest.approx(2 * COST.token_s, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_steps_that_were_held_up_move_it_little(seed: int) -> None:
    """5 % of noise, and every tenth step takes twenty times as long."""
    random = np.random.default_rng(seed)
    steps = []
    for _ in range(600):
        rows, chunk = int(random.integers(0, 30)), int(random.integers(2, 512)) * int(random.random() < 0.4)
        prefix = int(random.integers(0, 512))
        pairs = prefix * chunk + chunk * (chunk + 1) // 2
        if rows + chunk:
            held_up = 20.0 if random.random() < 0.1 else 1.0
            shape = StepShape(rows + chunk, rows * int(random.integers(10, 900)), pairs)
            steps.append(taken(shape, factor=held_up * float(np.exp(0.05 * random.standard_normal()))))
    found = fitted(steps)
    assert min(astuple(found)) >= 0
    assert found.token_s == pytest.approx(COST.token_s, rel=0.25)
    assert found.a_s == pytest.approx(COST.a_s, rel=0.25)


def test_two_branches_are_found_where_there_are_steps_enough() -> None:
    cost = load_profile("qwen2.5-14b-tp1-h200").cost
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    steps = [taken(StepShape(n, n * kv, 0), cost) for n in sizes for kv in (50, 400, 3000)]
    steps += [taken(StepShape(n, 0, n * p + n * (n + 1) // 2), cost) for n in (100, 300, 700, 1500) for p in (0, 900)]
    found = fitted(steps)
    assert found.token_s == pytest.approx(cost.token_s, rel=0.05)


def test_too_little_is_unknown() -> None:
    random = np.random.default_rng(2)
    assert StepSample().fit() is None
    assert sample_of([taken(shape) for shape in TRIED[-5:]]).fit() is None, "five kinds"
    assert sample_of(decodes(500, random)).fit() is None, "nothing says what prefill costs"
    alike = [MeasuredStep(shape, 0.01) for shape in TRIED]
    assert sample_of(alike).fit() is None, "a token costs nothing"


def test_a_sample_is_bounded() -> None:
    random = np.random.default_rng(3)
    shapes = [StepShape(*(int(2 ** random.uniform(0, 20)) for _ in range(3))) for _ in range(5000)]
    sample = sample_of([taken(shape) for shape in shapes])
    kept = sample.steps
    assert len(kept) <= MAX_KINDS * PER_KIND
    assert kept[-1].shape == shapes[-1]


def step(num_tokens: int, start: int, duration_s: float) -> tuple[Batch, BatchOutput]:
    one = np.zeros(1, dtype=np.int32)
    batch = Batch(0, one, one + num_tokens, one + start, np.zeros(num_tokens, dtype=np.int32), one == 0)
    return batch, BatchOutput(0, one, duration_s)


async def test_it_is_time_to_fit_after_some_steps_then_after_twice_as_many() -> None:
    fitting = CostFitting([taken(shape) for shape in TRIED])
    before = fitting.estimate.now
    assert before is not None
    slower = step(64, 0, 5 * COST.step_s(64, 0, 2080))
    assert not any(fitting.note(*slower) for _ in range(FIRST_STEPS - 1))
    assert fitting.note(*slower)
    assert not fitting.note(*slower), "one fit at a time"
    await fitting.fit()
    after = fitting.estimate.now
    assert after is not None
    assert after.step_s(64, 0, 2080) > before.step_s(64, 0, 2080)
    assert not any(fitting.note(*slower) for _ in range(2 * FIRST_STEPS - 1))
    assert fitting.note(*slower)


async def test_what_was_known_stays_where_steps_say_too_little() -> None:
    fitting = CostFitting([])
    assert fitting.estimate.now is None
    fitting.estimate.now = COST
    for _ in range(FIRST_STEPS):
        fitting.note(*step(1, 50, 0.001))
        fitting.note(*step(64, 0, 0.0))
    await fitting.fit()
    assert fitting.estimate.now is COST
