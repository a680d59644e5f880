"""How many requests miss an SLO that is so many times the best median: KunServe's figure of violations. Pure.

Source: KunServe (arXiv 2412.18169v2), section 5.2: a scale of N allows N times the P50 of the best baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sim.experiment.records import Records
from sim.experiment.series import best_median, slo_violations
from sim.workload.workload import F64

SCALES: Final = (1.5, 2.0, 3.0, 5.0, 10.0)
"""Multiples of the best median that are told."""
SHOWN_SCALES: Final = (2.0, 5.0, 10.0)
"""Those in the table."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the requests of one run that somebody waits for, in the workload's order; NaN where there was none."""

    ttft_s: F64
    """[n]"""
    tpot_s: F64
    """[n]"""
    shown_s: F64
    """[n] to the instant at which the last token is displayed; NaN without a reader."""

    @classmethod
    def of(cls, records: Records, warm_up_s: float = 0.0) -> Latencies:
        """Return those of the requests that arrived after the warm-up."""
        measured = records.real_time.select(records.real_time.arrival_s >= warm_up_s)
        return cls(measured.ttft_s, measured.tpot_s, measured.shown_s)


def missed_by_scale(runs: Sequence[Mapping[str, Latencies]], bounds: Collection[str] = ()) -> dict[str, Any]:
    """Return what every scale allows, and by system the share of requests above it, each the mean over the runs.

    An answer of one token has no TPOT, and misses none.

    Args:
        runs: of each seed, by system.
        bounds: systems whose memory never runs out, of which none is the best.
    """
    found: dict[str, Any] = {"scales": list(SCALES)}
    for key in ("ttft_s", "tpot_s"):
        units, missed = list[float](), list[dict[str, F64]]()
        for run in runs:
            values = {name: _known(key, each) for name, each in run.items()}
            unit_s = best_median(values, bounds)
            if unit_s is None:
                break
            units.append(unit_s)
            limits = unit_s * np.array(SCALES)
            missed.append({name: slo_violations(each, limits) for name, each in values.items()})
        if not units or len(units) < len(runs):
            found[key] = None
            continue
        shares = {name: np.mean([each[name] for each in missed], axis=0) for name in runs[0]}
        found[key] = {
            "unit_s": float(np.mean(units)),
            "missed": {name: [float(share) for share in each] for name, each in shares.items()},
        }
    return found


def _known(key: str, latencies: Latencies) -> F64:
    values: F64 = getattr(latencies, key)
    return values[~np.isnan(values)] if key == "tpot_s" else values
