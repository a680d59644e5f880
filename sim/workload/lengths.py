"""How long prompts and answers are: named distributions, fitted to what the papers publish about their data sets.

Every family turns a standard normal score into a length, monotonically; so one rank correlation joins prompt and answer
whatever their families are. What each name stands for, and what had to be assumed, is in `lengths.toml`.
"""

from __future__ import annotations

import math
import re
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shared.types import Value
from sim.names import unknown_name
from sim.workload.clipped_log_normal import fit_log_normal
from sim.workload.workload import F64, I32

_FILE: Final = Path(__file__).with_name("lengths.toml")
_FIXED: Final = re.compile(r"(\d{1,7})x(\d{1,7})")
_Tokens = Annotated[float, Field(ge=1)]


class Quantiles(Value):
    """A quantile function through stated percentiles, with the stated mean.

    Between two neighbours (p0, v0) and (p1, v1) it is v0 + (v1 - v0) f(t) with t = (p - p0) / (p1 - p0). The shape f is
    the same everywhere and makes the mean right, by its own mean m: t^(1/m - 1) if m is at most 1/2, else the mirrored
    1 - (1 - t)^(m/(1-m)). So its slope is finite at every stated percentile.
    """

    kind: Literal["quantiles"]
    mean: _Tokens
    percentiles: dict[str, _Tokens]
    """Percent to tokens, from "0" (smallest) to "100" (largest)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        points, values = self._points, self._values
        if points[0] != 0 or points[-1] != 1 or bool(np.any(np.diff(points) <= 0) or np.any(np.diff(values) < 0)):
            raise ValueError("the percentiles must ascend from 0 to 100")
        if not float(np.diff(points) @ values[:-1]) < self.mean < float(np.diff(points) @ values[1:]):
            raise ValueError("no distribution has this mean and these percentiles")
        return self

    @property
    def _points(self) -> F64:
        return np.array([float(percent) / 100 for percent in self.percentiles])

    @property
    def _values(self) -> F64:
        return np.array(list(self.percentiles.values()))

    @cached_property
    def shape_mean(self) -> float:
        """The m of every segment, between 0 and 1."""
        weights, values = np.diff(self._points), self._values
        return float((self.mean - weights @ values[:-1]) / (weights @ np.diff(values)))

    def tokens(self, scores: F64) -> F64:
        """Return the lengths at these standard normal scores."""
        points, values, p = self._points, self._values, _normal_cdf(scores)
        i = np.clip(np.searchsorted(points, p, side="right") - 1, 0, points.size - 2)
        t, m = (p - points[i]) / (points[i + 1] - points[i]), self.shape_mean
        shape = t ** (1 / m - 1) if m <= 0.5 else 1 - (1 - t) ** (m / (1 - m))
        return values[i] + (values[i + 1] - values[i]) * shape


class LogNormal(Value):
    """A log-normal distribution cut at `max` (longer ones become `max`); mean and deviation are those after the cut."""

    kind: Literal["log-normal"]
    mean: _Tokens
    std: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation, tokens."""
    sigma: Annotated[float, Field(gt=0)] | None = None
    """Instead of it: deviation of the logarithm, before the cut."""
    max: _Tokens

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if (self.std is None) == (self.sigma is None):
            raise ValueError("either std or sigma")
        return self

    @cached_property
    def parameters(self) -> tuple[float, float]:
        """Mean and deviation of the logarithm."""
        return fit_log_normal(self.mean, self.max, std=self.std, sigma=self.sigma)

    def tokens(self, scores: F64) -> F64:
        """Return the lengths at these standard normal scores."""
        mu, sigma = self.parameters
        return np.minimum(np.exp(mu + sigma * scores), self.max)


class Uniform(Value):
    """Every whole number from `low` to `high` alike."""

    kind: Literal["uniform"]
    low: _Tokens
    high: _Tokens

    def tokens(self, scores: F64) -> F64:
        """Return the lengths at these standard normal scores."""
        count = self.high - self.low + 1
        return np.minimum(self.low + np.floor(count * _normal_cdf(scores)), self.high)


_Family = Annotated[Quantiles | LogNormal | Uniform, Field(discriminator="kind")]


class Lengths(Value):
    """Joint distribution of the tokens of a prompt and of its answer."""

    title: str
    source: str
    """Where the figures stand."""
    assumed: str = ""
    """What the source leaves open, and the choice made."""
    input: _Family
    output: _Family
    rank_correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    """Spearman's, between prompt and answer."""

    @property
    def max_tokens(self) -> int:
        """The longest prompt and the longest answer together."""
        highest = np.array([np.inf])
        return int(_whole(self.input.tokens(highest))[0]) + int(_whole(self.output.tokens(highest))[0])

    def sample(self, count: int, random: np.random.Generator) -> tuple[I32, I32]:
        """Return prompt and output tokens, [count] each, at least 1."""
        scores, other = random.standard_normal((2, count))
        pearson = 2 * math.sin(math.pi / 6 * self.rank_correlation)  # of normal scores with that rank correlation
        joined = pearson * scores + math.sqrt(1 - pearson * pearson) * other
        return _whole(self.input.tokens(scores)), _whole(self.output.tokens(joined))


@cache
def named_lengths() -> dict[str, Lengths]:
    """Return the distributions by name."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {name: Lengths.model_validate(table) for name, table in tables.items()}


def find_lengths(name: str) -> Lengths:
    """Return a distribution by name; `512x128` is 512 prompt and 128 output tokens, always.

    Raises:
        StartupError: there is none of this name.
    """
    if match := _FIXED.fullmatch(name):
        sizes = [max(1, int(text)) for text in match.groups()]
        fixed = [Uniform(kind="uniform", low=size, high=size) for size in sizes]
        return Lengths(title=name, source="given", input=fixed[0], output=fixed[1])
    if name not in named_lengths():
        raise unknown_name("there are no lengths", name, named_lengths(), "fixed ones as 512x128")
    return named_lengths()[name]


def fit_context(num_prompt: I32, num_output: I32, max_tokens: int) -> tuple[I32, I32]:
    """Return the lengths cut so that prompt and answer together fit; an answer gets at most half.

    Args:
        num_prompt: [count].
        num_output: [count].
        max_tokens: 2 or more.
    """
    output = np.minimum(num_output, max_tokens // 2).astype(np.int32)
    return np.minimum(num_prompt, max_tokens - output).astype(np.int32), output


def _whole(tokens: F64) -> I32:
    return np.maximum(np.rint(tokens), 1).astype(np.int32)


def _normal_cdf(scores: F64) -> F64:
    return 0.5 * (1 + np.array([math.erf(x) for x in (scores / math.sqrt(2)).tolist()]))
