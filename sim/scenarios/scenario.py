"""One scenario: a cluster, its load, and what the source leaves open; flags may change it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict, Unpack

from pydantic import Field, ValidationError, model_validator

from shared.errors import StartupError
from shared.process.config_fields import did_you_mean
from shared.systems import SYSTEMS, Memory, UnknownSystemError, find_system
from shared.types import LatencyLimits
from sim.catalog.instance import CatalogInstance, find_instance
from sim.scenarios.arrivals import RECORDED, RepeatedBurstArrivals
from sim.scenarios.load import LoadSpec
from sim.scenarios.parts import AndesReaders, FixedReaders, HostSpec, SloSpec
from sim.scenarios.variants import Variant
from sim.workload.workload import Workload

_Count = Annotated[int, Field(ge=1)]


class Overrides(TypedDict, total=False):
    """What flags may change; see the fields of `Scenario` and `LoadSpec`."""

    model: str | None
    gpu: str | None
    tp: int | None
    instances: int | None
    era_ms: float | None
    trace: Path | None
    """A CSV file whose times replace the arrivals; all of them, unless there is a window too."""
    window_s: tuple[float, float] | None
    """The part of a trace that is taken; requests arrive for its length, unless there is a duration too."""
    rate_per_s: float | None
    """Of arrivals that are drawn."""
    upscale: float | None
    lengths: str | None
    lengths_scale: float | None
    duration_s: float | None
    warm_up_s: float | None
    reader: FixedReaders | AndesReaders | None
    slo: SloSpec | None
    kv_tokens: int | None
    max_batch_tokens: int | None
    max_batch_rows: int | None
    systems: tuple[str, ...] | None


class Scenario(LoadSpec):
    """A cluster and what is asked of it. Every field may be set in a file."""

    title: str = ""
    """One line for reports."""
    paper: str = ""
    """Where the setting is described; empty if nowhere."""
    model: str
    """Name in the catalogue."""
    gpu: str
    """Name in the catalogue."""
    tp: _Count | None = None
    """GPUs per instance; None: the fewest for which there is a cost profile and that hold the model."""
    instances: _Count
    era_ms: Annotated[float, Field(ge=0)] = 0.0
    """CPU time per step of the engine that is imitated: 0 to 1 with graphs and an asynchronous scheduler, 3 to 5 for
    vLLM 0.6 and what is like it."""
    max_batch_tokens: _Count = 2048
    """Most tokens that one step computes."""
    max_batch_rows: _Count = 256
    """Most sequences in one step."""
    kv_tokens: _Count | None = None
    """Token slots of one instance; None: as the catalogue computes them."""
    network_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """From one instance to another; None: as the catalogue says of the GPU."""
    hosts: HostSpec | None = None
    """Who shares a host; None: nobody."""
    slo: SloSpec | None = None
    """What counts as in time, and is told with every request that somebody waits for."""
    systems: tuple[str, ...] = ()
    """What is compared unless others are named, systems and variants; the first one is the baseline."""
    variants: dict[str, Variant] = Field(default_factory=dict)
    """Systems with something changed, by names that no system has."""
    left_open: tuple[str, ...] = ()
    """What the source leaves open, each with the choice made."""

    @model_validator(mode="after")
    def _variants_have_names_of_their_own(self) -> Self:
        for name in self.variants:
            if name in SYSTEMS:
                raise ValueError(f"variants.{name}: a system has this name; give the variant another one")
        return self

    @property
    def has_best_effort(self) -> bool:
        """Whether there are requests that nobody waits for, but for variants without them."""
        return self.best_effort is not None or self.best_effort_share > 0

    def workload(self, seed: int, traces: Path | None = None) -> Workload:
        """See `LoadSpec.workload`."""
        slo = None if self.slo is None else LatencyLimits(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s)
        return replace(super().workload(seed, traces), slo=slo)

    def variant(self, name: str) -> Variant:
        """Return what is run under this name: a variant of the scenario, or a system as it is.

        Raises:
            StartupError: there is neither.
        """
        if name in self.variants:
            return self.variants[name]
        try:
            return Variant(system=find_system(name).name)
        except UnknownSystemError as error:
            own = f"The scenario's variants are {', '.join(self.variants)}" if self.variants else ""
            raise StartupError(str(error), own) from None

    def has_unlimited_memory(self, name: str) -> bool:
        """Return whether what is run under this name bounds the others: its memory never runs out."""
        return find_system(self.variant(name).system).memory is Memory.UNLIMITED

    def instance(self) -> CatalogInstance:
        """Return the facts of one instance, with the scenario's `era_ms`, `kv_tokens` and network in their places.

        Raises:
            StartupError: the catalogue has no such model or GPU, or the model does not fit.
        """
        facts = find_instance(self.model, self.gpu, tp=self.tp)
        return replace(
            facts,
            cost=replace(facts.cost, era_s=self.era_ms / 1000),
            kv_tokens=self.kv_tokens or facts.kv_tokens,
            network_bytes_per_s=self.network_bytes_per_s or facts.network_bytes_per_s,
        )

    def with_overrides(self, **changes: Unpack[Overrides]) -> Scenario:
        """Return the scenario with what flags say instead; None leaves a value as it is.

        Another model or GPU takes its own number of GPUs per instance and its own KV memory, unless these are given.

        Raises:
            StartupError: a value is not allowed, or does not go with this scenario.
        """
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if "model" in given or "gpu" in given:
            given = {"tp": None, "kv_tokens": None, **given}
        if "trace" in given:
            given["arrivals"] = self._with_trace(given.pop("trace"))
        if "window_s" in given:
            window_s = given.pop("window_s")
            given["arrivals"] = self._with_window(window_s, given.get("arrivals"))
            given = {"duration_s": window_s[1] - window_s[0], **given}
        if "rate_per_s" in given:
            given["arrivals"] = self._with_rate(given.pop("rate_per_s"), given.get("arrivals"))
        return validated({**self.model_dump(), **given}, f"scenario {self.name}")

    def _with_trace(self, trace: Path) -> dict[str, Any]:
        if isinstance(self.arrivals, RepeatedBurstArrivals):
            return {**self.arrivals.model_dump(), "file": str(trace.absolute()), "window_s": None, "spread_s": None}
        return {"kind": "trace", "file": str(trace.absolute())}

    def _with_window(self, window_s: tuple[float, float], trace: dict[str, Any] | None) -> dict[str, Any]:
        if trace is None and not isinstance(self.arrivals, RECORDED):
            raise StartupError("a window does not go with arrivals that are drawn", "Name a trace with --trace")
        return {**(trace or self.arrivals.model_dump()), "window_s": window_s}

    def _with_rate(self, rate_per_s: float, trace: dict[str, Any] | None) -> dict[str, Any]:
        if trace is not None or isinstance(self.arrivals, RECORDED):
            raise StartupError("a rate does not go with arrivals from a trace", "Scale the trace with --upscale")
        return {**self.arrivals.model_dump(), "rate_per_s": rate_per_s}


def validated(fields: dict[str, Any], where: str) -> Scenario:
    """Return the scenario of these fields.

    Raises:
        StartupError: one is missing, unknown or not allowed; says so after `where`.
    """
    try:
        return Scenario.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        is_unknown = first["type"] == "extra_forbidden"
        message = "there is no such field" if is_unknown else first["msg"].removeprefix("Value error, ")
        hint = did_you_mean(path, Scenario.model_fields, "") if is_unknown and len(first["loc"]) == 1 else ""
        raise StartupError(f"{where}: {path + ': ' if path else ''}{message}", hint) from None
