"""Cold data of one sequence: what no step touches."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.worker.contract.arrays import EMPTY_I32, I32
from shared.ids import RequestId
from shared.types import FinishReason, SamplingParams

SequenceKey = tuple[RequestId, int]
"""A request and its attempt."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """What a row's Python side keeps."""

    key: SequenceKey
    prompt: I32
    """[num_prompt]"""
    sampling: SamplingParams
    cache_salt: str
    first_choice: RequestId
    """Its own id, or that of the request's first choice (n > 1)."""


class FinishedStore:
    """Outputs of the sequences that ended last, for replays. Bounded: the oldest is forgotten first."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[SequenceKey, tuple[I32, FinishReason]] = OrderedDict()

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._kept

    def add(self, key: SequenceKey, tokens: I32, finish: FinishReason) -> None:
        """Keep the outputs of an ended sequence."""
        self._kept[key] = (tokens, finish)
        if len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    def find(self, key: SequenceKey, first_index: int) -> tuple[I32, FinishReason] | None:
        """Return outputs from an index on and the reason of the end, or None if they are forgotten."""
        found = self._kept.get(key)
        if found is None:
            return None
        tokens, finish = found
        return (tokens[first_index:] if first_index < tokens.size else EMPTY_I32), finish
