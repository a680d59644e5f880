"""The parts of the fidelity measurement that need no live cluster, and the whole of it on a cluster that is none."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fidelity.errors import (
    E2E,
    ITERATION,
    TTFT_P99,
    Comparison,
    compare,
    iteration_parts,
    iteration_s,
    residuals,
    step_errors,
)
from benchmarks.fidelity.loads import COMPARED, FITTED, Lengths, draw_load, sequential
from benchmarks.fidelity.measurement import LiveRun, Measurement, WorkerFacts
from benchmarks.fidelity.simulated import Calibration, calibrate, simulate
from benchmarks.peers_model import FIRST_ID, make_tokenizer, silent_ids
from cli.profile.steps import columns_of
from shared.cost import CostModel
from shared.cost_fit import Fit, predict_s
from shared.messages.steps import StepRecord
from sim.workload.workload import Workload

COST = CostModel(g0_s=0.004, b0_s=1e-3, g1_s=0.012, b1_s=2e-4, d_s=4e-7, a_s=3e-9)
WORKER = WorkerFacts(num_blocks=2000, block_size=16, max_model_len=2048, max_sequences=256, system="fcfs-chunked")
TRUTH = Calibration(Fit(COST, 0.0, 0.0, 1, 0), stretch=1.0, overhead_s=0.0005, message_s=0.0012)


def step(
    num_decodes: int, chunks: tuple[tuple[int, int], ...] = (), *, slower: float = 1.0, gap_s: float = 0.0
) -> StepRecord:
    """A step that takes what COST says, `slower` times, after a gap."""
    kv, num_tokens = 10 * num_decodes, num_decodes + sum(size for _, size in chunks)
    pairs = sum(p * c + (c * c + c) // 2 for p, c in chunks)
    duration_s = slower * COST.step_s(num_tokens, kv, pairs)
    return StepRecord(
        step_id=0,
        num_decodes=num_decodes,
        kv_decode_tokens=kv,
        chunks=chunks,
        duration_s=duration_s,
        period_s=duration_s + gap_s,
    )


STEPS = st.lists(
    st.builds(
        step,
        st.integers(1, 40),
        st.lists(st.tuples(st.integers(0, 100), st.integers(2, 500)), max_size=2).map(tuple),
        slower=st.floats(0.5, 2.0),
        gap_s=st.floats(0.0, 0.01),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@given(live=STEPS, simulated=STEPS, overhead_s=st.floats(0, 0.01))
def test_the_parts_of_the_iteration_error_add_up_to_it(
    live: list[StepRecord], simulated: list[StepRecord], overhead_s: float
) -> None:
    """Whatever was measured, where the simulated steps take what the formula says and the loop nothing besides."""
    cost = replace(COST, era_s=overhead_s)
    made = [_retimed(record, cost) for record in simulated]
    parts = iteration_parts(cost, live, made)
    assert parts.total == pytest.approx(iteration_s(made) / iteration_s(live) - 1, abs=1e-9)


def _retimed(record: StepRecord, cost: CostModel) -> StepRecord:
    pairs = sum(p * c + (c * c + c) // 2 for p, c in record.chunks)
    duration_s = cost.step_s(record.num_tokens, record.kv_decode_tokens, pairs)
    return record.model_copy(update={"duration_s": duration_s, "period_s": duration_s})


def test_each_part_names_its_cause() -> None:
    """Of two equal steps: all slower by a fifth is the formula, a longer gap the loop, another batch the batches."""
    base = [step(4)] * 2
    by = {
        "formula": iteration_parts(COST, [step(4, slower=1.25)] * 2, base),
        "loop": iteration_parts(COST, [step(4, gap_s=0.003)] * 2, base),
        "batches": iteration_parts(COST, base, [step(64)] * 2),
    }
    for cause, parts in by.items():
        others = [value for name, value in asdict(parts).items() if name != cause]
        assert others == pytest.approx([0, 0]), cause
        assert abs(asdict(parts)[cause]) > 0.1
    assert by["formula"].formula == pytest.approx(-0.2)


@pytest.mark.slow
@given(STEPS)
def test_residuals_cover_all_steps_and_agree_with_the_whole(steps: list[StepRecord]) -> None:
    found = residuals(COST, steps)
    assert sum(kind.num_steps for kind in found) == len(steps)
    assert sum(kind.time_share for kind in found) == pytest.approx(1)
    whole = sum(kind.time_share * kind.error_ratio for kind in found)
    measured = sum(record.duration_s for record in steps)
    predicted = sum(_retimed(record, COST).duration_s for record in steps)
    assert whole == pytest.approx(predicted / measured - 1, abs=1e-9)


def test_residuals_are_by_kind_of_step() -> None:
    steps = [step(1), step(3), step(2, slower=2.0), step(5, ((0, 100),)), step(0, ((0, 27),))]
    kinds = [(kind.kind, kind.num_steps) for kind in residuals(COST, steps)]
    assert kinds == [("decodes 1", 1), ("decodes 2-3", 2), ("prompts, tokens 16-31", 1), ("prompts, tokens 64-127", 1)]
    mean, p95 = step_errors(COST, [step(2, slower=2.0)] * 3)
    assert (mean, p95) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("name", "simulated_s", "verdict"),
    [
        (ITERATION, 1.049, "holds"),
        (ITERATION, 0.94, "fails"),
        (E2E, 1.09, "holds"),
        (TTFT_P99, 1.21, "fails"),
        ("x", 9, ""),
    ],
)
def test_only_figures_with_an_aim_are_judged(name: str, simulated_s: float, verdict: str) -> None:
    assert Comparison(name, 1.0, simulated_s).verdict == verdict


@pytest.mark.parametrize("shape", [FITTED, COMPARED])
def test_a_load_has_the_wanted_rate_variation_and_lengths(shape: object) -> None:
    """2 000 s of it: means within 5 standard errors, variation and medians within 15 %."""
    assert isinstance(shape, type(FITTED))
    load = draw_load(shape, 2000.0, seed=5)
    expected = 2000 * shape.rate_per_s
    assert abs(len(load) - expected) < 5 * shape.gap_variation * expected**0.5
    gaps = np.diff(load.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(shape.gap_variation, rel=0.15)
    for lengths, drawn in ((shape.prompt, load.num_prompt), (shape.output, load.num_output)):
        assert np.median(drawn) == pytest.approx(lengths.median, rel=0.15)
        assert lengths.least <= drawn.min() <= drawn.max() <= lengths.most
    assert abs(np.corrcoef(load.num_prompt, load.num_output)[0, 1]) < 0.1


def test_the_two_loads_differ_as_they_should_and_by_seed() -> None:
    one, other = (draw_load(shape, 300.0, seed=1) for shape in (FITTED, COMPARED))
    assert np.median(other.num_prompt) > 2 * np.median(one.num_prompt)
    assert other.num_prompt.max() <= FITTED.prompt.most, "the fit need not extrapolate"
    assert one.num_output.mean() > 1.5 * other.num_output.mean()
    assert draw_load(FITTED, 30.0, 1).arrival_s.tolist() == draw_load(FITTED, 30.0, 1).arrival_s.tolist()
    assert draw_load(FITTED, 30.0, 1).arrival_s.tolist() != draw_load(FITTED, 30.0, 2).arrival_s.tolist()


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """What a live cluster would have said, if it were the simulator with TRUTH."""

    def run(workload: Workload) -> LiveRun:
        made = simulate(workload, WORKER, TRUTH)
        return LiveRun(workload, made.records, made.steps, 0.0, 0.0)

    fitted, compared = (
        replace(shape, prompt=Lengths(60, 0.8, 4, 500), output=Lengths(12, 0.5, 2, 30)) for shape in (FITTED, COMPARED)
    )
    loads = (sequential(10, 16, 1, 0.1, 9), draw_load(fitted, 25.0, 1), draw_load(compared, 25.0, 2))
    return Measurement(WORKER, *map(run, loads))


@pytest.mark.slow
def test_a_simulator_is_fitted_back_to_itself_and_no_error_is_left(measured: Measurement) -> None:
    """Its loop takes no time, so that the overhead turns up in the fit's constants; the sum is what counts."""
    found = calibrate(measured)
    assert found.message_s == pytest.approx(TRUTH.message_s, rel=1e-3)
    assert found.overhead_s == pytest.approx(0, abs=1e-9)
    assert found.cost.step_s(10, 500, 0) == pytest.approx(TRUTH.cost.step_s(10, 500, 0), rel=1e-3)
    live = measured.compared
    again = simulate(live.workload, WORKER, found)
    rows = compare((live.records, live.steps), (again.records, again.steps))
    assert {row.name: row.verdict for row in rows if row.verdict} == {
        ITERATION: "holds",
        E2E: "holds",
        TTFT_P99: "holds",
    }
    assert max(abs(row.error_ratio) for row in rows) < 0.01


@pytest.mark.slow
def test_steps_that_are_held_up_lengthen_the_mean_and_not_the_fit(measured: Measurement) -> None:
    """Every tenth step takes three times as long: the typical one as before, all together by what the tenths add."""
    steps = tuple(
        s.model_copy(update={"duration_s": 3 * s.duration_s, "period_s": 3 * s.duration_s}) if i % 10 == 0 else s
        for i, s in enumerate(measured.fitted.steps)
    )
    found = calibrate(replace(measured, fitted=replace(measured.fitted, steps=steps)))
    for shape in ((3, 300, 0), (200, 0, 20_100)):
        assert found.fit.cost.step_s(*shape) == pytest.approx(TRUTH.cost.step_s(*shape), rel=0.05)
    columns = columns_of(steps)
    longer = columns.duration_s.sum() / columns_of(measured.fitted.steps).duration_s.sum()
    assert found.stretch == pytest.approx(longer, rel=0.05)
    assert longer > 1.1
    assert predict_s(found.cost, columns).sum() == pytest.approx(columns.duration_s.sum(), rel=1e-9)


def test_a_slower_worker_is_noticed(measured: Measurement) -> None:
    """Were the live steps of the second load a quarter longer than the first promised, the formula is told."""
    live = measured.compared
    slower = [s.model_copy(update={"duration_s": 1.25 * s.duration_s, "period_s": None}) for s in live.steps]
    assert sum(kind.error_ratio * kind.time_share for kind in residuals(TRUTH.cost, slower)) < -0.15


@pytest.mark.slow
def test_a_measurement_that_is_saved_says_the_same(measured: Measurement, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    measured.save(path)
    again = Measurement.load(path)
    assert again.worker == measured.worker
    assert again.compared.steps == measured.compared.steps
    assert again.compared.records.failure == measured.compared.records.failure
    assert again.compared.records.ttft_s.tolist() == measured.compared.records.ttft_s.tolist()
    assert calibrate(again) == calibrate(measured)


def test_no_answer_of_the_checkpoint_holds_half_a_character() -> None:
    vocab = make_tokenizer().get_vocab()
    silent = set(silent_ids(vocab))
    spoken = [token for token, index in vocab.items() if index not in silent]
    decoder = make_tokenizer().backend_tokenizer.decoder
    assert all(decoder.decode([token]).isascii() and decoder.decode([token]) for token in spoken)
    assert set(range(FIRST_ID)) < silent
    assert len(spoken) > 2000
