"""How many threads compute a step: one where more do not gain much; who names a number gets it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor.step_threads import THREAD_WORK, StepThreads, step_work
from services.worker.models.spec import read_spec
from services.worker.models.weights import num_parameters
from shared.host import count_cores
from tests.support.attention_cases import torch_threads
from tests.support.checkpoints import CheckpointShape
from tests.support.native import compiler
from tests.support.runner_driver import Driver
from tests.support.runners import open_runner

SHIPPED = read_spec(Path(__file__).parents[4] / "demo_model" / "model")


@pytest.mark.parametrize(
    ("work", "cores", "expected"),
    [
        (0, 8, 1),
        (THREAD_WORK * 2 - 1, 8, 1),
        (THREAD_WORK * 2, 8, 2),
        (THREAD_WORK * 5, 8, 5),
        (10**12, 8, 8),
        (10**12, 1, 1),
    ],
)
def test_a_thread_is_taken_for_work_that_it_gains_from(work: int, cores: int, expected: int) -> None:
    assert StepThreads.of(None, cores, ordered=False).of_step(work) == expected


@pytest.mark.parametrize("work", [0, 10**12])
@pytest.mark.parametrize("given", [1, 2, 5])
def test_who_names_a_number_gets_it(given: int, work: int) -> None:
    for ordered in (False, True):
        assert StepThreads.of(given, 3, ordered=ordered).of_step(work) == given


def test_what_depends_on_the_number_of_threads_has_one() -> None:
    assert StepThreads.of(None, 8, ordered=True).of_step(10**12) == 1


def test_a_decode_of_the_model_that_ships_takes_one_thread_and_its_prompts_several() -> None:
    threads = StepThreads.of(None, 2, ordered=False)
    decode, prompt = (step_work(SHIPPED, SHIPPED.num_layers, count, count * 200, 1) for count in (1, 100))
    assert threads.of_step(decode) == 1
    assert threads.of_step(prompt) == 2


def test_the_work_of_a_token_is_a_multiplication_for_each_parameter() -> None:
    """Of the shipped model all but the norms multiply; the head is the embedding."""
    norms = (2 * SHIPPED.num_layers + 1) * SHIPPED.hidden_size
    assert step_work(SHIPPED, SHIPPED.num_layers, 1, 0, 1) == num_parameters(SHIPPED) - norms


def threads_of(monkeypatch: pytest.MonkeyPatch, num_tokens: int, **changes: Any) -> int:
    """Return the threads that the library is given for a step of a sequence of so many tokens."""
    compiler()  # else there is no library
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    seen: list[int] = []
    with torch_threads(torch.get_num_threads()):  # opening sets them
        runner = open_runner(CheckpointShape(hidden_size=256, intermediate_size=640), kernels="native", **changes)
    library: Any = vars(vars(runner)["_forward"])["_library"]
    compute = library.forward

    def forward(model: Any, step: Any) -> Any:
        seen.append(step._obj.num_threads)
        return compute(model, step)

    monkeypatch.setattr(library, "forward", forward)
    driver = Driver(runner)
    driver.step([(driver.add([5] * num_tokens), num_tokens)])
    runner.close()
    return seen[-1]


@pytest.mark.parametrize(
    ("num_tokens", "changes", "expected"),
    [
        (1, {"num_threads": None, "num_cores": 3}, 1),
        (90, {"num_threads": None, "num_cores": 3}, 3),
        (90, {"num_threads": None, "num_cores": 3, "deterministic": True}, 3),
        (1, {"num_threads": 2, "num_cores": 3}, 2),
        (90, {"num_threads": 2, "num_cores": 3}, 2),
    ],
)
def test_a_runners_steps_take_these_threads(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, changes: dict[str, Any], expected: int
) -> None:
    assert threads_of(monkeypatch, num_tokens, **changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3),
        ({"num_cores": 2}, 2),
        ({"num_cores": 64}, 3),
        ({"num_threads": 2}, 2),
        ({"deterministic": True}, 1),
        ({"deterministic": True, "num_threads": 2}, 2),
    ],
)
def test_torchs_operators_take_the_cores_that_a_prompt_gains_from(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    with torch_threads(torch.get_num_threads()):
        open_runner(CheckpointShape(), kernels="torch", **({"num_threads": None} | changes)).close()
        assert torch.get_num_threads() == expected


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (0, 3), (2, 2), (3, 3), (64, 3)])
def test_cores_are_those_that_the_process_may_run_on(
    monkeypatch: pytest.MonkeyPatch, most: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6})
    assert count_cores(most) == expected
