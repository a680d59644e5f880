"""Changes single logits before a token is chosen: logit bias, minimal length, repetition, frequency, presence.

Rows without any of these cost nothing. Counts follow from the tokens that a row was admitted with and from those that
it computed later, by position: a step that failed, a row that is computed again and a sequence that goes on at another
worker count each token once. Semantics and order are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from services.worker.contract.arrays import F64, I32, I64, Bool
from services.worker.contract.batch import Batch, RowInit
from services.worker.sampling.token_counts import TokenCounts
from shared.types import SamplingParams

MAX_EDITS: Final = 2**18
"""Logits that are penalised at a time, unless one row has more: bounds the workspace."""
_EVERYTHING: Final = 2**31 - 1
_SMALLEST: Final = 1e-30
"""A smaller repetition penalty counts as this one: a logit divided by it must stay a number."""


class _RowRules:
    """What one row's sampling changes."""

    def __init__(self, init: RowInit, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        sampling = init.sampling
        stops = {*eos_token_ids, *sampling.stop_token_ids} if sampling.min_tokens else set[int]()
        if sampling.thinking is not None and sampling.thinking.budget is not None:
            stops.discard(sampling.thinking.closing_id)  # it may have to come
        self.sampling = sampling
        self.bias_ids, self.bias = _summed(sampling.logit_bias)
        self.stop_ids: I64 = np.array(sorted(i for i in stops if 0 <= i < vocab_size), dtype=np.int64)
        self.min_position = init.num_prompt + sampling.min_tokens
        self.counts: TokenCounts | None = None
        if sampling.penalises:
            listed = init.tokens[: init.num_prompt] if sampling.repetition_penalty != 1 else init.tokens[:0]
            self.counts = TokenCounts(listed)
            self.counts.add(init.tokens[init.num_prompt :])


@dataclass(frozen=True, slots=True)
class _Edit:
    """Logits that were changed, and what they were."""

    rows: torch.Tensor
    ids: torch.Tensor
    before: torch.Tensor


class LogitRules:
    """The rules of all rows of the engine's table.

    Args:
        max_rows: rows of that table.
        eos_token_ids: ids that end a sequence, which `min_tokens` excludes beside the request's own.
    """

    def __init__(self, max_rows: int, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._rules: dict[int, _RowRules] = {}
        self._has_rules: Bool = np.zeros(max_rows, dtype=np.bool_)
        self._counted: I32 = np.full(max_rows, _EVERYTHING, dtype=np.int32)  # positions whose tokens are counted

    def take_in(self, batch: Batch) -> None:
        """Follow a batch: rows that go and come, and the tokens that it computes. Repeating a batch changes nothing."""
        for row in batch.drops.tolist() if self._rules else ():
            self._forget(row)
        for init in batch.admits:
            self._forget(init.row)
            if has_rules(init.sampling):
                self._rules[init.row] = _RowRules(init, self._eos_token_ids, self._vocab_size)
                self._has_rules[init.row] = True
                if init.sampling.penalises:
                    self._counted[init.row] = init.tokens.size
        if self._rules:
            self._count(batch)

    def concern(self, rows: I32) -> bool:
        """Return whether any of the rows [n] has rules."""
        return bool(self._rules) and bool(self._has_rules[rows].any())

    def apply(self, logits: torch.Tensor, rows: I32, positions: I64) -> Callable[[], None]:
        """Change the logits in place.

        Args:
            logits: [n, vocab_size] float32.
            rows: [n] rows of the engine's table.
            positions: [n] position in the sequence of the token that is chosen.

        Returns:
            A function that puts the logits back as they were, to the bit.
        """
        chosen = np.flatnonzero(self._has_rules[rows]).tolist() if self._rules else []
        if not chosen:
            return lambda: None
        rules = [self._rules[int(rows[i])] for i in chosen]
        edits = [
            *_add_bias(logits, chosen, rules),
            *_exclude_stops(logits, chosen, rules, positions),
            *_penalise(logits, chosen, rules),
        ]

        def undo() -> None:
            for edit in reversed(edits):
                logits.index_put_((edit.rows, edit.ids), edit.before)

        return undo

    def _forget(self, row: int) -> None:
        if self._rules.pop(row, None) is not None:
            self._has_rules[row] = False
            self._counted[row] = _EVERYTHING

    def _count(self, batch: Batch) -> None:
        """Count the tokens at positions that are new to their rows."""
        end = batch.start + batch.num_tokens
        first = np.cumsum(batch.num_tokens) - batch.num_tokens
        for i in np.flatnonzero(end > self._counted[batch.rows]).tolist():
            row, start = int(batch.rows[i]), int(batch.start[i])
            assert start <= self._counted[row], f"row {row} skips tokens that are to be counted"
            counts = self._rules[row].counts
            assert counts is not None
            counts.add(batch.tokens[first[i] + self._counted[row] - start : first[i] + batch.num_tokens[i]])
            self._counted[row] = end[i]


def has_rules(sampling: SamplingParams) -> bool:
    """Return whether these parameters change logits."""
    return bool(sampling.penalises or sampling.logit_bias or sampling.min_tokens)


def _summed(bias: tuple[tuple[int, float], ...]) -> tuple[I64, F64]:
    """Return the distinct ids and the sum of each one's entries."""
    ids, places = np.unique(np.array([token for token, _ in bias], dtype=np.int64), return_inverse=True)
    weights = np.array([value for _, value in bias], dtype=np.float64)
    total: F64 = np.bincount(places, weights=weights).astype(np.float64)
    return ids, total


def _add_bias(logits: torch.Tensor, chosen: list[int], rules: list[_RowRules]) -> list[_Edit]:
    biased = [(i, rule) for i, rule in zip(chosen, rules, strict=True) if len(rule.bias_ids)]
    if not biased:
        return []
    edit = _edit(logits, [i for i, _ in biased], [rule.bias_ids for _, rule in biased])
    bias = np.concatenate([rule.bias for _, rule in biased]).astype(np.float32)
    return [_put(logits, edit, edit.before + torch.from_numpy(bias).to(logits.device))]


def _exclude_stops(logits: torch.Tensor, chosen: list[int], rules: list[_RowRules], positions: I64) -> list[_Edit]:
    short = [(i, r) for i, r in zip(chosen, rules, strict=True) if positions[i] < r.min_position and len(r.stop_ids)]
    if not short:
        return []
    edit = _edit(logits, [i for i, _ in short], [rule.stop_ids for _, rule in short])
    return [_put(logits, edit, torch.full_like(edit.before, -torch.inf))]


def _penalise(logits: torch.Tensor, chosen: list[int], rules: list[_RowRules]) -> list[_Edit]:
    edits: list[_Edit] = []
    part: list[tuple[int, _RowRules, TokenCounts]] = []
    size = 0
    for i, rule in zip(chosen, rules, strict=True):
        if rule.counts is None or not len(rule.counts.ids):
            continue
        if part and size + len(rule.counts.ids) > MAX_EDITS:
            edits.append(_penalise_part(logits, part))
            part, size = [], 0
        part.append((i, rule, rule.counts))
        size += len(rule.counts.ids)
    return [*edits, _penalise_part(logits, part)] if part else edits


def _penalise_part(logits: torch.Tensor, part: list[tuple[int, _RowRules, TokenCounts]]) -> _Edit:
    """Apply the penalties of some rows: repetition to all tokens listed, the others to those in the output."""
    edit = _edit(logits, [i for i, _, _ in part], [counts.ids for _, _, counts in part])
    sizes = [len(counts.ids) for _, _, counts in part]

    def column(name: str) -> torch.Tensor:
        values = np.array([getattr(rule.sampling, name) for _, rule, _ in part], dtype=np.float32)
        return torch.from_numpy(np.repeat(values, sizes)).to(logits.device)

    count = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in part])).to(logits.device)
    repetition = column("repetition_penalty").clamp_min_(_SMALLEST)
    values = torch.where(edit.before > 0, edit.before / repetition, edit.before * repetition)
    values -= column("frequency_penalty") * count
    values -= column("presence_penalty") * (count > 0)
    return _put(logits, edit, values.clamp_max_(torch.finfo(values.dtype).max))


def _edit(logits: torch.Tensor, rows: list[int], ids: list[I64]) -> _Edit:
    """Return where the logits of some rows are to change; the ids of one row are distinct."""
    where = np.repeat(np.array(rows, dtype=np.int64), [len(of_row) for of_row in ids])
    row, token = (torch.from_numpy(column).to(logits.device) for column in (where, np.concatenate(ids)))
    return _Edit(row, token, logits[row, token])


def _put(logits: torch.Tensor, edit: _Edit, values: torch.Tensor) -> _Edit:
    logits.index_put_((edit.rows, edit.ids), values)
    return edit
