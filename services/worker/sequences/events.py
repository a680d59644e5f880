"""What a step means for the outside: columns, one entry per sequence that got a token or ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from services.worker.contract.arrays import I32, U8, U16, U32
from shared.hot import hot_dataclass
from shared.stream_extras import TokenLogprob


@dataclass(frozen=True, slots=True)
class RowExtra:
    """What goes with one entry of the columns, now and then."""

    index: int
    """Position in the columns."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was there already; said with the first token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the entry's token, if its request asks for them."""
    moved_to: str = ""
    """Of a sequence that is released: the worker at which its KV will be."""
    num_preemptions: int = 0
    """How often its request has been preempted by now; 0: not said here."""


@hot_dataclass(frozen=True, slots=True)
class StepEvents:
    """Tokens and ends, in an order in which they may be sent. All columns have the same length."""

    channel: I32
    """Which dispatcher, as `NewSequence.channel`."""
    stream: U32
    attempt: U16
    first_index: U32
    """Index of the token in the request's output, `generated` counted; of an end without a token: the next index."""
    tokens: I32
    """-1 where the sequence ended without a token, or has only been started or preempted."""
    finish: U8
    """`shared.types.FinishReason`; 0 where the sequence goes on."""
    extras: tuple[RowExtra, ...] = ()
    """In ascending order of their index, each index at most once; empty in almost every step."""

    def __len__(self) -> int:
        return int(self.tokens.size)

    @classmethod
    def concatenate(cls, parts: Iterable[StepEvents]) -> Self | StepEvents:
        """Return the events of all parts, in order; `NO_EVENTS` if there are none."""
        filled = [part for part in parts if part.tokens.size]
        if len(filled) <= 1:
            return filled[0] if filled else NO_EVENTS
        names = [field.name for field in fields(cls) if field.name != "extras"]
        columns = {name: np.concatenate([getattr(part, name) for part in filled]) for name in names}
        return cls(**columns, extras=_join_extras(filled))


def _join_extras(parts: list[StepEvents]) -> tuple[RowExtra, ...]:
    """Return the extras of all parts, moved to where their entries are in the whole."""
    if not any(part.extras for part in parts):
        return ()
    starts = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    return tuple(
        replace(extra, index=extra.index + start)
        for part, start in zip(parts, starts, strict=False)
        for extra in part.extras
    )


NO_EVENTS = StepEvents(
    channel=np.zeros(0, dtype=np.int32),
    stream=np.zeros(0, dtype=np.uint32),
    attempt=np.zeros(0, dtype=np.uint16),
    first_index=np.zeros(0, dtype=np.uint32),
    tokens=np.zeros(0, dtype=np.int32),
    finish=np.zeros(0, dtype=np.uint8),
)
