"""What `sluice profile` refuses, writes and says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.profile.command import (
    Measured,
    ProfileSettings,
    describe_fit,
    describe_own,
    describe_phases,
    make_profile,
    out_path,
)
from shared.cost import CostModel, load_profile, profile_toml
from shared.cost_fit import Fit
from shared.messages.steps import StepRecord
from tests.support.statuses import make_report
from tests.unit.cli.conftest import Refusal

FIT = Fit(CostModel(0.0206, 5.1e-5, 0.01464, 9.75e-5, 1.33e-7, 5.44e-9), 0.024, 0.061, 300, 100)
REPORT = make_report("w0", model="Qwen/Qwen2.5 14B", device="cuda:1", system="fcfs")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NATS_URL", raising=False)


def test_a_file_is_named_after_model_and_device() -> None:
    assert out_path(ProfileSettings(), REPORT.model, REPORT.device) == Path("qwen-qwen2.5-14b-tp1-cuda-1.toml")
    assert out_path(ProfileSettings(out="a.toml"), REPORT.model, REPORT.device) == Path("a.toml")


@pytest.mark.parametrize(
    ("out", "line"),
    [
        ("there.toml", "there.toml exists. Name another file with --out, or write over it with --force"),
        ("a.txt", "a profile's file ends in .toml, not as a.txt"),
        ("none/a.toml", "there is no folder none"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_runs(refusal: Refusal, out: str, line: str) -> None:
    Path("there.toml").touch()
    assert refusal("profile", "--out", out).startswith(f"sluice: {line}")


def test_a_file_that_exists_is_written_over_if_told_so() -> None:
    Path("there.toml").touch()
    assert out_path(ProfileSettings(out="there.toml", force=True), "", "") == Path("there.toml")


def test_a_broker_that_does_not_answer_is_one_line(refusal: Refusal) -> None:
    said = refusal("profile", "--nats-url", "nats://127.0.0.1:1")
    assert said.startswith("sluice: no NATS server answers at 127.0.0.1:1 (Connection refused)")


def test_the_profile_says_where_it_comes_from() -> None:
    Path("mine.toml").write_text(profile_toml(make_profile(REPORT, FIT, "mine", ", float32, threads 2")))
    profile = load_profile("mine.toml")
    assert profile.source.startswith("sluice profile, 2")
    assert profile.source.endswith(
        "step log of a live worker (fcfs, float32, threads 2): 300 steps fitted, 100 held out"
    )
    assert (profile.model, profile.gpu) == ("Qwen/Qwen2.5 14B", "cuda:1")
    assert profile.mean_error_ratio == pytest.approx(0.024)
    assert profile.p95_error_ratio == pytest.approx(0.061)


def test_the_error_is_told() -> None:
    text = describe_fit(FIT)
    assert "  g0  20.6\n" in text
    assert text.endswith("error on the 100 of 400 steps held out: mean 2.4%, 95th percentile 6.1%")


def test_the_error_of_the_workers_own_model_is_that_on_the_steps_that_were_measured() -> None:
    """Steps of 1 s: half a second is off by 50 %, and for the one step in five that takes 2 s by 75 %."""
    steps = [StepRecord(step_id=i, num_decodes=1, kv_decode_tokens=9, duration_s=1 + (i % 5 == 0)) for i in range(20)]
    half = CostModel(0.5, 0, 0, 0, 0, 0)
    exact = CostModel(0, 1, 0, 0, 0, 0)
    assert describe_own(Measured(steps, half, exact)) == (
        "error of the worker's own model on these 20 steps: before them median 50.0%, 90th percentile 75.0%; "
        "after them median 0.0%, 90th percentile 50.0%"
    )
    assert "before them unknown; after them median 0.0%" in describe_own(Measured(steps, None, exact))


def test_the_papers_cost_functions_are_told_with_their_errors() -> None:
    prompts = [
        StepRecord(step_id=i, num_decodes=0, kv_decode_tokens=0, chunks=((0, n),), duration_s=2e-3 + 1e-4 * n)
        for i, n in enumerate((4, 8, 16, 32, 64, 128, 256, 512))
    ]
    decodes = [
        StepRecord(step_id=i, num_decodes=n, kv_decode_tokens=9 * n, duration_s=5e-3 + 3e-4 * n)
        for i, n in enumerate((1, 2, 4, 8, 16, 32, 64, 128))
    ]
    said = describe_phases([*prompts, *decodes]).splitlines()
    for line, name, coefficients in ((said[1], "prompts", (0.1, 0, 2)), (said[2], "decodes", (0.3, 0, 5))):
        told = line.split()
        assert (told[0], told[5]) == (name, "0.0%,")
        assert [float(each) for each in told[1:4]] == pytest.approx(coefficients, rel=1e-4, abs=1e-9)
    mixed = prompts[0].model_copy(update={"num_decodes": 3})
    assert describe_phases([mixed] * 20).count("too few steps of them alone") == 2
