"""Names of the selectable systems, and the policies that each of them joins.

A system is a set of policy names, so that an ablation is one line here. Each service resolves the names in its own
registry; this module imports no service.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

DEFAULT_SYSTEM = "fcfs-chunked"


@dataclass(frozen=True, slots=True)
class System:
    """Policy names of one system, one per decision."""

    name: str
    scheduler: str
    """Which sequences run in the next step (worker)."""
    placement: str
    """Which instance gets a new request (dispatcher)."""


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("fcfs", scheduler="fcfs", placement="least-loaded"),
        System("fcfs-chunked", scheduler="chunked", placement="least-loaded"),
    )
}

PLANNED_SYSTEMS: tuple[str, ...] = (
    "fcfs-pp",
    "swap",
    "migrate",
    "kunserve",
    "kunserve-v1",
    "kunserve-v2",
    "andes",
    "lqsf",
    "round-robin",
    "bros",
    "best-fit",
    "worst-fit",
    "load-balance",
    "mell",
    "sluice",
    "oracle",
)
"""Named in the design, not built yet; asking for one is refused by name."""


class UnknownSystemError(ValueError):
    """The system is not built, or nobody has heard of it."""


def find_system(name: str) -> System:
    """Return the system of this name.

    Raises:
        UnknownSystemError: says whether the name is planned or unknown, and which names work today.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    available = ", ".join(SYSTEMS)
    if name in PLANNED_SYSTEMS:
        raise UnknownSystemError(f"system '{name}' is not built yet; available: {available}")
    close = get_close_matches(name, [*SYSTEMS, *PLANNED_SYSTEMS], n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise UnknownSystemError(f"unknown system '{name}'{hint} (available: {available})")
