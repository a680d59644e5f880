"""A sweep changes one quantity of a load, and its figure is the same each time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.load_sweep import FIGURES, Figure, changed, draw, measure, report
from shared.errors import StartupError
from sim.scenarios.files import load_scenario
from sim.scenarios.scenario import validated


def test_a_value_changes_the_arrivals_alone() -> None:
    load = load_scenario("andes-cyclic")
    other = changed(load, "intensity", 1.5)
    assert other.arrivals.model_dump() == {**load.arrivals.model_dump(), "intensity": 1.5}
    assert other.model_copy(update={"arrivals": load.arrivals}) == load


@pytest.mark.parametrize(("quantity", "value"), [("height", 1.0), ("intensity", 2.9)])
def test_a_quantity_that_there_is_not_or_a_value_too_large_is_refused(quantity: str, value: float) -> None:
    with pytest.raises(StartupError, match="andes-cyclic"):
        changed(load_scenario("andes-cyclic"), quantity, value)


@pytest.mark.slow
def test_each_system_has_its_figures_in_the_order_of_the_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load, values = load_scenario("andes-cyclic").with_overrides(duration_s=20, lengths="64x16"), [4.0, 0.5]
    found = measure(load, "rate_per_s", values, ["fcfs", "andes"], [0, 1], 1)
    num_requests = {system: [[each["requests"] for each in seeds] for seeds in of] for system, of in found.items()}
    assert num_requests["fcfs"] == num_requests["andes"]
    (many, others), (few, _) = num_requests["fcfs"]
    assert few < many != others, "by seed"
    report("rate_per_s", values, found, FIGURES["qoe"])
    assert capsys.readouterr().out.count("| andes |") == 2
    if importlib.util.find_spec("matplotlib") is not None:
        for name in ("a.svg", "b.svg"):
            draw("rate_per_s", values, found, FIGURES["qoe"], tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
def test_limits_and_best_effort_are_told_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    load = load_scenario("bros-13b").with_overrides(duration_s=20)
    report("rate_per_s", [2.0], measure(load, "rate_per_s", [2.0], ["bros-whole", "alone"], [0], 1), FIGURES["limits"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| bros-whole", "| alone"))]
    assert [row.split(" | ")[3] for row in rows] == ["100.0 %", "100.0 %"]
    assert rows[1].split(" | ")[6] == "–"
    assert float(rows[0].split(" | ")[6]) > 0
    alone = validated({**load.model_dump(), "best_effort": None}, load.name)
    report("rate_per_s", [2.0], measure(alone, "rate_per_s", [2.0], ["fcfs"], [0], 1), FIGURES["limits"])
    assert float(capsys.readouterr().out.split(" | ")[-1].strip(" |\n")) > 0


def test_of_several_seeds_the_mean_the_least_and_the_most_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    figures = (Figure("share", lambda summary: summary["share"], "{:.0%}"),)
    report("rate_per_s", [2.0], {"bros": [[{"share": 0.5}, {"share": 1.0}, {"share": None}]]}, figures)
    assert "| bros | 2 | 75 % (50 % to 100 %) |" in capsys.readouterr().out
