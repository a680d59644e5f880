"""How far the simulator is off, and what part of the error comes from where. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from cli.profile.steps import columns_of, overheads_s
from shared.cost import CostModel
from shared.cost_fit import F64, predict_s
from shared.messages.steps import StepRecord
from sim.experiment.records import Records

ITERATION: Final = "iteration, mean"
E2E: Final = "end to end, mean"
TTFT_P99: Final = "TTFT, p99"
AIMS: Final = {ITERATION: 0.05, E2E: 0.10, TTFT_P99: 0.20}
"""Greatest relative error of each figure that is judged."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure on both sides, seconds."""

    name: str
    live_s: float
    simulated_s: float

    @property
    def error_ratio(self) -> float:
        """How much more the simulator says, as a share of the live value."""
        return self.simulated_s / self.live_s - 1

    @property
    def verdict(self) -> str:
        """`holds` or `fails` where the figure has an aim, else nothing."""
        aim = AIMS.get(self.name)
        if aim is None:
            return ""
        return "holds" if abs(self.error_ratio) <= aim else "fails"


@dataclass(frozen=True, slots=True)
class IterationParts:
    """From where the error of the mean iteration comes; the parts add up to it, as shares of the live iteration."""

    batches: float
    """The simulated worker batched otherwise: what the formula says of its batches, less of the live ones."""
    formula: float
    """The formula is off on the live worker's own batches."""
    loop: float
    """The time between steps is another than on the load that was fitted."""

    @property
    def total(self) -> float:
        """The whole error."""
        return self.batches + self.formula + self.loop


@dataclass(frozen=True, slots=True)
class Residual:
    """How far the formula is off on one kind of step."""

    kind: str
    num_steps: int
    time_share: float
    """Of all steps' time."""
    error_ratio: float
    """Of the kind's summed durations."""


def iteration_s(steps: Sequence[StepRecord]) -> float:
    """Return the mean time from step to step while there is work: a step's duration, and what the loop takes."""
    return float(np.mean([step.duration_s for step in steps]) + overheads_s(steps).mean())


def compare(
    live: tuple[Records, Sequence[StepRecord]], simulated: tuple[Records, Sequence[StepRecord]]
) -> list[Comparison]:
    """Return every figure of both sides, those with an aim among them."""
    rows = [Comparison(ITERATION, iteration_s(live[1]), iteration_s(simulated[1]))]
    for title, values in _LATENCIES.items():
        for name, of in _STATISTICS.items():
            rows.append(Comparison(f"{title}, {name}", of(values(live[0])), of(values(simulated[0]))))
    return rows


def iteration_parts(cost: CostModel, live: Sequence[StepRecord], simulated: Sequence[StepRecord]) -> IterationParts:
    """Return the parts of the mean iteration's error.

    Args:
        cost: as the simulated steps were made, overhead included.
        live: steps of the live worker.
        simulated: steps of the simulated one.
    """
    bare = replace(cost, era_s=0.0)
    by_formula, by_live = (float(predict_s(bare, columns_of(steps)).mean()) for steps in (simulated, live))
    measured = float(np.mean([step.duration_s for step in live]))
    whole = iteration_s(live)
    loop = cost.era_s + float(overheads_s(simulated).mean()) - float(overheads_s(live).mean())
    return IterationParts((by_formula - by_live) / whole, (by_live - measured) / whole, loop / whole)


def residuals(cost: CostModel, steps: Sequence[StepRecord]) -> list[Residual]:
    """Return the formula's errors by kind of step: decodes by their number, steps with prompts by their tokens."""
    columns = columns_of(steps)
    predicted = predict_s(replace(cost, era_s=0.0), columns)
    kinds = np.array([_kind(step) for step in steps])
    whole = columns.duration_s.sum()
    found = []
    for kind in sorted(set(kinds.tolist()), key=_order):
        chosen = kinds == kind
        measured = columns.duration_s[chosen].sum()
        error = float(predicted[chosen].sum() / measured - 1)
        found.append(Residual(kind, int(chosen.sum()), float(measured / whole), error))
    return found


def step_errors(cost: CostModel, steps: Sequence[StepRecord]) -> tuple[float, float]:
    """Return mean and 95th percentile of the formula's relative error, step by step."""
    columns = columns_of(steps)
    errors = np.abs(predict_s(replace(cost, era_s=0.0), columns) / columns.duration_s - 1)
    return float(errors.mean()), float(np.percentile(errors, 95))


def _kind(step: StepRecord) -> str:
    title, size = ("prompts, tokens", step.num_tokens) if step.chunks else ("decodes", step.num_decodes)
    least = 1 << (size.bit_length() - 1)
    return f"{title} {least}" if least == 1 else f"{title} {least}-{2 * least - 1}"


def _order(kind: str) -> tuple[str, int]:
    title, _, numbers = kind.rpartition(" ")
    return title, int(numbers.split("-")[0])


def _percentile(rank: float) -> Callable[[F64], float]:
    return lambda values: float(np.nanpercentile(values, rank))


_STATISTICS: Final[dict[str, Callable[[F64], float]]] = {
    "mean": lambda values: float(np.nanmean(values)),
    "p50": _percentile(50),
    "p90": _percentile(90),
    "p99": _percentile(99),
}
_LATENCIES: Final[dict[str, Callable[[Records], F64]]] = {
    "end to end": lambda records: records.last_token_s - records.arrival_s,
    "TTFT": lambda records: records.ttft_s,
    "TPOT": lambda records: records.tpot_s,
}
