"""A real worker with one fault built in, for tests of real processes: `python -m tests.support.odd_worker …`.

`ODD_WORKER` says which:

    poison at-accept   the process is killed when it is given the prompt POISON
    poison at-step     the same, in the step that computes a part of it
    stuck              no step ends while the file named by STUCK_FILE exists; all else in the process goes on
    pages at-apply     the process is killed when it has mapped what others handed over to it in a group that forms
    pages at-commit    the same, when it is to keep that
    other-major        it speaks another major version of the protocol
    newer-minor        what it says has fields that nobody knows
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.contract.batch import Batch
from services.worker.engine.sequence_registry import SequenceRegistry
from services.worker.executor.launched import Launched
from services.worker.executor.model_runner import ModelRunner
from services.worker.memory.page_swap import PageSwap
from shared import wire
from shared.messages import base

POISON = [5, 6, 2000, 7]
LOOK_S = 0.01
STEP_S = 0.2
"""The step that kills lasts so long: what the process said before has left it."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _poison(when: str) -> None:
    add, launch = SequenceRegistry.add, ModelRunner.launch

    def poisoned_add(self: SequenceRegistry, new: Any) -> Any:
        outcome = add(self, new)
        if new.prompt.tolist() == POISON:
            _die()
        return outcome

    def poisoned_launch(self: ModelRunner, batch: Batch, hidden: Any = None) -> Launched:
        chunks = np.split(batch.tokens, np.cumsum(batch.num_tokens)[:-1])
        parts = [(chunk.tolist(), start) for chunk, start in zip(chunks, batch.start.tolist(), strict=True)]
        # the step's budget may cut the prompt: two tokens of it in their place are enough
        if any(len(part) > 1 and part == POISON[start : start + len(part)] for part, start in parts):
            time.sleep(STEP_S)
            _die()
        return launch(self, batch, hidden)

    if when == "at-accept":
        SequenceRegistry.add = poisoned_add  # type: ignore[method-assign]
    else:
        ModelRunner.launch = poisoned_launch  # type: ignore[method-assign]


def _stuck() -> None:
    launch, file = ModelRunner.launch, Path(os.environ["STUCK_FILE"])

    def stuck_launch(self: ModelRunner, batch: Batch, hidden: Any = None) -> Launched:
        while file.exists():
            time.sleep(LOOK_S)
        return launch(self, batch, hidden)

    ModelRunner.launch = stuck_launch  # type: ignore[method-assign]


def _pages(when: str) -> None:
    apply = PageSwap.apply

    def fatal_apply(self: PageSwap) -> None:
        apply(self)
        _die()

    if when == "at-apply":
        PageSwap.apply = fatal_apply  # type: ignore[method-assign]
    else:
        PageSwap.commit = lambda self: _die()  # type: ignore[method-assign]


def _other_major() -> None:
    version = base.PROTOCOL_VERSION + 1
    base.PROTOCOL_VERSION = wire.PROTOCOL_VERSION = version  # type: ignore[attr-defined]
    base.ControlMessage.model_fields["version"].default = version
    for kind in _kinds(base.ControlMessage):
        kind.model_fields["version"].default = version
        kind.model_rebuild(force=True)


def _kinds(parent: type[base.ControlMessage]) -> list[type[base.ControlMessage]]:
    found: list[type[base.ControlMessage]] = []
    for kind in parent.__subclasses__():
        found += [kind, *_kinds(kind)]
    return found


def _newer_minor() -> None:
    dump = base.ControlMessage.model_dump
    dump_json = base.ControlMessage.model_dump_json

    def newer_dump(self: base.ControlMessage, **how: Any) -> dict[str, Any]:
        return {**dump(self, **how), "news": {"of": ["a", "later"], "version": 9}}

    def newer_dump_json(self: base.ControlMessage, **how: Any) -> str:
        return dump_json(self, **how).removesuffix("}") + ',"news":{"of":["a","later"]}}'

    base.ControlMessage.model_dump = newer_dump  # type: ignore[method-assign,assignment]
    base.ControlMessage.model_dump_json = newer_dump_json  # type: ignore[method-assign,assignment]


def main() -> None:
    """Build the fault in, then be a worker."""
    fault, _, when = os.environ["ODD_WORKER"].partition(" ")
    if fault == "poison":
        _poison(when)
    elif fault == "pages":
        _pages(when)
    else:
        {"stuck": _stuck, "other-major": _other_major, "newer-minor": _newer_minor}[fault]()

    from services.worker.__main__ import serve
    from services.worker.config import WorkerSettings
    from shared.process.service_process import run_service_process

    run_service_process("worker", WorkerSettings, serve)


if __name__ == "__main__":
    main()
