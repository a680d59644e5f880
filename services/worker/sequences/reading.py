"""How the reader's columns of a row begin: anew, or where an earlier attempt has left them. Pure.

    may think ──first token──► thinks ──closing tag──► speaks        its text begins behind `num_thought` tokens
         └────other first token──────────────────────► speaks        all of it is text

An answer that thinks has no text to read. Until its thinking ends its row is one whose reader wants every token at the
thinking's speed, the first at `ttft_s`, as if they were read: so it is served like others, and not left for those who
read. Then the sums of QoE begin anew, with the text (`shared.qoe.text_ttft_s`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Final

from services.worker.sequences.config import NewSequence
from shared.qoe import text_ttft_s
from shared.types import ReaderTarget

MOST_SPEED: Final = 20.0
"""Tokens per second, 900 words a minute; who asks for more does not read, and is the default reader for policies:
nobody buys the others' time."""
DEFAULT_READER: Final = ReaderTarget()
NO_TAG: Final = -1
"""No token's id."""


@dataclass(frozen=True, slots=True)
class ReaderColumns:
    """Of one row; see `Columns` and `SequenceTable`."""

    ttft_s: float = nan
    speed: float = nan
    gap_s: float = nan
    last_s: float = nan
    delay_sum_s: float = nan
    thinks: bool = False
    may_think: bool = False
    num_thought: int = 0
    closing_id: int = NO_TAG
    thinking_gap_s: float = nan


def first_reading(new: NewSequence) -> ReaderColumns:
    """Return how the reader's columns of a sequence begin.

    Nobody follows best effort. Else who has said nothing, or waits for the whole answer, is the default reader.
    """
    if new.tier.is_best_effort:
        return ReaderColumns()
    reader, displayed = new.qoe or DEFAULT_READER, new.displayed
    speed, thinking_gap_s = reader.speed_tokens_per_s, 1 / reader.thinking_speed_tokens_per_s
    thinking, num_tokens = new.sampling.thinking, int(new.generated.size)
    num_thought = 0 if thinking is None else thinking.count(new.generated.tolist())
    thinks = num_thought is None and (num_tokens > 0 or (thinking is not None and thinking.is_open))
    if speed > MOST_SPEED:
        speed, displayed = DEFAULT_READER.speed_tokens_per_s, displayed if thinks else None
    gap_s, ttft_s = thinking_gap_s if thinks else 1 / speed, reader.ttft_s
    if num_thought:
        ttft_s = text_ttft_s(ttft_s, speed, new.thought_s)
    last_s, delay_sum_s = displayed or (ttft_s + (num_tokens - (num_thought or 0) - 1) * gap_s, 0.0)
    return ReaderColumns(
        ttft_s=ttft_s,
        speed=speed,
        gap_s=gap_s,
        last_s=last_s,
        delay_sum_s=delay_sum_s,
        thinks=thinks,
        may_think=num_thought is None and not thinks,
        num_thought=num_thought or 0,
        closing_id=NO_TAG if thinking is None else thinking.closing_id,
        thinking_gap_s=thinking_gap_s,
    )
