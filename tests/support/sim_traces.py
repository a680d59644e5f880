"""Synthetic traces for tests of workloads: the real ones do not ship."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TRACES = Path(__file__).parents[1] / "data" / "traces"
"""Small ones that are committed."""


def write_trace(path: Path, *, duration_s: int, num_requests: int, is_whole: bool = True) -> Path:
    """Write a trace with this many requests, first at 0 and last at `duration_s`; return its path."""
    random = np.random.default_rng(num_requests)
    times = np.sort(random.random(num_requests)) * duration_s
    times = np.floor(times) if is_whole else times
    times[0], times[-1] = 0.0, duration_s
    lines = ["arrival_s,input_tokens,output_tokens,log_type"]
    for i, time_s in enumerate(times.tolist()):
        kind = "conversation" if i % 3 else "api"
        lines.append(f"{time_s},{random.integers(1, 2000)},{random.integers(1, 900)},{kind}")
    path.write_text("\n".join([*lines, ""]))
    return path
