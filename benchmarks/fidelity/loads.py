"""The two loads: one to fit on, one to compare on, whose lengths, rate and arrivals are others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.workload.workload import I32, Workload
from tests.support.workloads import plain_workload


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens, cut to `least` and `most`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    least: int
    most: int

    def draw(self, count: int, rng: np.random.Generator) -> I32:
        """Return [count] lengths."""
        drawn = np.rint(rng.lognormal(np.log(self.median), self.sigma, count))
        return np.clip(drawn, self.least, self.most).astype(np.int32)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """One kind of load."""

    name: str
    rate_per_s: float
    gap_variation: float
    """Standard deviation of the gaps between arrivals, divided by their mean: 1 is Poisson, more comes in bursts."""
    prompt: Lengths
    output: Lengths


FITTED = LoadShape("chat", 2.0, 1.0, Lengths(80, 1.2, 4, 1400), Lengths(60, 0.7, 4, 240))
"""Mostly short prompts, longer answers, Poisson arrivals. A few prompts are as long as any of the other load: what a
pair of prefill costs cannot be seen on short ones."""
COMPARED = LoadShape("documents", 1.2, 1.8, Lengths(220, 0.8, 16, 1400), Lengths(30, 0.6, 2, 120))
"""The typical prompt almost three times as long, the answer half as long, arrivals in bursts."""


def draw_load(shape: LoadShape, duration_s: float, seed: int) -> Workload:
    """Return the requests that arrive within a duration; arrivals, lengths and prompts are independent of each other.

    Gaps are gamma-distributed with the wanted mean and variation.
    """
    arrivals, prompts, outputs = (np.random.default_rng((seed, stream)) for stream in range(3))
    shape_k = 1 / shape.gap_variation**2
    most = int(4 * shape.rate_per_s * duration_s) + 100
    arrival_s = np.cumsum(arrivals.gamma(shape_k, 1 / (shape_k * shape.rate_per_s), most))
    arrival_s = arrival_s[arrival_s < duration_s]
    lengths = (shape.prompt.draw(arrival_s.size, prompts), shape.output.draw(arrival_s.size, outputs))
    return plain_workload(arrival_s, *lengths, seed=seed, name=shape.name)


def sequential(count: int, num_prompt: int, num_output: int, gap_s: float, seed: int) -> Workload:
    """Return equal requests, one every `gap_s`: on an idle server none meets another."""
    return plain_workload(np.arange(count) * gap_s, num_prompt, num_output, seed=seed, name="idle")
