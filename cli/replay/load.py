"""The workload of a replay: the one that a simulation of the same trace, flags and seed has. Pure but for the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sim.scenarios.arrivals import TraceArrivals
from sim.scenarios.load import Load
from sim.scenarios.parts import FixedReaders
from sim.workload.lengths import fit_context as fit_lengths
from sim.workload.workload import I32, Workload


def load_workload(
    trace: Path,
    *,
    upscale: float = 1.0,
    lengths: str = "",
    duration_s: float | None = None,
    reader: tuple[float, float] = (1.0, 4.8),
    seed: int = 0,
) -> Workload:
    """Return the requests of a trace: arrivals and lengths are those of `sluice compare --trace` with the same flags.

    Args:
        trace: a .csv file.
        upscale: load in multiples of the trace's own.
        lengths: a named distribution; empty: the trace's own lengths.
        duration_s: later arrivals are left out; None: the whole trace.
        reader: seconds to the first token, then tokens per second.
        seed: of what is drawn.

    Raises:
        StartupError: the file is no trace, there are no such lengths, or no request is left.
    """
    load = Load(
        name=trace.stem,
        arrivals=TraceArrivals(kind="trace", file=str(trace.absolute())),
        lengths=lengths or "trace",
        upscale=upscale,
        duration_s=duration_s,
        reader=FixedReaders(kind="fixed", ttft_s=reader[0], speed=reader[1]),
    )
    return load.workload(seed)


def fit_context(workload: Workload, max_tokens: int, *, is_exact: bool) -> tuple[Workload, int]:
    """Return the requests cut to a model's context, and how many had to be cut.

    Args:
        workload: as the trace wants it.
        max_tokens: of prompt and answer together; 2 or more.
        is_exact: whether prompts are as long as asked; else a twentieth of the room stays free.
    """
    num_prompt, num_output = fit_lengths(workload.num_prompt, workload.num_output, max_tokens)
    if not is_exact:
        num_prompt = _at_most(num_prompt, (max_tokens - num_output) * 19 // 20)
    is_cut = (num_prompt != workload.num_prompt) | (num_output != workload.num_output)
    return replace(workload, num_prompt=num_prompt, num_output=num_output), int(is_cut.sum())


def _at_most(lengths: I32, most: I32) -> I32:
    return np.minimum(lengths, np.maximum(most, 1)).astype(np.int32)
