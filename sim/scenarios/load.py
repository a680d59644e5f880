"""What is asked of a cluster: who asks when, for how much, and who reads; drawn by seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from shared.api_keys import Tier
from shared.errors import StartupError
from shared.types import Value
from sim.scenarios.arrivals import RECORDED, Arrivals, TraceArrivals
from sim.scenarios.parts import BestEffortLoad, Readers, ThinkingLoad
from sim.scenarios.streams import Streams
from sim.workload.lengths import find_lengths, fit_context
from sim.workload.trace import Trace, dealt
from sim.workload.workload import F64, I32, U8, Workload, best_effort_of


class LoadSpec(Value):
    """The requests of an experiment. Every field may be set in a scenario's file."""

    name: str
    arrivals: Arrivals
    lengths: str
    """A name of `sim/workload/lengths.toml`, `512x128`, `trace` for the trace's own, or `trace:conversation` for those
    of its rows of that log type."""
    lengths_scale: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies prompts and answers."""
    upscale: Annotated[float, Field(ge=0)] = 1.0
    """Multiplies the load: a trace by TraceUpscaler's rule, a drawn load by its rate."""
    duration_s: Annotated[float, Field(gt=0)] | None = None
    """Requests arrive before this; None: until the trace ends."""
    warm_up_s: Annotated[float, Field(ge=0)] = 0.0
    """Requests that arrive before this run, and are left out of the figures."""
    reader: Readers | None = None
    """Who reads the answers; None: nobody, and there is no QoE."""
    thinking: ThinkingLoad | None = None
    """Whose answers think first; None: nobody's."""
    best_effort: BestEffortLoad | None = None
    """What is always there beside the requests that arrive."""
    best_effort_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the requests that arrive, those that nobody waits for."""
    max_request_tokens: Annotated[int, Field(ge=2)] = 131_072
    """Longest prompt and answer together; longer ones are cut, the answer to half of it at most."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.duration_s is None and not isinstance(self.arrivals, TraceArrivals):
            raise ValueError("duration_s is needed: only a trace ends by itself")
        return self

    def workload(self, seed: int, traces: Path | None = None) -> Workload:
        """Return the requests that this seed draws. Arrivals, lengths and readers do not depend on each other's choice.

        Args:
            seed: 0 or more.
            traces: folder of the trace that `arrivals` names, if it names one.

        Raises:
            StartupError: the trace cannot be found or read, the lengths are unknown, or no request arrives.
        """
        streams = Streams(seed)
        trace = self.arrivals.read(traces) if isinstance(self.arrivals, RECORDED) else None
        until_s = math.inf if self.duration_s is None else self.duration_s
        arrival_s = self.arrivals.times(trace, self.upscale, until_s, streams)
        num_prompt, num_output = self._lengths(arrival_s.size, trace, streams.lengths)
        if not arrival_s.size:
            raise StartupError(f"no request arrives in scenario {self.name}", "Raise --upscale or --duration")
        order = np.argsort(arrival_s, kind="stable")
        num_prompt, num_output = fit_context(num_prompt[order], num_output[order], self.max_request_tokens)
        is_flex = streams.best_effort.random(arrival_s.size) < self.best_effort_share
        tier = np.where(is_flex, Tier.FLEX, Tier.DEFAULT).astype(np.uint8)
        ttft_s, speed = self._readers(num_prompt, tier, streams.readers)
        num_thinking = self._thinking(self.max_request_tokens - num_prompt - num_output, tier, streams.thinking)
        return Workload(
            name=self._describe(trace),
            arrival_s=arrival_s[order],
            num_prompt=num_prompt,
            num_output=num_output + num_thinking,
            num_thinking=num_thinking,
            qoe_ttft_s=ttft_s,
            qoe_speed=speed,
            tier=tier,
            seed=seed,
            best_effort=None if self.best_effort is None else self.best_effort.source(self.max_request_tokens, seed),
        )

    def _lengths(self, count: int, trace: Trace | None, random: np.random.Generator) -> tuple[I32, I32]:
        """Return prompt and output tokens of `count` requests, [count] each."""
        if self.lengths == "trace" or self.lengths.startswith("trace:"):
            lengths = _recorded_lengths(count, trace, self.lengths.partition(":")[2])
        else:
            lengths = find_lengths(self.lengths).sample(count, random)
        num_prompt, num_output = (np.maximum(np.rint(column * self.lengths_scale), 1) for column in lengths)
        return num_prompt.astype(np.int32), num_output.astype(np.int32)

    def _readers(self, num_prompt: I32, tier: U8, random: np.random.Generator) -> tuple[F64, F64]:
        """Return what each request's reader expects; NaN where nobody reads."""
        if self.reader is None:
            return np.full(num_prompt.size, np.nan), np.full(num_prompt.size, np.nan)
        ttft_s, speed = self.reader.draw(num_prompt, random)
        is_read = ~best_effort_of(tier)
        return np.where(is_read, ttft_s, np.nan), np.where(is_read, speed, np.nan)

    def _thinking(self, room: I32, tier: U8, random: np.random.Generator) -> I32:
        """Return how many tokens each answer thinks first.

        Args:
            room: [n] most tokens that each may.
            tier: [n] nobody waits for what is best effort: it does not think.
            random: of these alone.
        """
        if self.thinking is None:
            return np.zeros(room.size, dtype=np.int32)
        return np.where(best_effort_of(tier), 0, np.minimum(self.thinking.draw(room.size, random), room))

    def _describe(self, trace: Trace | None) -> str:
        source = self.arrivals.kind if trace is None else trace.name
        scale = "" if self.lengths_scale == 1 else f" x{self.lengths_scale:g}"
        thinks = "" if self.thinking is None else f", {self.thinking.share:.0%} think {self.thinking.tokens:g} tokens"
        return f"{source} x{self.upscale:g}, {self.lengths} lengths{scale}{thinks.replace('%', ' %')}"


def _recorded_lengths(count: int, trace: Trace | None, log_type: str) -> tuple[I32, I32]:
    """Return the lengths of the trace's records in their order, again from the first when they run out.

    Args:
        count: arrivals that get one.
        trace: of the arrivals.
        log_type: takes its records only; empty takes all.
    """
    if trace is None:
        raise StartupError("lengths 'trace' need arrivals from a trace", "Pass --trace FILE, or name --lengths")
    chosen = np.array([i for i, kind in enumerate(trace.log_type) if log_type in ("", kind)], dtype=np.int64)
    if not chosen.size:
        known = ", ".join(sorted(set(trace.log_type) - {""})) or "none"
        raise StartupError(f"trace {trace.name} has no row of log type '{log_type[:40]}'", f"It has {known}")
    record = chosen[dealt(chosen.size, count)]
    return trace.num_prompt[record], trace.num_output[record]
