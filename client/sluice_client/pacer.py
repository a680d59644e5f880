"""The token pacer, made here by its mode: when text that has arrived is shown. Two modes of one machine.

- `strict` (`pacer_base.py`): token i is shown exactly at displayed[i] of `qoe.py` (the paper's pacer; tests,
  benchmarks, and what a server assumes of a reader).
- `human` (`human_pacer.py`): for people. The first text at once; then word by word, as fast as text arrives, behind a
  small reserve that hides pauses; code and JSON as they come; nothing is held back once the answer has ended.

State machines without a clock, a task or a generator: every method takes the time, in seconds since the request's
arrival, and what is shown when depends on what was pushed when, not on how often or how late `pop` is called. Nothing
is ever dropped or reordered. An instant earlier than the latest one given counts as the latest. `paced_stream.py`
drives a pacer under an event loop; `client/js/pacer.js` is the same machine in JavaScript.

    push ──► waiting ──(due)──► ready ──► pop

Source: Andes (arXiv 2404.16283), section 5 (strict). Human mode is ours.
"""

from __future__ import annotations

from typing import Literal

from sluice_client.human_pacer import HumanPacer, HumanPacing
from sluice_client.pacer_base import DirectPacer, Pacer, PacerStats, Piece, Shown, StrictPacer
from sluice_client.qoe import QoeTarget

__all__ = [
    "DirectPacer",
    "HumanPacer",
    "HumanPacing",
    "PaceMode",
    "Pacer",
    "PacerStats",
    "Piece",
    "Shown",
    "StrictPacer",
    "make_pacer",
]

PaceMode = Literal["strict", "human"]


def make_pacer(mode: PaceMode | None, target: QoeTarget | None = None, pacing: HumanPacing | None = None) -> Pacer:
    """The pacer of a mode; None passes text on as it arrives.

    Args:
        mode: "strict", "human" or None.
        target: what the reader expects; the default is the paper's mean reader.
        pacing: parameters of human mode; the other modes have none.

    Raises:
        ValueError: there is no such mode.
    """
    target = target or QoeTarget()
    if mode is None:
        return DirectPacer(target)
    if mode == "strict":
        return StrictPacer(target)
    if mode == "human":
        return HumanPacer(target, pacing)
    raise ValueError(f"pace must be 'strict', 'human' or None, not {mode!r}")
