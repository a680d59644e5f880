"""Variants of systems: one of them with some policies or settings changed, by which a paper's ablation is run."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from services.planner.config import PlannerSettings
from services.worker.scheduling.registry import SCHEDULERS, make_scheduler
from shared.process.config import ServiceSettings, Size
from shared.process.config_fields import did_you_mean
from shared.systems import KvExchange, UnknownSystemError, find_system
from shared.types import Value

PLANNER_FIELDS: Final = {
    name: field
    for name, field in PlannerSettings.model_fields.items()
    if name not in ServiceSettings.model_fields and name != "system"
}
"""Settings of the planner that a variant may change."""


def _is_system(name: str) -> str:
    try:
        return find_system(name).name
    except UnknownSystemError as error:
        raise ValueError(str(error)) from None


def _is_scheduler(name: str) -> str:
    if name not in SCHEDULERS:
        raise ValueError(f"no scheduler is called '{name}'; there are: {', '.join(SCHEDULERS)}")
    return name


def _are_settings(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in PLANNER_FIELDS:
            hint = did_you_mean(name, PLANNER_FIELDS, "")
            raise ValueError(f"the planner has no setting '{name}' that a variant may change. {hint}".rstrip())
    try:
        PlannerSettings(instance_id="planner", **given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path + ': ' if path else ''}{first['msg'].removeprefix('Value error, ')}") from None
    return given


def _check_policy(name: str, settings: dict[str, Any]) -> None:
    try:
        make_scheduler(name, **settings)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"policy.{first['loc'][0]}: {first['msg']}") from None
    except TypeError:
        raise ValueError(f"policy: the scheduler '{name}' does not take {', '.join(settings)} so") from None


class Variant(Value):
    """A system, and what differs from it; with nothing changed it is that system."""

    system: Annotated[str, AfterValidator(_is_system)]
    """Name of the system (`shared.systems`)."""
    scheduler: Annotated[str, AfterValidator(_is_scheduler)] | None = None
    """Which sequences run in the next step; None: the system's policy."""
    policy: dict[str, Any] = Field(default_factory=dict)
    """Settings of that policy, by name (`services.worker.scheduling`)."""
    exchange: bool = True
    """Whether KV changes hands when groups form and dissolve; false: it is computed again, as with a live worker's
    `exchange_memory=0`."""
    kv_exchange: KvExchange | None = None
    """How KV comes to a group that forms; None: as the system has it."""
    network_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """Of each instance, each way; None: as the scenario has it."""
    host_memory: Annotated[Size, Field(ge=0)] | None = None
    """Of each instance, for KV of preempted sequences; None: 64 GiB where the system swaps, none elsewhere."""
    host_link_gb_per_s: Annotated[float, Field(gt=0)] | None = None
    """Gigabytes (10^9) per second to the host, each way; None: as the catalogue says of the GPU."""
    best_effort: bool = True
    """Whether the scenario's best effort is there; false: what people wait for, alone on the same cards."""
    planner: Annotated[dict[str, Any], AfterValidator(_are_settings)] = Field(default_factory=dict)
    """Settings of the planner (`services.planner.config`), by name."""

    @model_validator(mode="after")
    def _has_what_it_changes(self) -> Self:
        system = find_system(self.system)
        _check_policy(self.scheduler or system.scheduler, self.policy)
        if self.host_memory and not system.keeps_on_host:
            raise ValueError(f"{self.system} keeps no KV on the host; leave `host_memory` out")
        if not system.drops and not (self.exchange and self.kv_exchange is None):
            raise ValueError(f"{self.system} exchanges no KV; leave `exchange` and `kv_exchange` out")
        return self
