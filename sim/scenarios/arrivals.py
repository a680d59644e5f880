"""How the requests of a scenario arrive: one class per `kind` of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from shared.errors import StartupError
from shared.reading import is_file
from shared.types import Value
from sim.scenarios.streams import Streams
from sim.workload.arrivals import cyclic_bursts, one_burst, poisson
from sim.workload.trace import Trace, read_trace, repeated_window, spread, upscaled
from sim.workload.workload import F64

_Seconds = Annotated[float, Field(ge=0)]
_Rate = Annotated[float, Field(gt=0)]


class _Recorded(Value):
    """Times from a file."""

    file: str
    """A trace's CSV file: an absolute path, or relative to the folder of traces or to the present folder."""
    window_s: tuple[_Seconds, _Seconds] | None = None
    """Start and end of the part that is taken, seconds from its first request on; the start becomes 0. None: all."""
    spread_s: _Seconds | None = None
    """Each arrival moves later by up to this; None is 1 s if all times of the file are whole seconds, else 0."""

    @model_validator(mode="after")
    def _has_length(self) -> Self:
        if self.window_s is not None and self.window_s[1] <= self.window_s[0]:
            raise ValueError("window_s must end after it starts")
        return self

    def read(self, traces: Path | None) -> Trace:
        """Return the trace, or the window of it that is taken.

        Args:
            traces: folder in which to look first.

        Raises:
            StartupError: the file is not there, or is no trace, or the window holds no request.
        """
        path = Path(self.file)
        folders = [Path()] if path.is_absolute() or traces is None else [traces, Path()]
        found = next((folder / path for folder in folders if is_file(folder / path)), None)
        if found is not None:
            trace = read_trace(found)
            return trace if self.window_s is None else trace.window(*self.window_s)
        if path.is_absolute():
            raise StartupError(f"there is no trace {path}", "Name a .csv file")
        where = " or ".join(str(folder) if folder == traces else "the present folder" for folder in folders)
        hint = "Pass its folder with --traces or another trace with --trace; docs/design/scenarios.md says whence"
        raise StartupError(f"the trace {path} is not in {where}, and does not ship", hint)

    def _times(self, trace: Trace | None, upscale: float, streams: Streams) -> F64:
        assert trace is not None, "arrivals of a trace need the trace"
        times = upscaled(trace.arrival_s, upscale, streams.arrivals)
        resolution_s = 1.0 if trace.has_whole_seconds else 0.0
        spread_s = resolution_s if self.spread_s is None else self.spread_s
        return spread(times, spread_s, streams.spread) if spread_s else times


class _Burst(Value):
    """When the burst is."""

    burst_start_s: _Seconds
    burst_end_s: _Seconds

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if self.burst_end_s <= self.burst_start_s:
            raise ValueError("burst_end_s must be after burst_start_s")
        return self


class TraceArrivals(_Recorded):
    """The times of a recorded trace."""

    kind: Literal["trace"]

    def times(self, trace: Trace | None, upscale: float, duration_s: float, streams: Streams) -> F64:
        """Return the arrivals before `duration_s`, seconds, ascending."""
        times = self._times(trace, upscale, streams)
        return times[times < duration_s]


class RepeatedBurstArrivals(_Recorded, _Burst):
    """The times of a recorded trace up to the end of a burst, and then this burst again and again.

    Source: KunServe, version 2, section 5.5.
    """

    kind: Literal["repeated-burst"]

    def times(self, trace: Trace | None, upscale: float, duration_s: float, streams: Streams) -> F64:
        """Return the arrivals before `duration_s`, seconds, ascending."""
        return repeated_window(self._times(trace, upscale, streams), self.burst_start_s, self.burst_end_s, duration_s)


class PoissonArrivals(Value):
    """A steady load."""

    kind: Literal["poisson"]
    rate_per_s: _Rate

    def times(self, trace: Trace | None, upscale: float, duration_s: float, streams: Streams) -> F64:
        """Return the arrivals before `duration_s`, seconds, ascending."""
        return poisson([(duration_s, self.rate_per_s * upscale)], streams.arrivals)


class OneBurstArrivals(_Burst):
    """A steady load with one burst."""

    kind: Literal["one-burst"]
    rate_per_s: _Rate
    """Outside the burst."""
    factor: Annotated[float, Field(ge=1)]
    """Rate in the burst over the rate outside."""

    def times(self, trace: Trace | None, upscale: float, duration_s: float, streams: Streams) -> F64:
        """Return the arrivals before `duration_s`, seconds, ascending."""
        rate = self.rate_per_s * upscale
        return poisson(one_burst(rate, self.factor, self.burst_start_s, self.burst_end_s, duration_s), streams.arrivals)


class CyclicBurstArrivals(Value):
    """Bursts in a cycle.

    Source: Andes, section 6.3.
    """

    kind: Literal["cyclic-bursts"]
    rate_per_s: _Rate
    """Mean over a cycle."""
    intensity: Annotated[float, Field(ge=1)] = 2.0
    """Rate in the burst over the mean rate."""
    burst_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.35
    """Share of the cycle that the burst lasts."""
    cycle_s: Annotated[float, Field(gt=0)] = 1200.0

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.intensity * self.burst_ratio > 1:
            raise ValueError("intensity * burst_ratio must be at most 1, else the calm part has a negative rate")
        return self

    def times(self, trace: Trace | None, upscale: float, duration_s: float, streams: Streams) -> F64:
        """Return the arrivals before `duration_s`, seconds, ascending."""
        rate = self.rate_per_s * upscale
        return poisson(
            cyclic_bursts(rate, self.intensity, self.burst_ratio, self.cycle_s, duration_s), streams.arrivals
        )


Arrivals = Annotated[
    TraceArrivals | RepeatedBurstArrivals | PoissonArrivals | OneBurstArrivals | CyclicBurstArrivals,
    Field(discriminator="kind"),
]
RECORDED: Final = (TraceArrivals, RepeatedBurstArrivals)
"""Kinds that need a trace."""
