"""Steps that are launched before those before them have ended: the texts are the same, whatever the requests ask for.

A device that computes beside the host is stood in for by the CPU: it takes the paths of one, and its numbers reach the
host late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from services.worker.engine.types import OWN_SAMPLE, BatchFailedError, BatchOutput
from services.worker.executor.launched import Launched
from services.worker.memory import host_link
from shared.types import FinishReason, SamplingParams
from tests.support.overlap import KINDS, SHAPE, answers, driven_texts, requests, sampling_of
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, open_runner

pytestmark = pytest.mark.kernels


@pytest.fixture(params=["host", "beside"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What computes: the host itself, or a device beside it, which has no native kernels."""
    if request.param == "beside":
        monkeypatch.setattr(host_link, "BESIDE", ("cpu",))
        end = host_link.Fetching.end

        def late(fetching: host_link.Fetching) -> list[np.ndarray]:
            time.sleep(0.001)
            return end(fetching)

        monkeypatch.setattr(host_link.Fetching, "end", late)
        yield "torch"
    else:
        yield KERNELS


@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[:3], KINDS])
async def test_answers_are_those_of_steps_one_after_the_other(kernels: str, kinds: tuple[str, ...]) -> None:
    """Greedy and drawn rows are chosen on the device; others need the host, which ends their steps at once."""
    news = requests(kinds, 9 // len(kinds) + 1)
    half = len(news) // 2
    calm, none = await answers([[new] for new in news], overlap=False, kernels=kernels)
    said, num_ahead = await answers([news[:half], news[half:]], overlap=True, kernels=kernels)
    assert said == calm
    assert none == 0
    assert num_ahead > 20
    if "stops" in kinds:
        assert FinishReason.STOP in {finish for _, finish, _ in said.values()}
    if "logprobs" in kinds:
        assert all(bool(logprobs) == (name % len(kinds) == 5) for name, (_, _, logprobs) in enumerate(said.values()))


def decoding(kernels: str, num_rows: int) -> Driver:
    """Return a driver of a runner whose rows have one token each to compute, every other one greedily."""
    driver = Driver(open_runner(SHAPE, deterministic=True, kernels=kernels))
    for row in range(num_rows):
        driver.add([3 + row, 5, 7], SamplingParams(max_tokens=9, temperature=0.9 * (row % 2), seed=row))
    driver.step([(sequence, 3) for sequence in driver.sequences])
    return driver


def test_a_step_takes_its_tokens_from_the_one_before_in_any_order_of_rows(kernels: str) -> None:
    is_beside = "cpu" in host_link.BESIDE

    def look(launched: Launched) -> None:
        assert launched.is_done != is_beside

    apart = driven_texts(decoding(kernels, 6), 5, seed=0, is_ahead=False, look=look)
    ahead = driven_texts(decoding(kernels, 6), 5, seed=1, is_ahead=True, look=look)
    assert ahead == apart
    assert len({tuple(text) for text in ahead}) == 6


def test_a_step_that_begins_with_what_a_failed_one_was_to_sample_fails_and_what_it_says_of_rows_counts(
    kernels: str,
) -> None:
    texts = driven_texts(decoding(kernels, 3), 2, seed=0, is_ahead=False)
    driver = decoding(kernels, 3)
    work = [(sequence, 1) for sequence in driver.sequences]
    batch = driver.batch(work)
    unknown = replace(batch, tokens=np.full(3, 384, dtype=np.int32))
    runner = driver.runner
    with pytest.raises(BatchFailedError):
        runner.run(unknown)
    ahead = replace(batch, step_id=9, start=batch.start + 1, tokens=np.full(3, OWN_SAMPLE, dtype=np.int32))
    with pytest.raises(BatchFailedError, match="a step that has failed"):
        runner.launch(ahead).end()
    assert runner.run(batch).tokens.tolist() == [text[0] for text in texts]
    assert runner.launch(replace(ahead, step_id=10)).end().tokens.tolist() == [text[1] for text in texts]


def test_numbers_that_are_none_are_found_when_the_step_ends_and_the_step_behind_reads_no_row_that_is_none(
    kernels: str,
) -> None:
    driver = decoding(kernels, 3)
    for pool in driver.runner.cache.pools():
        pool[driver.sequences[2].blocks[0]] = float("nan")
    batch = driver.batch([(sequence, 1) for sequence in driver.sequences])
    ahead = replace(batch, step_id=9, start=batch.start + 1, tokens=np.full(3, OWN_SAMPLE, dtype=np.int32))
    runner, failed = driver.runner, list[BatchFailedError]()
    if "cpu" in host_link.BESIDE:
        steps: list[Callable[[], BatchOutput]] = [runner.launch(each).end for each in (batch, ahead)]
    else:
        steps = [lambda: runner.run(batch), lambda: runner.run(ahead)]
    for step in steps:
        with pytest.raises(BatchFailedError) as error:
            step()
        failed.append(error.value)
    assert failed[0].rows == (driver.sequences[2].row,)


@pytest.mark.parametrize(
    ("kind", "needs_host"),
    [("greedy", False), ("drawn", False), ("filtered", True), ("bias", True), ("counted", True), ("logprobs", True)],
)
def test_a_step_whose_tokens_the_host_chooses_ends_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, needs_host: bool
) -> None:
    """What it looks at is overwritten by the next step. Filters may look further than at the largest weights."""
    monkeypatch.setattr(host_link, "BESIDE", ("cpu",))
    monkeypatch.setattr("services.worker.executor.draw.CANDIDATES", 16)
    driver = Driver(open_runner(SHAPE, kernels="torch"))
    driver.add([3, 4, 5])
    driver.add([3, 5, 7], SamplingParams(max_tokens=9).model_copy(update=sampling_of(kind, 1)))
    launched = driver.runner.launch(driver.batch([(sequence, 3) for sequence in driver.sequences]))
    assert launched.is_done == needs_host
    assert (launched.end().tokens >= 0).all()
