"""Smaller parts of a scenario: who reads, what is in time, and the work that nobody waits for."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from shared.types import Value
from sim.workload.clipped_log_normal import fit_log_normal
from sim.workload.lengths import find_lengths, fit_context
from sim.workload.readers import andes_readers
from sim.workload.workload import F64, I32, BestEffort


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


class ThinkingLoad(Value):
    """Answers that think before they say anything."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Of the requests that somebody waits for."""
    tokens: Annotated[float, Field(ge=2)]
    """Mean of what they think, closing tag included; it comes before the answer, which stays as long."""
    sigma: Annotated[float, Field(gt=0)] = 0.8
    """Deviation of the logarithm."""
    max_ratio: Annotated[float, Field(gt=1)] = 8.0
    """The longest, in means."""

    def draw(self, count: int, random: np.random.Generator) -> I32:
        """Return how many tokens each of so many answers thinks; 0: it does not."""
        largest = self.tokens * self.max_ratio
        mu, sigma = fit_log_normal(self.tokens, largest, sigma=self.sigma)
        thinks = random.random(count) < self.share
        num_tokens = np.minimum(np.exp(mu + sigma * random.standard_normal(count)), largest)
        return np.where(thinks, np.maximum(np.rint(num_tokens), 2), 0).astype(np.int32)


class SloSpec(Value):
    """What counts as in time."""

    ttft_s: Annotated[float, Field(gt=0)]
    tpot_s: Annotated[float, Field(gt=0)]


class HostSpec(Value):
    """Instances that share a host, and the way between two of them."""

    instances: Annotated[int, Field(ge=1)]
    """Of each host."""
    bytes_per_s: Annotated[float, Field(gt=0)]
    """From one to another, for requests that change their instance."""


class BestEffortLoad(Value):
    """Best effort that is always there, beside the requests that people wait for; see `BestEffort`."""

    lengths: str
    """As a scenario's, but of no trace."""
    batch: Annotated[int, Field(ge=1)]
    """Requests that are submitted at once, when the batch before is done."""
    num_batches: Annotated[int, Field(ge=1)] = 1
    """Batches at a time, so that some request is under way while others of a batch have ended."""

    def source(self, max_request_tokens: int, seed: int) -> BestEffort:
        """Return its requests, the prompt and answer of none longer than `max_request_tokens`.

        Raises:
            StartupError: there are no such lengths.
        """
        lengths = find_lengths(self.lengths)

        def draw(random: np.random.Generator) -> tuple[int, int]:
            (num_prompt,), (num_output,) = fit_context(*lengths.sample(1, random), max_request_tokens)
            return int(num_prompt), int(num_output)

        max_tokens = min(lengths.max_tokens, max_request_tokens)
        return BestEffort(draw, max_tokens, self.batch, self.num_batches, seed)
