"""Which requests a load consists of, and when each is due. Pure: the generator is an argument, nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sim.workload.trace import dealt, upscaled


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the load."""

    arrival_s: float
    """When it is due, seconds since the first one."""
    num_input: int
    """Tokens of the prompt that are aimed at; of a given text, an estimate."""
    num_output: int
    """Most tokens of the answer."""
    text: str = ""
    """The prompt, where the data set has one; empty: made up, `num_input` tokens long."""


def synthetic(num_prompts: int, num_input: int, num_output: int) -> list[Planned]:
    """Return requests of the same lengths, all due at once."""
    return [Planned(0.0, num_input, num_output) for _ in range(num_prompts)]


def poisson_arrivals(rate_per_s: float, count: int, rng: np.random.Generator) -> list[float]:
    """Return [count] instants, seconds, ascending from 0: exponential gaps, or all 0 for an infinite rate."""
    if math.isinf(rate_per_s):
        return [0.0] * count
    gaps = rng.exponential(1 / rate_per_s, size=max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def arrive_at(planned: Sequence[Planned], rate_per_s: float, rng: np.random.Generator) -> list[Planned]:
    """Return the same requests with Poisson arrivals instead of their own."""
    times = poisson_arrivals(rate_per_s, len(planned), rng)
    return [replace(request, arrival_s=time_s) for request, time_s in zip(planned, times, strict=True)]


def upscale(planned: Sequence[Planned], factor: float, rng: np.random.Generator) -> list[Planned]:
    """Return a trace with `factor` times the load and the same pattern in time.

    Requests are dealt onto the new instants in their order (`sim.workload.trace`).
    """
    times = upscaled(np.array([request.arrival_s for request in planned]), factor, rng)
    chosen = dealt(len(planned), times.size).tolist()
    return [replace(planned[i], arrival_s=time_s) for i, time_s in zip(chosen, times.tolist(), strict=True)]


def first(planned: Sequence[Planned], count: int) -> list[Planned]:
    """Return the first requests, `count` at most, with the first one due at 0."""
    chosen = planned[:count]
    return [replace(request, arrival_s=request.arrival_s - chosen[0].arrival_s) for request in chosen]


def fit_context(planned: Sequence[Planned], max_model_len: int) -> tuple[list[Planned], int]:
    """Return the requests cut to the model's context, and how many had to be cut.

    An answer gets at most half of the context. Prompts that are made up are shortened so that it has room, with a
    twentieth to spare, since words are only about as long as they should be. Given texts are left as they are: only
    their answers are shortened, to one token at least.
    """
    fitted = []
    for request in planned:
        num_output = min(request.num_output, max(1, max_model_len // 2))
        if request.text:
            num_input, num_output = request.num_input, max(1, min(num_output, max_model_len - request.num_input))
        else:
            num_input = min(request.num_input, max(1, (max_model_len - num_output) * 19 // 20))
        fitted.append(replace(request, num_input=num_input, num_output=num_output))
    return fitted, sum(old != new for old, new in zip(planned, fitted, strict=True))
