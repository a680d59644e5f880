"""Names of the selectable systems, and the policies that each of them joins.

A system is a set of policy names, so that an ablation is one line here. Each service resolves the names in its own
registry; this module imports no service.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Final

DEFAULT_SYSTEM = "sluice"
ROOM_FOR_GROWTH_S: Final = 5.0
"""Seconds for which all who are at a worker find room as they grow where a request is put so as to pack: longer than a
planner takes to have one of them leave."""
PACKED_STEP_S: Final = 0.1
"""Longest step of a worker that gets more so that others get less: ten tokens per second for each of its readers."""
PACKED_WAIT_S: Final = 0.25
"""Most seconds of computing prompts that wait at a worker which gets another one so that others get less."""


class Memory(StrEnum):
    """How much KV memory a worker has."""

    BOUNDED = "bounded"  # what its device holds
    UNLIMITED = "unlimited"  # as much as is asked for; only a simulated device has it


class KvExchange(StrEnum):
    """How the KV of ongoing requests comes to a pipeline group that forms."""

    COORDINATED = "coordinated"  # a request stalls until its KV has moved (KunServe v2, section 4.2)
    LIVE = "live"  # it goes on, and KV is attended where it lies until it has moved (v1, section 4.2)
    BY_PRICE = "by-price"  # either, for the requests of each worker, by what it costs them over these links


class Migrates(StrEnum):
    """When the planner has running requests go to other workers, with their KV."""

    NEVER = "never"  # beside drains
    WHEN_SHORT = "when-short"  # from workers that run short of KV memory to those with most of it
    TO_BALANCE = "to-balance"  # from the fullest worker to the emptiest, always
    TO_PACK = "to-pack"  # so that few workers are in use
    BY_CLASS = "by-class"  # the same, by size classes
    BY_CLASS_PRINTED = "by-class-printed"  # as the paper has them, to the letter


@dataclass(frozen=True, slots=True)
class System:
    """Policy names of one system, one per decision."""

    name: str
    scheduler: str
    """Which sequences run in the next step (worker)."""
    placement: str
    """Which instance gets a new request (dispatcher)."""
    swaps: bool = False
    """It is about KV that moves to the host and back: a worker without memory for that refuses it, and a simulated one
    has 64 GiB, of which the other systems have none there (unless a variant says so)."""
    recomputes: bool = False
    """It is about KV that is computed again: it keeps none on the host, live neither."""
    shares_blocks: bool = False
    """A request of real time and one of best effort may fill one KV block, from both ends; no system of groups does."""
    memory: Memory = Memory.BOUNDED
    """Where it is unlimited, the system runs in the simulator only."""
    num_stages: int = 1
    """Instances that serve one copy of the model as a pipeline, for good. Live they join when they are ready."""
    drops: bool = False
    """Under pressure the planner has workers drop replicated parameters and form pipeline groups."""
    exchange: KvExchange = KvExchange.COORDINATED
    """How KV comes to such a group (worker)."""
    migrates: Migrates = Migrates.NEVER
    """When requests change their worker (planner)."""

    def __post_init__(self) -> None:
        if self.shares_blocks and self.forms_groups:
            raise ValueError(f"system '{self.name}' forms groups, where no two requests fill one block")

    @property
    def forms_groups(self) -> bool:
        """Whether its live workers can drop parameters and serve as stages."""
        return self.drops or self.num_stages > 1

    @property
    def keeps_on_host(self) -> bool:
        """Whether KV may lie in host memory: not where the device's memory is as large as is asked for."""
        return self.memory is Memory.BOUNDED and not self.recomputes


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("fcfs", scheduler="fcfs", placement="least-loaded"),
        System("fcfs-chunked", scheduler="chunked", placement="least-loaded"),
        # vLLM with pipeline parallelism, the second baseline of KunServe: half of the parameters in each instance. The
        # simulator makes its pipelines at once; live they form as a drop does, and are never restored.
        System("fcfs-pp", scheduler="fcfs", placement="least-loaded", num_stages=2),
        System("round-robin", scheduler="round-robin", placement="least-loaded"),
        # The scheduler is the one that KunServe gave its InferCept baseline, and its own system: chunked prefill.
        System("swap", scheduler="chunked", placement="least-loaded", swaps=True),
        # Llumnix: requests move to where there is memory, when their worker runs short of it, or so that all have as
        # much. The former is what KunServe compares itself with, the latter what Mell does.
        System("migrate", scheduler="chunked", placement="least-loaded", migrates=Migrates.WHEN_SHORT),
        System("load-balance", scheduler="chunked", placement="least-loaded", migrates=Migrates.TO_BALANCE),
        # Baselines of Mell: a request goes to the fullest, or the emptiest, worker in use that has room, and stays.
        System("best-fit", scheduler="chunked", placement="best-fit"),
        System("worst-fit", scheduler="chunked", placement="worst-fit"),
        # PolyServe's: to the fullest whose steps stay short enough for all its readers.
        System("gradient", scheduler="chunked", placement="gradient"),
        # And the same where requests move, so that the fewest workers are in use.
        System("pack", scheduler="chunked", placement="pack", migrates=Migrates.TO_PACK),
        # Mell, with what its theorem needs, and as it is printed.
        System("mell", scheduler="chunked", placement="by-class", migrates=Migrates.BY_CLASS),
        System("mell-printed", scheduler="chunked", placement="by-class", migrates=Migrates.BY_CLASS_PRINTED),
        # The same scheduler, so that memory is all that differs from `fcfs-chunked` and `swap`. With memory for
        # everybody it stalls no decode and keeps nobody waiting but for computing; prefill first would reach its first
        # tokens a little earlier by making all others wait, which is a trade and no bound.
        System("oracle", scheduler="chunked", placement="least-loaded", memory=Memory.UNLIMITED),
        # Andes: readers by what they gain. The same without bounds of memory is its bound, and by gain alone its rival.
        System("andes", scheduler="andes", placement="least-loaded"),
        System("andes-unlimited", scheduler="andes", placement="least-loaded", memory=Memory.UNLIMITED),
        System("lqsf", scheduler="lqsf", placement="least-loaded"),
        # Readers as in `andes` and requests with limits, and best effort in what these leave.
        System("sluice", scheduler="sluice", placement="prefix-aware"),
        # TokenFlow, which parks in host memory: by how much text readers have unread.
        System("tokenflow", scheduler="tokenflow", placement="least-loaded", swaps=True),
        # BROS. And without blocks that two requests share: who gives way goes to the host as a whole, or is computed
        # again, as in the paper's comparison. And its round-robin, which alternates between the classes.
        System("bros", scheduler="bros", placement="least-loaded", swaps=True, shares_blocks=True),
        System("bros-whole", scheduler="bros-whole", placement="least-loaded", swaps=True),
        System("bros-recompute", scheduler="bros", placement="least-loaded", recomputes=True),
        System("bros-rr", scheduler="class-round-robin", placement="least-loaded"),
        # KunServe: `fcfs-chunked`, but for best effort, which gives way first, and replicated parameters, which give
        # way to KV under pressure. (The papers have one class of requests; without best effort it is as they say.)
        System("kunserve", scheduler="lookahead", placement="least-loaded", drops=True, exchange=KvExchange.BY_PRICE),
        # As version 1 of the paper has it: prompts are cut by token count, and KV is exchanged live.
        System(
            "kunserve-v1", scheduler="chunked-flex-last", placement="least-loaded", drops=True, exchange=KvExchange.LIVE
        ),
        # As version 2 has it.
        System("kunserve-v2", scheduler="lookahead", placement="least-loaded", drops=True),
        # With `sluice`: who has text gives way first, and parameters only once readers without text lack memory.
        System(
            "kunserve-sluice", scheduler="sluice", placement="prefix-aware", drops=True, exchange=KvExchange.BY_PRICE
        ),
    )
}


class UnknownSystemError(ValueError):
    """Nobody has heard of the system, or it cannot run where it is asked for."""


def find_system(name: str) -> System:
    """Return the system of this name.

    Raises:
        UnknownSystemError: says which names there are.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    available = ", ".join(SYSTEMS)
    close = get_close_matches(name, SYSTEMS, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise UnknownSystemError(f"unknown system '{name}'{hint} (available: {available})")


def find_live_system(name: str) -> System:
    """Return the system of this name, for a service that serves real requests.

    Raises:
        UnknownSystemError: as `find_system`, or the system exists in the simulator only.
    """
    system = find_system(name)
    if not _is_live(system):
        live = ", ".join(each.name for each in SYSTEMS.values() if _is_live(each))
        said = f"system '{name}' has unlimited KV memory, so it runs in the simulator only; live there are: {live}"
        raise UnknownSystemError(said)
    return system


def _is_live(system: System) -> bool:
    return system.memory is not Memory.UNLIMITED
