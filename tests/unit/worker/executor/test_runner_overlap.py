"""Steps that are launched before those before them have ended: the texts are the same, whatever the requests ask for.

A device that computes beside the host is stood in for by the CPU: it takes the paths of one, and its numbers reach the
host late.
"""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.contract.batch import OWN_SAMPLE, BatchOutput
from services.worker.contract.executor import BatchFailedError
from services.worker.executor.launched import Launched
from services.worker.executor.model_runner import ModelRunner
from services.worker.memory import host_link
from services.worker.sampling.choosing import Chooser
from shared.types import FinishReason, SamplingParams
from tests.support.overlap import KINDS, SHAPE, answers, driven_texts, requests, sampling_of
from tests.support.runner_driver import Driver
from tests.support.runners import KERNELS, open_runner

pytestmark = pytest.mark.kernels

_GUIDED = {"grammar": b"start: /[a-z]{40,60}/"}


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


@pytest.mark.slow
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


def decoding(kernels: str, num_rows: int, **changes: Any) -> Driver:
    """Return a driver of a runner whose rows have one token each to compute, every other one greedily."""
    driver = Driver(open_runner(SHAPE, deterministic=True, kernels=kernels))
    for row in range(num_rows):
        driver.add([3 + row, 5, 7], SamplingParams(max_tokens=9, temperature=0.9 * (row % 2), seed=row, **changes))
    driver.step([(sequence, 3) for sequence in driver.sequences])
    return driver


@pytest.mark.slow
def test_a_step_takes_its_tokens_from_the_one_before_in_any_order_of_rows(kernels: str) -> None:
    is_beside = "cpu" in host_link.BESIDE

    def look(launched: Launched) -> None:
        assert launched.is_done != is_beside

    apart = driven_texts(decoding(kernels, 6), 5, seed=0, is_ahead=False, look=look)
    ahead = driven_texts(decoding(kernels, 6), 5, seed=1, is_ahead=True, look=look)
    assert ahead == apart
    assert len({tuple(text) for text in ahead}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.8, "frequency_penalty": 1.0}, _GUIDED])
def test_a_step_that_begins_with_what_a_failed_one_was_to_sample_fails_and_what_it_says_of_rows_counts(
    monkeypatch: pytest.MonkeyPatch, kernels: str, changes: dict[str, Any]
) -> None:
    """A token that was never sampled is not counted by penalties either, nor followed by guides."""
    texts = driven_texts(decoding(kernels, 3, **changes), 4, seed=0, is_ahead=False)
    driver = decoding(kernels, 3, **changes)
    work = [(sequence, 1) for sequence in driver.sequences]
    batch = driver.batch(work)
    runner = driver.runner
    with monkeypatch.context() as broken:
        broken.setattr(Chooser, "begin", lambda *_: 1 / 0)
        with pytest.raises(BatchFailedError, match="ZeroDivisionError"):
            runner.run(batch)
    ahead = replace(batch, step_id=9, start=batch.start + 1, tokens=np.full(3, OWN_SAMPLE, dtype=np.int32))
    with pytest.raises(BatchFailedError, match="a step that has failed"):
        runner.launch(ahead).end()
    assert runner.run(batch).tokens.tolist() == [text[0] for text in texts]
    for index in range(1, 4):
        again = replace(ahead, step_id=9 + index, start=batch.start + index)
        assert runner.launch(again).end().tokens.tolist() == [text[index] for text in texts]


@pytest.mark.slow
def test_what_a_row_said_for_another_sequence_is_forgotten(kernels: str) -> None:
    driver = decoding(kernels, 2)
    old = driver.sequences[0]
    driver.drop(old)
    new = driver.add([9, 9, 9, 9], row=old.row)
    batch = driver.batch([(new, 2)])
    driver.runner.run(batch)
    ahead = replace(batch, start=batch.start + 3, num_tokens=batch.num_tokens - 1, admits=(), drops=batch.rows[:0])
    with pytest.raises(BatchFailedError, match="a step that has failed"):
        driver.runner.launch(replace(ahead, tokens=np.full(1, OWN_SAMPLE, dtype=np.int32))).end()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, _GUIDED])
def test_numbers_that_are_none_are_found_when_the_step_ends_and_the_step_behind_reads_no_row_that_is_none(
    kernels: str, changes: dict[str, Any]
) -> None:
    """The others are computed again, and say what they would have said; nobody knew their tokens for a while."""
    texts = driven_texts(decoding(kernels, 2, **changes), 2, seed=0, is_ahead=False)
    driver = decoding(kernels, 3, **changes)
    for pool in driver.runner.cache.pools():
        pool[driver.sequences[2].blocks[0]] = float("nan")
    batch = driver.batch([(sequence, 1) for sequence in driver.sequences])
    ahead = replace(batch, step_id=9, start=batch.start + 1, tokens=np.full(3, OWN_SAMPLE, dtype=np.int32))
    runner, rows = driver.runner, []
    if "cpu" in host_link.BESIDE:
        steps: list[Callable[[], BatchOutput]] = [runner.launch(each).end for each in (batch, ahead)]
    else:
        steps = [lambda: runner.run(batch), lambda: runner.run(ahead)]
    for step in steps:
        with pytest.raises(BatchFailedError) as error:
            step()
        rows.append(error.value.rows)
    assert rows[0] == (driver.sequences[2].row,)
    batch = driver.batch([(sequence, 1) for sequence in driver.sequences[:2]])
    ahead = replace(batch, step_id=11, start=batch.start + 1, tokens=np.full(2, OWN_SAMPLE, dtype=np.int32))
    again = [step.end().tokens.tolist() for step in [runner.launch(each) for each in (batch, ahead)]]
    assert [list(said) for said in zip(*again, strict=True)] == texts


def kept_by(thing: object) -> list[torch.Tensor]:
    """Return the tensors that something refers to, through closures and own objects."""
    seen, found, left = set[int](), list[torch.Tensor](), [thing]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | types.ModuleType | ModelRunner | Chooser):
            continue
        seen.add(id(each))
        found += [each] if isinstance(each, torch.Tensor) else []
        left += [cell.cell_contents for cell in each.__closure__ or ()] if isinstance(each, types.FunctionType) else []
        if not isinstance(each, types.FunctionType):
            left += gc.get_referents(each)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "needs_host"),
    [
        ("greedy", False),
        ("drawn", False),
        ("filtered", True),
        ("bias", True),
        ("counted", True),
        ("logprobs", True),
        ("guided", False),
    ],
)
def test_a_step_whose_tokens_the_host_chooses_ends_where_it_is_launched(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, needs_host: bool
) -> None:
    """What it looks at is overwritten by the next step. Filters may look further than at the largest weights."""
    monkeypatch.setattr(host_link, "BESIDE", ("cpu",))
    monkeypatch.setattr("services.worker.sampling.draw.CANDIDATES", 16)
    driver = Driver(open_runner(SHAPE, kernels="torch"))
    driver.add([3, 4, 5])
    driver.add([3, 5, 7], SamplingParams(max_tokens=9).model_copy(update=sampling_of(kind, 1)))
    launched = driver.runner.launch(driver.batch([(sequence, 3) for sequence in driver.sequences]))
    assert launched.is_done == needs_host
    if not needs_host:
        gc.collect()
        logits = [each for each in kept_by(launched) if each.numel() >= SHAPE.vocab_size]
        assert not logits, "the next step finds less memory than was measured"
    assert (launched.end().tokens >= 0).all()
