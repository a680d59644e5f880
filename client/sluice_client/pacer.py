"""The token pacer, made here by its mode: when text that has arrived is shown. Three modes of one machine.

- `reading` (`pacer_base.py`): token i is shown exactly at displayed[i] of `qoe.py` (the paper's pacer; tests,
  benchmarks, and what a server assumes of a reader).
- `smooth` (`smooth_pacer.py`): for people. The first text at once; then word by word, as fast as text arrives, behind a
  small reserve that hides pauses; code and JSON as they come; nothing is held back once the answer has ended.

State machines without a clock, a task or a generator: every method takes the time, in seconds since the request's
arrival, and what is shown when depends on what was pushed when, not on how often or how late `pop` is called. Nothing
is ever dropped or reordered. An instant earlier than the latest one given counts as the latest. `paced_stream.py`
drives a pacer under an event loop; `client/js` has the same machine in JavaScript.

    push ──► waiting ──(due)──► ready ──► pop

Source: Andes (arXiv 2404.16283), section 5 (`reading`). Smooth mode is ours.
"""

from __future__ import annotations

from typing import Literal

from sluice_client.pacer_base import DirectPacer, Pacer, PacerStats, Piece, ReadingPacer, Shown
from sluice_client.qoe import QoeTarget
from sluice_client.smooth_pacer import SmoothPacer, SmoothPacing

__all__ = [
    "DirectPacer",
    "PaceMode",
    "Pacer",
    "PacerStats",
    "Piece",
    "ReadingPacer",
    "Shown",
    "SmoothPacer",
    "SmoothPacing",
    "make_pacer",
]

PaceMode = Literal["reading", "smooth", "off"]


def make_pacer(mode: PaceMode, target: QoeTarget | None = None, pacing: SmoothPacing | None = None) -> Pacer:
    """The pacer of a mode.

    Args:
        mode: "reading", "smooth" or "off".
        target: what the reader expects; the default is the paper's mean reader.
        pacing: parameters of smooth mode; the other modes have none.

    Raises:
        ValueError: there is no such mode.
    """
    target = target or QoeTarget()
    if mode == "off":
        return DirectPacer(target)
    if mode == "reading":
        return ReadingPacer(target)
    if mode == "smooth":
        return SmoothPacer(target, pacing)
    raise ValueError(f"pace must be 'reading', 'smooth' or 'off', not {mode!r}")
