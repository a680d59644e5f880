"""The threads of the kernels: they share work, sleep when they wait, and wait for nobody who has not begun."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from services.worker.native import build as building
from tests.support.attention_cases import torch_threads
from tests.support.checkpoints import CheckpointShape
from tests.support.model_bits import logits_of
from tests.support.native import compiler
from tests.support.runners import open_runner

PROGRAM = Path(__file__).parents[3] / "support" / "team.cpp"


@functools.cache
def facts() -> dict[str, float]:
    """Return what the program says, by name."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "team"
        command = [
            compiler(),
            "-std=c++17",
            "-O2",
            "-pthread",
            f"-I{building.SOURCES}",
            str(PROGRAM),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        ran = subprocess.run([program], check=True, capture_output=True, text=True, timeout=100)
    return {name: float(value) for name, value in (line.rsplit(": ", 1) for line in ran.stdout.splitlines())}


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_every_unit_of_shared_work_is_done_once(num_threads: int) -> None:
    assert facts()[f"each once by {num_threads}"] == 1


def test_the_caller_sleeps_while_a_helper_has_no_core() -> None:
    """It spins for 20 us and two of its turns of 20 us, which is less than a hundredth of the limit."""
    assert facts()["cpu of a wait of 100 ms"] < 0.01


def test_helpers_sleep_while_there_is_no_work() -> None:
    assert facts()["cpu of 400 ms without work"] < 0.01


def test_a_long_turn_of_the_callers_does_not_make_it_spin() -> None:
    """It spins for 200 us at most, where its turn took 100 ms."""
    assert facts()["cpu of a wait behind a long turn"] < 0.01


def test_nobody_waits_for_a_helper_that_has_not_begun() -> None:
    """It was late by 100 ms, and rests for 30 ms: the caller does all of the next work."""
    assert facts()["the caller does all beside a helper that was late"] == 1


def test_a_helper_rests_only_if_it_lost_its_core_and_not_for_long() -> None:
    assert facts()["a helper comes after a long turn"] == 1
    assert facts()["a helper that was late comes again"] == 1


def test_helpers_are_the_callers_for_a_part_alone() -> None:
    assert facts()["threads beside a caller that waits"] == 2
    assert facts()["threads beside a caller that shares"] == 1
    assert facts()["does what is shared within"] == 1


def test_only_helpers_are_woken_for_whom_there_is_work() -> None:
    """By how often they went to sleep while there were 50 parts, between which there was a pause."""
    assert facts()["wakes of helpers that are not wanted"] < 10
    assert facts()["wakes of a helper for large parts"] > 10
    assert facts()["wakes of a helper for small parts"] < 10


def test_want_of_memory_leaves_the_helpers_to_be_had() -> None:
    assert facts()["outlives want of memory"] == 1


def test_a_child_of_the_process_has_helpers_of_its_own() -> None:
    assert facts()["a child has helpers"] == 1


def test_helpers_of_a_gentle_start_do_not_serve() -> None:
    assert facts()["helpers keep the priority of a gentle start"] == 0
    assert facts()["or have it if it brought some more"] == 0


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_with_any_number_of_threads(dtype: str) -> None:
    """Products of 96 and more columns of 256 elements are several turns."""
    shape = CheckpointShape(hidden_size=256, intermediate_size=640)
    bits = []
    for num_threads in (1, 2, 3, 4):
        with torch_threads(torch.get_num_threads()):  # opening sets them
            runner = open_runner(shape, num_threads=num_threads, dtype=dtype, deterministic=True)
            bits.append(logits_of(runner))
        runner.close()
    assert torch.isfinite(bits[0].view(torch.float32)).all()
    assert all(torch.equal(each, bits[0]) for each in bits[1:])
