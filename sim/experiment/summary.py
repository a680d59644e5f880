"""What one run adds up to: the figures of one system, as they stand in the JSON of a comparison. Pure.

Every figure is over the requests that arrived after the warm-up and that somebody waits for; best effort has its own.
Percentiles are interpolated between the two nearest values. A figure that nobody can know, or of nothing, is None.

Beside best effort a rate depends on when one stops to count, so there are two:

    cut_off   the end of the arrivals: what came until then; the requests that somebody still waits for are told
    drained   the last token that somebody waits for: of two systems, after equal work for those who wait
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from sim.experiment.records import I64, UNFINISHED, Records
from sim.workload.workload import F64, Bool

Summary = dict[str, Any]
_Figures = Mapping[str, Callable[[F64], Any]]
PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
GOOD_QOE: Final = 0.95
"""Readers above it are counted as content."""
HELD_WINDOW_S: Final = 5.0
"""Arrivals of so many seconds together say whether a limit still holds."""
SIGNIFICANT_DIGITS: Final = 6
_RANKS: Final[_Figures] = {name: partial(np.percentile, q=percent) for name, percent in PERCENTILES.items()}
_QOE: Final[_Figures] = {
    "mean": np.mean,
    "p1": partial(np.percentile, q=1),
    "p10": partial(np.percentile, q=10),
    "share_ge_0_95": lambda known: np.mean(known >= GOOD_QOE),
}
_UNTIL: Final[_Figures] = {"p99": _RANKS["p99"], "last": np.max}
_PREEMPTIONS: Final[_Figures] = {"p50": _RANKS["p50"], "p99": _RANKS["p99"], "max": np.max}
_STALL: Final[_Figures] = {"max": np.max, "p99": _RANKS["p99"]}
_PLACED: Final = {
    "kv_peak_ratio",
    "demand_over_capacity_peak",
    "preemptions",
    "drop_times_s",
    "restore_times_s",
}
"""Facts that have their place among the figures, or none."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The most that a request may take. One that got no whole answer has missed it."""

    ttft_s: float
    """To its first token."""
    tpot_s: float
    """Per token after the first, on average; an answer of one token keeps it."""


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """What only the system knows of a run, not its clients; None where it does not tell."""

    kv_peak_ratio: float | None = None
    """Most KV blocks that sequences held at one instant, over all instances, divided by the blocks that there are."""
    demand_over_capacity_peak: float | None = None
    """The same of the blocks that all sequences held or waited for."""
    preemptions: int | None = None
    pauses: int | None = None
    """Times that a sequence kept its KV and was left out of steps that it could have been in."""
    opened_blocks: int | None = None
    """KV blocks of one request whose other end another one began to fill."""
    met_blocks: int | None = None
    """Of these, those in which the two met."""
    queue_peak: int | None = None
    """Most requests that waited or were preempted at one instant, at workers and in the dispatcher."""
    recomputed_tokens: int | None = None
    """Tokens whose KV was computed again after a preemption."""
    given_up_tokens: int | None = None
    """Of these, tokens whose KV had been on the host."""
    brought_back_tokens: int | None = None
    """Tokens whose KV came from the host."""
    swapped_out_bytes: int | None = None
    """KV that was copied to the host."""
    bubble_ratio: float | None = None
    """Share of the pipeline stages' time that passed idle while their group had work; 0 without pipelines."""
    drops: int | None = None
    """Plans that dropped layers."""
    restores: int | None = None
    """Plans that brought them back."""
    drop_times_s: tuple[float, ...] | None = None
    """When they were carried out."""
    restore_times_s: tuple[float, ...] | None = None
    grouped_ratio: float | None = None
    """Share of the instances' time that passed in groups, from the drop until they were whole again."""
    overflows: int | None = None
    """Preemptions, and requests that waited for memory at an instance, while another one had room (the monitor's
    count)."""
    migrations: int | None = None
    """Requests moved between instances."""
    moves_as_tokens: int | None = None
    """Of these, the ones that were moved without KV."""
    gpus_peak: int | None = None
    """Most GPUs in use at one instant."""
    gpu_seconds: float | None = None
    """GPUs in use, over the run."""
    busy_gpus_peak: int | None = None
    """Most GPUs of instances with requests, at one instant."""
    busy_gpu_seconds: float | None = None
    """Those GPUs, over the run."""
    paid_60_s_gpu_seconds: float | None = None
    """The same if an instance without requests is kept for a minute before it is given back."""
    paid_300_s_gpu_seconds: float | None = None
    """For five minutes."""
    busy_kv_ratio: float | None = None
    """Share of the KV memory of instances with requests that sequences held, over the run."""
    moved_bytes: int | None = None
    """KV that came from another instance with a request, or for one."""


def summarise(
    records: Records,
    facts: SystemFacts,
    *,
    slo: Slo | None = None,
    warm_up_s: float = 0.0,
    cut_off_s: float | None = None,
) -> Summary:
    """Return the figures of one run; seconds, tokens.

    Args:
        records: of all requests.
        facts: of the system.
        slo: what counts as in time; None leaves it out.
        warm_up_s: requests that arrived before are left out, but not out of `facts` and rates.
        cut_off_s: end of the arrivals, where there may be best effort; None leaves its figures out.
    """
    measured = records.real_time.select(records.real_time.arrival_s >= warm_up_s)
    complete = measured.is_complete
    summary: Summary = rounded(
        {
            "requests": len(measured),
            "completed": int(complete.sum()),
            "refused": int((~complete).sum()),
            "ttft_s": spread(measured.ttft_s),
            "tpot_s": spread(measured.tpot_s),
            "normalised_latency_s": spread(measured.normalised_latency_s),
            "preemptions_per_request": _of_known(measured.num_preemptions, _PREEMPTIONS),
            "qoe": _of_known(measured.qoe, _QOE),
            "slo": None if slo is None else _slo(measured, slo),
            "throughput_tokens_per_s": _throughput(measured, measured.num_tokens),
            "tokens_until_s": _of_known(measured.token_s - measured.arrival_s.min(initial=np.inf), _UNTIL),
            "effective_tokens_per_s": _throughput(measured, measured.effective_tokens),
            "tds_tokens_per_s": _of_known(measured.tds_tokens_per_s, {"mean": np.mean})["mean"],
            "kv_peak_ratio": facts.kv_peak_ratio,
            "demand_over_capacity_peak": facts.demand_over_capacity_peak,
            "preemptions": facts.preemptions,
            "stall_s": _of_known(measured.longest_gap_s, _STALL),
            "stall_at_drops_s": _stall_at(measured, facts.drop_times_s),
            "stall_at_restores_s": _stall_at(measured, facts.restore_times_s),
            "first_drop_s": min(facts.drop_times_s or (), default=None),
            **{name: value for name, value in asdict(facts).items() if name not in _PLACED},
            **_beside(records, warm_up_s, cut_off_s),
        }
    )
    return summary


def spread(values: F64) -> dict[str, float | None]:
    """Return mean and percentiles of the values that are numbers; None without any."""
    return _of_known(values, {"mean": np.mean, **_RANKS})


def in_time(records: Records, slo: Slo) -> dict[str, F64]:
    """Return for `ttft`, `tpot` and `both` [n]: 1 where the request kept it, else 0."""
    complete = records.is_complete
    ttft = complete & (records.ttft_s <= slo.ttft_s)
    tpot = complete & ((records.tpot_s <= slo.tpot_s) | (records.num_tokens == 1))
    return {name: kept.astype(np.float64) for name, kept in (("ttft", ttft), ("tpot", tpot), ("both", ttft & tpot))}


def held_until_s(records: Records, limit_s: float) -> float:
    """Return until when the TTFT holds: the begin of the first window of arrivals whose mean TTFT is above the limit.

    The last arrival if there is no such window. A request without a whole answer, or a first token, is above.

    Source: KunServe (arXiv 2412.18169v2), section 5.5, which names the second at which the SLO no longer holds.
    """
    is_served = records.is_complete & ~np.isnan(records.ttft_s)
    window = (records.arrival_s / HELD_WINDOW_S).astype(np.int64)
    counts = np.bincount(window)
    ttft_s = np.bincount(window, weights=np.where(is_served, records.ttft_s, np.inf))
    missed = np.flatnonzero(ttft_s > limit_s * counts)
    return float(missed[0] * HELD_WINDOW_S) if missed.size else float(records.arrival_s[-1])


def rounded(tree: Any) -> Any:
    """Return the tree with every float cut to six significant digits: beyond, platforms may differ."""
    if isinstance(tree, Mapping):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(value) for value in tree]
    if isinstance(tree, float):
        return float(f"{tree:.{SIGNIFICANT_DIGITS}g}")
    return tree


def _of_known(values: F64, figures: _Figures) -> dict[str, float | None]:
    """Return figures of the values that are numbers; None without any."""
    known = values[~np.isnan(values)]
    return {name: float(of(known)) if known.size else None for name, of in figures.items()}


def _slo(records: Records, slo: Slo) -> dict[str, float | None]:
    kept = in_time(records, slo)
    shares = {f"{name}_share": float(each.mean()) if len(records) else None for name, each in kept.items()}
    held_s = held_until_s(records, slo.ttft_s) if len(records) else None
    return {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, **shares, "ttft_held_until_s": held_s}


def _beside(records: Records, warm_up_s: float, cut_off_s: float | None) -> Summary:
    """Return what is told of best effort, and of all requests together; see above."""
    told: Summary = dict.fromkeys(("cut_off_s", "cut_off", "drained_s", "drained", "best_effort"))
    if cut_off_s is None:
        return told
    drained_s = float(np.nanmax(records.real_time.last_token_s, initial=warm_up_s))
    told |= {"cut_off_s": cut_off_s, "drained_s": drained_s}
    told["cut_off"] = {**_lacking(records.real_time, cut_off_s), **_rates(records, warm_up_s, cut_off_s)}
    told["drained"] = _rates(records, warm_up_s, drained_s)
    if records.is_best_effort.any():
        those = records.select(records.is_best_effort)
        measured = those.select(those.arrival_s >= warm_up_s)
        told["best_effort"] = {
            "requests": len(measured),
            "completed": int(measured.is_complete.sum()),
            "refused": len(measured) - int(measured.is_complete.sum()) - measured.failure.count(UNFINISHED),
            "unfinished": measured.failure.count(UNFINISHED),
            "ttft_s": spread(measured.ttft_s),
            "tpot_s": spread(measured.tpot_s),
            "normalised_latency_s": spread(measured.normalised_latency_s),
            "preemptions_per_request": _of_known(measured.num_preemptions, _PREEMPTIONS),
            "cut_off": _rates(those, warm_up_s, cut_off_s),
            "drained": _rates(those, warm_up_s, drained_s),
        }
    return told


def _lacking(records: Records, at_s: float) -> dict[str, int]:
    """Return how many requests had not all their tokens at an instant, and the tokens that they lacked.

    Those that failed count, too: somebody waits for them in vain.
    """
    num_came = np.concatenate(([0], np.cumsum(records.token_s <= at_s)))
    wanted = np.where(records.is_complete, records.num_tokens, records.num_output)
    lacking = wanted - np.diff(num_came[records.token_begin])
    return {"unfinished": int((lacking > 0).sum()), "lacking_tokens": int(lacking.sum())}


def _rates(records: Records, begin_s: float, end_s: float) -> dict[str, float | None]:
    """Return what was done between two instants, per second; a prompt is done with its first token."""

    def is_within(at_s: F64) -> Bool:
        within: Bool = (begin_s <= at_s) & (at_s <= end_s)
        return within

    done = {
        "requests_per_s": (is_within(records.last_token_s) & records.is_complete).sum(),
        "tokens_per_s": is_within(records.token_s).sum(),
        "prompt_tokens_per_s": records.num_prompt[is_within(records.arrival_s + records.ttft_s)].sum(),
    }
    return {name: float(count / (end_s - begin_s)) if end_s > begin_s else None for name, count in done.items()}


def _throughput(records: Records, num_tokens: F64 | I64) -> float | None:
    """Return these tokens of the requests, [n], per second from the first arrival to the last token."""
    if not records.num_tokens.sum():
        return None
    return float(num_tokens.sum() / (np.nanmax(records.last_token_s) - records.arrival_s[0]))


def _stall_at(records: Records, times_s: tuple[float, ...] | None) -> float | None:
    """Return the longest time between two tokens of an answer within which one of these instants lies."""
    return max(map(records.longest_gap_over_s, times_s)) if times_s else None
