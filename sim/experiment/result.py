"""What one run leaves, simulated or live, from which summaries and figures are made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sim.experiment.records import Records
from sim.experiment.summary import SystemFacts
from sim.workload.workload import F64


@dataclass(frozen=True, slots=True)
class Samples:
    """The cluster by period; every column is [num_samples]."""

    at_s: F64
    """Seconds since the beginning of the workload."""
    used_blocks: F64
    """KV blocks that sequences hold, over all instances."""
    demanded_blocks: F64
    """These, and the blocks that sequences need which wait or were preempted, at workers and in the dispatcher."""
    num_blocks: F64
    """KV blocks that there are."""
    num_running: F64
    num_waiting: F64
    """Waiting and preempted ones at workers, and waiting ones in the dispatcher."""
    num_gpus: F64
    """GPUs of the instances that can take requests."""
    num_busy_gpus: F64
    """Of these, GPUs of the instances that have any."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run left."""

    records: Records
    facts: SystemFacts
    samples: Samples | None = None
    """None where nobody looked into the system while it ran."""
    num_steps: int | None = None
    """Steps of all engines; None where nobody counted them."""
