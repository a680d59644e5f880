"""What a server's `/metrics` says of its memory and queue: Prometheus text, by the names of several engines. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
"""Share of KV memory in use, 0 to 1, one series per worker: ours and vLLM's, vLLM's before 0.10, SGLang's."""
PREEMPTIONS: Final = ("vllm:num_preemptions_total", "vllm:num_preemptions")
"""Sequences whose KV was taken away, since the server's start, one series per worker."""
WAITING: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
"""Requests that wait now, preempted ones among them."""
_LINE: Final = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """What one look at `/metrics` found; None where the server has no such series."""

    kv_used_ratio: float | None = None
    """Mean over the workers."""
    num_preemptions: float | None = None
    """Since the start, of all workers."""
    num_waiting: float | None = None
    """Of all workers."""


def read_sample(text: str) -> MetricsSample:
    """Return what the text says; lines that nobody can read are passed over."""
    series: dict[str, list[float]] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.fullmatch(line)
        if found is not None and (value := _number(found[2])) is not None:
            series.setdefault(found[1], []).append(value)
    usage, preemptions, waiting = (_first(series, names) for names in (KV_USAGE, PREEMPTIONS, WAITING))
    return MetricsSample(
        None if usage is None else sum(usage) / len(usage),
        None if preemptions is None else math.fsum(preemptions),
        None if waiting is None else math.fsum(waiting),
    )


def _first(series: dict[str, list[float]], names: Sequence[str]) -> list[float] | None:
    return next((series[name] for name in names if name in series), None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
