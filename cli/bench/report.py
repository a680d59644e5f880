"""What a load's outcomes add up to, as figures and as the text that a person reads. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cli.bench.stream import BenchRecord
from sim.experiment.summary import GOOD_QOE
from sluice_client.qoe import QoeTarget, final_qoe

LATE_S = 0.01
"""Above this (99th percentile) the load's own lateness is worth a line."""
_FIGURES = ("mean", "p50", "p90", "p99")
_ROWS = (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL"), ("e2e_s", "end to end"))


def summarise(outcomes: Sequence[BenchRecord], target: QoeTarget, *, is_held_back: bool) -> dict[str, Any]:
    """Return the figures of a load; seconds, tokens, and None where there is nothing to measure.

    TTFT, TPOT, ITL and end to end are those of the complete answers, from the moment each was sent. Tokens that arrive
    together are apart by gaps of 0. An answer that failed has a QoE of 0.

    Args:
        outcomes: of the requests that were sent.
        target: what the reader expects.
        is_held_back: whether a limit of requests under way delays sending, so that lateness says nothing.
    """
    complete = [outcome for outcome in outcomes if outcome.end_s is not None and not outcome.failure]
    failed = [outcome for outcome in outcomes if outcome.failure]
    duration_s = _duration(outcomes)
    num_input = sum(outcome.num_input or 0 for outcome in complete)
    num_output = sum(outcome.num_output for outcome in complete)
    return {
        "duration_s": duration_s,
        "num_sent": len(outcomes),
        "num_complete": len(complete),
        "num_failed": len(failed),
        "num_unfinished": len(outcomes) - len(complete) - len(failed),
        "failures": dict(Counter(outcome.failure for outcome in failed).most_common()),
        "failure_details": {outcome.failure: outcome.detail for outcome in reversed(failed)},
        "num_input_tokens": num_input,
        "num_output_tokens": num_output,
        "are_tokens_counted_by_server": all(outcome.is_counted for outcome in complete),
        "requests_per_s": _rate(len(complete), duration_s),
        "output_tokens_per_s": _rate(num_output, duration_s),
        "total_tokens_per_s": _rate(num_input + num_output, duration_s),
        "ttft_s": _spread([o.deliveries[0][0] - o.sent_s for o in complete]),
        "tpot_s": _spread([tpot for o in complete if (tpot := _tpot(o)) is not None]),
        "itl_s": _spread([gap for o in complete for gap in _gaps(o)]),
        "e2e_s": _spread([o.end_s - o.sent_s for o in complete if o.end_s is not None]),
        "qoe": _qoe([qoe_of(o, target) for o in (*complete, *failed)]),
        "lateness_p99_s": None if is_held_back else lateness_p99_s(outcomes),
    }


def summarise_best_effort(outcomes: Sequence[BenchRecord], duration_s: float) -> dict[str, Any]:
    """Return the figures of what went on beside a load; None where there is nothing to measure.

    Args:
        outcomes: of the requests that were sent; those without an end were cancelled with the load.
        duration_s: for which it went on. Rates are over this time; of requests those that are done, of tokens all that
            arrived, so that the cut at the end takes none away.
    """
    failed = [outcome for outcome in outcomes if outcome.failure]
    done = [outcome for outcome in outcomes if outcome.end_s is not None and not outcome.failure]
    num_output = sum(outcome.num_output for outcome in outcomes if not outcome.failure)
    return {
        "duration_s": duration_s,
        "num_sent": len(outcomes),
        "num_complete": len(done),
        "num_failed": len(failed),
        "num_cancelled": len(outcomes) - len(done) - len(failed),
        "failures": dict(Counter(outcome.failure for outcome in failed).most_common()),
        "num_output_tokens": num_output,
        "requests_per_s": _rate(len(done), duration_s),
        "output_tokens_per_s": _rate(num_output, duration_s),
    }


def lateness_p99_s(outcomes: Sequence[BenchRecord]) -> float | None:
    """Return by how much the load itself was late, 99th percentile; None if nothing was sent."""
    late_s = [outcome.sent_s - outcome.due_s for outcome in outcomes]
    return float(np.percentile(late_s, 99)) if late_s else None


def qoe_of(outcome: BenchRecord, target: QoeTarget) -> float:
    """Return the QoE of one answer, from the moment it was sent; 0 if it failed."""
    if outcome.failure:
        return 0.0
    times = [at_s - outcome.sent_s for at_s, count in outcome.deliveries for _ in range(count)]
    return final_qoe(target, times)


def _duration(outcomes: Sequence[BenchRecord]) -> float:
    ends = [outcome.end_s for outcome in outcomes if outcome.end_s is not None]
    return max(ends) - min(outcome.sent_s for outcome in outcomes) if ends else 0.0


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None


def _tpot(outcome: BenchRecord) -> float | None:
    """Return (last − first)/(n − 1), or None for a single token."""
    count = sum(count for _, count in outcome.deliveries)
    return (outcome.deliveries[-1][0] - outcome.deliveries[0][0]) / (count - 1) if count > 1 else None


def _gaps(outcome: BenchRecord) -> list[float]:
    """Return the gaps between the answer's tokens."""
    times = [at_s for at_s, count in outcome.deliveries for _ in range(count)]
    return [later - earlier for earlier, later in pairwise(times)]


def _spread(values: Sequence[float], ranks: tuple[int, ...] = (50, 90, 99)) -> dict[str, float] | None:
    if not values:
        return None
    array = np.asarray(values)
    return {"mean": float(array.mean()), **{f"p{rank}": float(np.percentile(array, rank)) for rank in ranks}}


def _qoe(values: Sequence[float]) -> dict[str, float] | None:
    spread = _spread(values, (50, 10, 1))
    return spread and spread | {"share_ge_0_95": float(np.mean(np.asarray(values) >= GOOD_QOE))}


def render(summary: dict[str, Any], target: QoeTarget) -> str:
    """Return the text for a person."""
    duration_s = f"{summary['duration_s']:.2f} s"
    counts = f"{summary['num_complete']} done, {summary['num_failed']} failed{_unfinished(summary)}"
    tokens = f"{summary['num_input_tokens']} in, {summary['num_output_tokens']} out"
    rates = [_number(summary[f"{name}_per_s"]) for name in ("requests", "output_tokens", "total_tokens")]
    lines = [
        f"{'requests':<12}{counts} in {duration_s}, {rates[0]} per second",
        f"{'tokens':<12}{tokens}; per second {rates[1]} out, {rates[2]} in all",
        "",
        f"{'ms':<12}" + "".join(f"{name:>10}" for name in _FIGURES),
    ]
    lines += [_row(title, summary[name]) for name, title in _ROWS]
    lines += ["", _qoe_line(summary["qoe"], target)]
    for kind, count in summary["failures"].items():
        detail = summary["failure_details"][kind]
        lines.append(f"failed      {count} × {kind}" + (f": {detail}" if detail else ""))
    return "\n".join([*lines, *_remarks(summary)])


def render_best_effort(summary: dict[str, Any]) -> str:
    """Return the line for a person."""
    counts = ", ".join(f"{summary[f'num_{name}']} {name}" for name in ("failed", "cancelled"))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in summary["failures"].items())
    requests, tokens = (_number(summary[f"{name}_per_s"]) for name in ("requests", "output_tokens"))
    line = f"best effort {summary['num_complete']} done, {counts} at the end, in {summary['duration_s']:.2f} s"
    return f"{line}; per second {requests} requests, {tokens} tokens out" + (f"; failed {kinds}" if kinds else "")


def _unfinished(summary: dict[str, Any]) -> str:
    return f", {summary['num_unfinished']} given up" if summary["num_unfinished"] else ""


def _row(title: str, spread: dict[str, float] | None) -> str:
    cells = ("-" for _ in _FIGURES) if spread is None else (f"{1e3 * spread[name]:.2f}" for name in _FIGURES)
    return f"{title:<12}" + "".join(f"{cell:>10}" for cell in cells)


def _qoe_line(spread: dict[str, float] | None, target: QoeTarget) -> str:
    wish = f"for a first token within {target.ttft_s:g} s, then {target.speed_tokens_per_s:g} tokens/s"
    if spread is None:
        return f"{'QoE':<12}- {wish}"
    figures = [f"{name} {value:.3f}" for name, value in spread.items() if name != "share_ge_0_95"]
    figures.append(f"{100 * spread['share_ge_0_95']:.1f} % with at least {GOOD_QOE:g}")
    return f"{'QoE':<12}" + ", ".join(figures) + f"; {wish}"


def _remarks(summary: dict[str, Any]) -> list[str]:
    remarks = []
    if not summary["are_tokens_counted_by_server"]:
        remarks.append("the server gives no usage: each chunk of text counts as one token, prompts count as none")
    remarks += remarks_on_lateness(summary["lateness_p99_s"])
    return ["", *remarks] if remarks else []


def remarks_on_lateness(late_s: float | None) -> list[str]:
    """Return what to say of requests that were sent later than they should have been: nothing, if they were not."""
    if late_s is None or late_s <= LATE_S:
        return []
    return [f"the load itself was late by {1e3 * late_s:.0f} ms (p99): this client is part of the bottleneck"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"
