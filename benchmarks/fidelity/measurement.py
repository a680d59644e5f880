"""What one live measurement holds, as a file: the figures can be made again from it without another measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from shared.messages.steps import StepRecord
from sim.experiment.records import Records
from sim.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The live worker's own limits, which the simulated one is given."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_sequences: int
    system: str


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One load on the live cluster."""

    workload: Workload
    records: Records
    steps: tuple[StepRecord, ...]
    """Every step that the worker did for it, in order."""
    foreign_ratio: float
    """Share of the machine that others used meanwhile."""
    lateness_p99_s: float
    """By how much the client itself sent too late."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that was measured."""

    worker: WorkerFacts
    idle: LiveRun
    """Short requests one by one."""
    fitted: LiveRun
    """The load that the coefficients are fitted on."""
    compared: LiveRun
    """The load that the simulator is compared on."""

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self, default=_plain), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Measurement:
        """Return what a file holds."""
        tree = json.loads(path.read_text(encoding="utf-8"))
        runs = {name: _run_of(tree[name]) for name in ("idle", "fitted", "compared")}
        return cls(worker=WorkerFacts(**tree["worker"]), **runs)


def _plain(value: Any) -> Any:
    """Return what JSON does not know as what it does."""
    if isinstance(value, StepRecord):
        return value.model_dump(mode="json")
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _run_of(tree: dict[str, Any]) -> LiveRun:
    return LiveRun(
        workload=Workload(**_columns(tree["workload"])),
        records=Records(**_columns(tree["records"])),
        steps=tuple(StepRecord.model_validate(step) for step in tree["steps"]),
        foreign_ratio=tree["foreign_ratio"],
        lateness_p99_s=tree["lateness_p99_s"],
    )


_TYPES = {
    "num_prompt": np.int32,
    "num_output": np.int32,
    "num_thinking": np.int32,
    "tier": np.uint8,
    "token_begin": np.int64,
}
"""Of the columns that are not float64."""


def _columns(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with lists as columns again; failures are words."""
    found = dict(tree)
    for name, value in tree.items():
        if name == "failure":
            found[name] = tuple(value)
        elif isinstance(value, list):
            found[name] = np.array(value, dtype=_TYPES.get(name, np.float64))
    return found
