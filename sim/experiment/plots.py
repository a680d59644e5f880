"""Figures of a comparison, as PNG and SVG; needs matplotlib, which the extra `plots` brings.

`timeline` shows what figure 12 of KunServe (arXiv 2412.18169v2) shows, memory demand, mean TTFT and throughput over
time, and of figures 3 and 13 of Andes (arXiv 2404.16283) who waits, with the QoE that came of it. `latency` is
KunServe's figure 13: percentiles of TTFT and TPOT, and SLO violations over the scale of the SLO. `cdf` is figure 11 of
Andes: the distributions of TTFT, TPOT and QoE over requests. The same data gives the same bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shared.errors import StartupError
from sim.experiment.records import Records
from sim.experiment.result import RunResult
from sim.experiment.series import (
    SHARES,
    best_median,
    cdf,
    slo_violations,
    windowed_max,
    windowed_mean,
    windowed_tokens_per_s,
)
from sim.experiment.summary import PERCENTILES
from sim.workload.workload import F64

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_WINDOWS: Final = 48
"""Windows over the time of the longest run."""
NUM_PEAKS: Final = 144
"""Of a sampled quantity, over the same time."""
SLO_SCALES: Final = np.arange(1.0, 10.5, 0.5)
_SETTINGS: Final[Any] = {"svg.hashsalt": "sluice", "svg.fonttype": "none", "path.simplify_threshold": 1.0}
_Results = Mapping[str, RunResult]


def check_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
        StartupError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("figures need matplotlib", "Install it with `pip install matplotlib`, or leave out --plot")


def write_plots(results: _Results, folder: Path, title: str, bounds: Collection[str] = ()) -> list[Path]:
    """Write every figure into the folder, which is made if need be, and return the files.

    Args:
        results: runs of one workload by system, the baseline first.
        folder: where files of the same names are written over.
        title: stands above each figure.
        bounds: systems whose memory never runs out, of which none is the best baseline.

    Raises:
        StartupError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    check_matplotlib()
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    drawings: Mapping[str, Callable[[_Results], Figure]] = {
        "timeline": _timeline,
        "latency": partial(_latency, bounds=bounds),
        "cdf": _cdfs,
    }
    files = []
    with mpl.rc_context(_SETTINGS):
        for name, draw in drawings.items():
            figure = draw(results)
            figure.suptitle(title, fontsize="medium")
            for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                files.append(folder / f"{name}.{ending}")
                figure.savefig(files[-1], dpi=150, metadata=metadata)
    return files


def _figure(num_rows: int, num_columns: int, size: tuple[float, float], *, share_x: bool = False) -> tuple[Figure, Any]:
    """Return a figure and [num_rows][num_columns] axes; it belongs to no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, sharex=share_x)


def _timeline(results: _Results) -> Figure:
    figure, axes = _figure(5, 1, (8, 10), share_x=True)
    memory, waiting, ttft, qoe, throughput = axes[:, 0]
    last_s = max(float(result.records.token_s.max(initial=0.0)) for result in results.values())
    window_s = (last_s or 1.0) / NUM_WINDOWS
    for name, result in results.items():
        records = result.records.real_time
        ttft.plot(*windowed_mean(records.arrival_s, records.ttft_s, window_s), lw=1)
        qoe.plot(*windowed_mean(records.arrival_s, records.qoe, window_s), lw=1)
        (line,) = throughput.plot(*windowed_tokens_per_s(records, window_s), label=name, lw=1)
        if (beside := result.records.select(result.records.is_best_effort)).token_s.size:
            throughput.plot(*windowed_tokens_per_s(beside, window_s), ls="--", color=line.get_color(), lw=1)
        if (samples := result.samples) is not None:
            look: Any = {"color": line.get_color(), "lw": 1}
            peaks = partial(windowed_max, samples.at_s, window_s=(last_s or 1.0) / NUM_PEAKS)
            memory.plot(*peaks(100 * samples.demanded_blocks / samples.num_blocks), **look)
            memory.plot(*peaks(100 * samples.used_blocks / samples.num_blocks), ls=":", **look)
            waiting.plot(*peaks(samples.num_waiting), **look)
    memory.axhline(100, color="black", lw=0.6)
    _label(memory, "", "KV demand, % of memory\n(dotted: held)")
    _label(waiting, "", "requests waiting\nor preempted")
    _label(ttft, "", f"mean TTFT, s\n(arrivals of {window_s:.3g} s)")
    _label(qoe, "", "mean QoE")
    _label(throughput, "seconds", "output tokens/s\n(dashed: best effort)")
    throughput.legend(fontsize="small")
    return figure


def _latency(results: _Results, bounds: Collection[str]) -> Figure:
    figure, axes = _figure(2, 2, (10, 7))
    figures: list[tuple[str, Callable[[Records], F64]]] = [
        ("TTFT", lambda records: records.ttft_s),
        ("TPOT", lambda records: records.tpot_s),
    ]
    for (bars, curve), (title, values_of) in zip(axes, figures, strict=True):
        values = {name: values_of(result.records.real_time) for name, result in results.items()}
        _draw_percentiles(bars, values, title)
        unit_s = best_median(values, bounds)
        for name, each in values.items():
            if unit_s is not None:
                curve.plot(SLO_SCALES, 100 * slo_violations(each, unit_s * SLO_SCALES), marker=".", label=name)
        _label(curve, "SLO scale (× the best baseline's P50)", f"{title} SLO missed, %")
    axes[0, 0].set_yscale("log")  # from an idle system's prefill to the queue of an overrun one
    axes[0, 1].legend(fontsize="small")
    return figure


def _draw_percentiles(axes: Axes, values: Mapping[str, F64], title: str) -> None:
    width = 0.8 / len(values)
    places = np.arange(len(PERCENTILES))
    for i, (name, each) in enumerate(values.items()):
        known = each[~np.isnan(each)]
        if known.size:
            axes.bar(places + i * width, np.percentile(known, list(PERCENTILES.values())), width, label=name)
    axes.set_xticks(places + 0.4 - width / 2, [f"P{percent:g}" for percent in PERCENTILES.values()])
    _label(axes, "", f"{title}, s")


def _cdfs(results: _Results) -> Figure:
    figure, axes = _figure(1, 3, (12, 4))
    for name, result in results.items():
        records = result.records.real_time
        for place, values in zip(axes[0], (records.ttft_s, records.tpot_s, records.qoe), strict=True):
            place.plot(*cdf(values), label=name, lw=1)
    for place, title in zip(axes[0], ("TTFT, s", "TPOT, s", "QoE"), strict=True):
        _label(place, title, "share of requests")
        if title != "QoE" and place.dataLim.xmax > 0:
            place.set_xscale("log")
    axes[0][2].set_yscale("log")  # nearly all are near 1, and the worst are what is asked for
    axes[0][2].set(xlim=(0, 1.01), ylim=(SHARES[0], 1))
    axes[0][0].legend(fontsize="small")
    return figure


def _label(axes: Axes, x_text: str, y_text: str) -> None:
    axes.set_xlabel(x_text)
    axes.set_ylabel(y_text)
    axes.grid(visible=True, lw=0.3)
    axes.tick_params(which="both", bottom=False, left=False)  # the grid shows where they are
