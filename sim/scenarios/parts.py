"""Smaller parts of a scenario: who reads, what is in time, and the work that nobody waits for."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from shared.types import Value
from sim.workload.lengths import find_lengths
from sim.workload.readers import andes_readers
from sim.workload.workload import F64, I32


class FixedReaders(Value):
    """Every reader is alike."""

    kind: Literal["fixed"] = "fixed"
    ttft_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds after the arrival at which the first token is expected."""
    speed: Annotated[float, Field(gt=0)] = 4.8
    """Tokens per second."""

    def draw(self, num_prompt: I32, random: np.random.Generator) -> tuple[F64, F64]:
        """Return what each request's reader expects: time to first token, speed; [num_requests] each."""
        return np.full(num_prompt.size, self.ttft_s), np.full(num_prompt.size, self.speed)


class AndesReaders(Value):
    """Readers drawn as Andes draws them."""

    kind: Literal["andes"]

    def draw(self, num_prompt: I32, random: np.random.Generator) -> tuple[F64, F64]:
        """Return what each request's reader expects: time to first token, speed; [num_requests] each."""
        return andes_readers(num_prompt, random)


Readers = Annotated[FixedReaders | AndesReaders, Field(discriminator="kind")]


class SloSpec(Value):
    """What counts as in time."""

    ttft_s: Annotated[float, Field(gt=0)]
    tpot_s: Annotated[float, Field(gt=0)]


class BestEffortLoad(Value):
    """Batches of best-effort requests, beside the requests that people wait for.

    Source: BROS, section 7.1. Deviation: the paper submits a batch when the one before is done; here the period is
    fixed, so that all systems get the same work.
    """

    lengths: str
    """As a scenario's, but of no trace."""
    batch: Annotated[int, Field(ge=1)]
    """Requests that arrive at once."""
    period_s: Annotated[float, Field(gt=0)]
    """Seconds from batch to batch; the first arrives at 0."""

    def draw(self, duration_s: float, random: np.random.Generator) -> tuple[F64, I32, I32]:
        """Return arrivals before `duration_s` (seconds, ascending), prompt and output tokens; [count] each."""
        arrival_s = np.repeat(np.arange(0.0, duration_s, self.period_s), self.batch)
        return arrival_s, *find_lengths(self.lengths).sample(arrival_s.size, random)
