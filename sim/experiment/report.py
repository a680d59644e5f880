"""A comparison as the table that a person reads: a column per system, factors of the baseline beside it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sim.experiment.compare import Comparison
from sim.experiment.slo_scales import SHOWN_SCALES
from sim.experiment.summary import GOOD_QOE, Summary

NOTHING: Final = "-"
_FACTOR_WIDTH: Final = 5
_Format = Callable[[float], str]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 100 else f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _points(value: float) -> str:
    return f"{value:+.1f} points"


def _more(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _longer(value: float) -> str:
    return ("-" if value < 0 else "+") + _seconds(abs(value))


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


@dataclass(frozen=True, slots=True)
class _Row:
    title: str
    path: tuple[str, ...]
    """Where the figure stands in a summary."""
    format: _Format
    has_factor: bool = False
    """Whether `×1.23` of the baseline's figure stands beside it."""
    if_any: bool = False
    """Whether the row is left out where every figure is 0."""


_LATENCIES: Final = ("mean", "p50", "p99")
_ROWS: Final = (
    _Row("requests", ("requests",), _count),
    _Row("without a whole answer", ("refused",), _count, if_any=True),
    *(
        _Row(f"{title} {name}", (key, name), _seconds, has_factor=True)
        for key, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
        for name in ("mean", "p50", "p90", "p99", "p999")
    ),
    _Row("QoE mean", ("qoe", "mean"), _ratio),
    _Row("QoE p1", ("qoe", "p1"), _ratio),
    _Row("QoE p10", ("qoe", "p10"), _ratio),
    _Row(f"readers with QoE ≥ {GOOD_QOE:g}", ("qoe", "share_ge_0_95"), _share),
    _Row("in time: TTFT", ("slo", "ttft_share"), _share),
    _Row("in time: TPOT", ("slo", "tpot_share"), _share),
    _Row("in time: both", ("slo", "both_share"), _share),
    _Row("TTFT holds until", ("slo", "ttft_held_until_s"), _seconds),
    _Row("tokens/s", ("throughput_tokens_per_s",), _count, has_factor=True),
    _Row("99 % of the tokens by", ("tokens_until_s", "p99"), _seconds),
    _Row("the last token at", ("tokens_until_s", "last"), _seconds),
    _Row("effective tokens/s", ("effective_tokens_per_s",), _count, has_factor=True),
    _Row("tokens/s of an answer (TDS)", ("tds_tokens_per_s",), _count, has_factor=True),
    _Row("KV peak", ("kv_peak_ratio",), _share),
    _Row("KV demand peak", ("demand_over_capacity_peak",), _share),
    _Row("queue peak", ("queue_peak",), _count),
    _Row("preemptions", ("preemptions",), _count),
    _Row("overflows", ("overflows",), _count, if_any=True),
    _Row("pauses", ("pauses",), _count, if_any=True),
    _Row("blocks filled from both ends", ("opened_blocks",), _count, if_any=True),
    _Row("of these met", ("met_blocks",), _count, if_any=True),
    _Row("tokens computed again", ("recomputed_tokens",), _count, if_any=True),
    _Row("of these given up", ("given_up_tokens",), _count, if_any=True),
    _Row("tokens from the host", ("brought_back_tokens",), _count, if_any=True),
    _Row("copied to the host", ("swapped_out_bytes",), _gigabytes, if_any=True),
    _Row("longest stall", ("stall_s", "max"), _seconds, has_factor=True),
    _Row("stall p99", ("stall_s", "p99"), _seconds, has_factor=True),
    _Row("longest stall at a drop", ("stall_at_drops_s",), _seconds),
    _Row("longest stall at a restore", ("stall_at_restores_s",), _seconds),
    _Row("pipeline bubbles", ("bubble_ratio",), _share, if_any=True),
    _Row("first drop at", ("first_drop_s",), _seconds),
    _Row("drops", ("drops",), _count, if_any=True),
    _Row("restores", ("restores",), _count, if_any=True),
    _Row("time in groups", ("grouped_ratio",), _share, if_any=True),
    _Row("migrations", ("migrations",), _count, if_any=True),
    _Row("of these, as tokens", ("moves_as_tokens",), _count, if_any=True),
    _Row("KV moved", ("moved_bytes",), _gigabytes, if_any=True),
    _Row("GPUs at most", ("gpus_peak",), _count),
    _Row("GPU seconds", ("gpu_seconds",), _count),
    _Row("busy GPUs at most", ("busy_gpus_peak",), _count),
    _Row("busy GPU seconds", ("busy_gpu_seconds",), _count, has_factor=True),
    _Row("paid, idle for 60 s", ("paid_60_s_gpu_seconds",), _count),
    _Row("paid, idle for 300 s", ("paid_300_s_gpu_seconds",), _count),
    _Row("KV held of busy GPUs", ("busy_kv_ratio",), _share),
)
_WINDOWS: Final = (("cut_off", "at the cut-off"), ("drained", "when drained"))
_BESIDE: Final = (
    *(
        _Row(f"normalised latency {name}", ("normalised_latency_s", name), _seconds, has_factor=True)
        for name in _LATENCIES
    ),
    _Row("preemptions of a request p99", ("preemptions_per_request", "p99"), _count),
    _Row("preemptions of a request at most", ("preemptions_per_request", "max"), _count),
    _Row("best effort: requests", ("best_effort", "requests"), _count),
    _Row("best effort: without a whole answer", ("best_effort", "refused"), _count, if_any=True),
    _Row("best effort: cancelled at the end", ("best_effort", "unfinished"), _count, if_any=True),
    *(
        _Row(f"best effort: {title} {name}", ("best_effort", key, name), _seconds, has_factor=True)
        for key, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("normalised_latency_s", "normalised latency"))
        for name in _LATENCIES
    ),
    _Row("best effort: preemptions p99", ("best_effort", "preemptions_per_request", "p99"), _count),
    _Row("cut off at", ("cut_off_s",), _seconds),
    _Row("waited for then", ("cut_off", "unfinished"), _count),
    _Row("tokens lacking then", ("cut_off", "lacking_tokens"), _count),
    _Row("drained at", ("drained_s",), _seconds),
    *(
        _Row(f"{title} {when}", (*path, window, key), form, has_factor=True)
        for window, when in _WINDOWS
        for path, key, title, form in (
            (("best_effort",), "requests_per_s", "best effort: requests/s", _ratio),
            (("best_effort",), "tokens_per_s", "best effort: tokens/s", _count),
            (("best_effort",), "prompt_tokens_per_s", "best effort: prompt tokens/s", _count),
            ((), "tokens_per_s", "both: tokens/s", _count),
            ((), "prompt_tokens_per_s", "both: prompt tokens/s", _count),
        )
    ),
)
"""Where there is best effort."""
_ALONE: Final = (
    _Row("in time, against alone", ("in_time_points",), _points),
    _Row("displayed later than alone", ("shown_later_ratio",), _more),
    _Row("TTFT p99, against alone", ("ttft_p99_s",), _longer),
)
_GAPS: Final = (
    _Row("gap closed: TTFT p99", ("ttft_p99",), _share),
    _Row("gap closed: QoE mean", ("qoe_mean",), _share),
    _Row(f"gap closed: QoE ≥ {GOOD_QOE:g}", ("qoe_share_ge_0_95",), _share),
)


def render(comparison: Comparison) -> str:
    """Return the table: the first system is the baseline of the factors; rows without any figure are left out."""
    systems: Mapping[str, Summary] = comparison["systems"]
    names = list(systems)
    lines = [["", names[0], *(_beside(name, "") for name in names[1:])]]
    lines += _lines(_ROWS, systems)
    if any(each["best_effort"] is not None for each in systems.values()):
        lines += _lines(_BESIDE, systems)
    if (against := comparison.get("against_alone")) is not None:
        lines += _lines(_ALONE, {name: against["systems"].get(name) for name in names})
    lines += _slo_lines(comparison.get("slo_scales"), names)
    lines += _lines(_GAPS, comparison["gap_closed"])
    table = _table(lines)
    notes = [f"× of {names[0]}'s figure"] if len(names) > 1 else []
    if len(comparison["seeds"]) > 1:
        seeds = ", ".join(map(str, comparison["seeds"]))
        notes.append(f"means over the seeds {seeds}; least and greatest in the JSON (range)")
    remarks = [*_alone(comparison.get("alone")), *(["; ".join(notes)] if notes else [])]
    return "\n".join([table, *(["", *remarks] if remarks else [])])


def _lines(rows: Sequence[_Row], figures: Mapping[str, Summary | None]) -> list[list[str]]:
    """Return the rows that have a figure, of the systems in their order."""
    lines = []
    for row in rows:
        values = [_at(summary, row.path) for summary in figures.values()]
        if any(value is not None for value in values) and (any(values) or not row.if_any):
            lines.append([row.title, *_cells(row, values)])
    return lines


def _alone(figures: Summary | None) -> list[str]:
    """Return what is said of requests that are each alone on an instance, which is no system's column."""
    if figures is None or figures["qoe_mean"] is None:
        return []
    mean, share = _ratio(figures["qoe_mean"]), _share(figures["qoe_share_ge_0_95"])
    return [f"each request alone on an instance: QoE mean {mean}, {share} of readers with QoE ≥ {GOOD_QOE:g}"]


def _slo_lines(found: Mapping[str, Any] | None, names: Sequence[str]) -> list[list[str]]:
    """Return rows of the requests that miss an SLO of some times the best median."""
    lines = []
    for key, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        figures = None if found is None else found[key]
        if found is None or figures is None:
            continue
        for place, scale in enumerate(found["scales"]):
            if scale in SHOWN_SCALES:
                limit = _seconds(scale * figures["unit_s"])
                row = _Row(f"{title} above {scale:g} × best p50 ({limit})", (), _share)
                lines.append([row.title, *_cells(row, [figures["missed"][name][place] for name in names])])
    return lines


def _at(summary: Summary | None, path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = None if value is None else value[key]
    return None if value is None else float(value)


def _cells(row: _Row, values: Sequence[float | None]) -> list[str]:
    """Return a row's cells: figures, and beside those after the first their factor, or as much room."""
    first, *others = (_or_nothing(value, row.format) for value in values)
    factors = (_factor(value, values[0]) if row.has_factor else "" for value in values[1:])
    return [first, *(_beside(text, factor) for text, factor in zip(others, factors, strict=True))]


def _factor(value: float | None, baseline: float | None) -> str:
    if value is None or not baseline:
        return ""
    factor = value / baseline
    return f"×{factor:.2f}" if factor < 10 else f"×{factor:.0f}"


def _beside(text: str, factor: str) -> str:
    return f"{text} {factor:<{_FACTOR_WIDTH}}"


def _or_nothing(value: float | None, form: _Format) -> str:
    return NOTHING if value is None else form(value)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = []
    for title, *cells in lines:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        rows.append("  ".join([title.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(rows)
