"""Chooses tokens from the scores of a step, by what each row's request asks for; see `sampler.py` for the drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.contract.arrays import I32, I64, Bool
from services.worker.contract.batch import Batch
from services.worker.memory.host_link import Fetching, is_beside
from services.worker.sampling.grammar_cache import GrammarCache
from services.worker.sampling.guides import Guides
from services.worker.sampling.logit_rules import LogitRules, has_rules
from services.worker.sampling.logprobs import LogprobTable
from services.worker.sampling.sampler import Choose, SamplingTable, TokenSampler
from services.worker.sampling.scoring import Scores
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams

Said = dict[int, TokenLogprob]
"""Log-probabilities, by place among the rows that are chosen for."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """Tokens that are being chosen for k rows.

    Attributes:
        fetching: of the scores' `finite` and `largest`, and of a choice's columns.
        on_device: the ids [k] where they will be, if the host is not needed to choose; else None.
        end: returns the ids [k] and their log-probabilities, from the fetched columns behind `finite`; where the host
            is not needed, it keeps nothing large on the device.
    """

    fetching: Fetching
    on_device: torch.Tensor | None
    end: Callable[..., tuple[I64, Said]]


class Chooser:
    """What the requests of all rows say of choosing.

    Args:
        max_rows: rows of the engine's table.
        eos_token_ids: of the model.
        vocab_size: of the model.
        row_by_row: what is chosen for a row does not depend, to the bit, on the others.
        choose: see `TokenSampler`.
        grammars: see `Guides`.
    """

    def __init__(
        self,
        max_rows: int,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        *,
        row_by_row: bool,
        choose: Choose | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        self._is_plain: Bool = np.zeros(max_rows, dtype=np.bool_)
        self._sampling = SamplingTable(max_rows)
        self._sampler = TokenSampler(row_by_row=row_by_row, choose=choose)
        self._rules = LogitRules(max_rows, eos_token_ids, vocab_size)
        self._guides = Guides(max_rows, eos_token_ids, vocab_size, grammars)
        self._logprobs = LogprobTable(max_rows, row_by_row=row_by_row)

    def take_in(self, batch: Batch) -> None:
        """Follow a batch: rows that go and come, and its tokens. Of a dropped row only its rules take memory."""
        for admitted in batch.admits:
            self._is_plain[admitted.row] = _is_plain(admitted.sampling)
            self._sampling.put(admitted.row, admitted.sampling)
            self._logprobs.put(admitted)
        self._rules.take_in(batch)
        self._guides.take_in(batch)

    def prepare(self, rows: I32, *, on_host: bool) -> None:
        """Begin with what choosing the next token of each row [k] takes beside its scores; `begin` is called next.

        Args:
            rows: [k]
            on_host: the scores will be in main memory.
        """
        self._guides.prepare(rows, on_host=on_host)

    def close(self) -> None:
        """End its threads. Idempotent."""
        self._guides.close()

    def begin(self, scores: Scores, rows: I32, position: I64) -> Choosing:
        """Begin to choose the next token of each row [k].

        Args:
            scores: of the step; may be changed.
            rows: [k]
            position: [k] of the token that is chosen.

        Raises:
            RowsBrokenError: no token can be found for some rows.
        """
        beside = is_beside(scores.largest.device)
        if self._is_plain[rows].all():
            fetching = Fetching(scores.finite, scores.largest)
            return Choosing(fetching, scores.largest if beside else None, lambda largest: (largest, {}))
        logits, is_ruled, is_guided = scores.logits, self._rules.concern(rows), self._guides.concern(rows)
        put_back = self._rules.apply(logits, rows, position)
        wants_logprobs = bool(self._logprobs.asking(rows).any())
        unmask = self._guides.apply(logits, may_undo=wants_logprobs)
        known = None if is_ruled or is_guided else scores.largest
        choice = self._sampler.begin(logits, self._sampling.take(rows), position, known)
        fetching = Fetching(scores.finite, scores.largest, *choice.columns)
        if not wants_logprobs:
            on_device = choice.on_device() if beside and not is_ruled else None
            if on_device is not None and is_guided:
                self._guides.expect(rows, lambda: choice.end(*fetching.end()[2:]))
            return Choosing(fetching, on_device, lambda _, *columns: (choice.end(*columns), {}))

        def end(_: I64, *columns: I64) -> tuple[I64, Said]:
            chosen = choice.end(*columns)
            unmask()
            put_back()
            return chosen, self._logprobs.of_tokens(logits, rows, chosen)

        return Choosing(fetching, None, end)


def _is_plain(sampling: SamplingParams) -> bool:
    """Return whether the next token is always the largest logit, and nothing else is wanted."""
    changes_logits = has_rules(sampling) or sampling.is_guided
    return sampling.temperature == 0 and sampling.logprobs is None and not changes_logits
