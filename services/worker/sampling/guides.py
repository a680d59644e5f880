"""Holds answers to their grammars and budgets of thinking: which tokens each guided row may draw next.

A guide (`row_guide.py`) follows from the tokens that its row was admitted with and from those that it computed later,
by position (`logit_rules.py` does likewise): a step that failed, a row that is computed again and a sequence that goes
on at another worker follow each token once. What may be drawn depends on the tokens before alone, so it is found out in
a thread beside the forward pass that computes the logits. Masks come from llguidance.

A step may be launched before the host has the token with which it begins. Then that thread waits for it, beside the
same forward pass. If the step that drew it turns out to have failed, another token is drawn in its place, and what the
guide had followed too early is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from services.worker.contract.arrays import F32, I32, I64, Bool
from services.worker.contract.batch import Batch, RowInit
from services.worker.memory.host_link import send
from services.worker.sampling.grammar_cache import GrammarCache
from services.worker.sampling.row_guide import WORD_BITS, GuidedRow, RowGuide, Words
from shared.grammars import GrammarError
from shared.types import SamplingParams

MASK_THREADS: Final = 2
"""That make masks of several rows at a time, beside the forward pass."""
FEW_IDS: Final = 8192
"""Of so many, the logits are looked up one by one; of more, all are gone through."""
_EVERYTHING: Final = 2**31 - 1


class RowsBrokenError(Exception):
    """Guides of some rows failed; the other rows are as before.

    Args:
        cause: of the first one.
        rows: of the engine's table.
    """

    def __init__(self, cause: str, rows: tuple[int, ...]) -> None:
        super().__init__(cause)
        self.cause = cause
        self.rows = rows


@dataclass(frozen=True, slots=True)
class _HostMask:
    """What one row may draw, such that the rest is quickly excluded in main memory.

    Attributes:
        kept: ids that may be drawn, if they are few.
        dropped: ids that may not, if they are few.
        is_dropped: [vocab_size] whether one may not, else.
    """

    kept: I64 | None = None
    dropped: I64 | None = None
    is_dropped: Bool | None = None

    @classmethod
    def of(cls, words: Words, vocab_size: int) -> _HostMask:
        """Return what the words [num_words] of one row say."""
        is_kept = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
        num_kept = np.count_nonzero(is_kept)
        if num_kept <= FEW_IDS:
            return cls(kept=is_kept.nonzero()[0])
        if num_kept >= vocab_size - FEW_IDS:
            return cls(dropped=(~is_kept).nonzero()[0])
        return cls(is_dropped=~is_kept)

    def exclude(self, logits: F32) -> None:
        """Set to minus infinity what may not be drawn of one row [vocab_size]."""
        if self.kept is not None:
            values = logits[self.kept]
            logits.fill(-np.inf)
            logits[self.kept] = values
        elif self.dropped is not None:
            logits[self.dropped] = -np.inf
        else:
            np.copyto(logits, -np.inf, where=self.is_dropped)


@dataclass(frozen=True, slots=True)
class _Masks:
    """What some rows may draw.

    Attributes:
        places: [k] theirs among the rows that were asked for.
        words: [k, num_words]
        on_host: [k] the same for logits in main memory; empty for those on a device.
        broken: rows whose guides failed.
        cause: of the first one.
    """

    places: list[int]
    words: Words
    on_host: list[_HostMask]
    broken: tuple[int, ...] = ()
    cause: str = ""


class Guides:
    """The guides of all rows of the engine's table.

    Args:
        max_rows: rows of that table.
        end_ids: ids that end a sequence.
        vocab_size: of the model.
        grammars: compiles; None: there is no tokenizer, and a row with a grammar fails.
    """

    def __init__(
        self, max_rows: int, end_ids: Sequence[int], vocab_size: int, grammars: GrammarCache | None = None
    ) -> None:
        self._end_ids = tuple(end_ids)
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // WORD_BITS) if grammars is None else grammars.num_mask_words
        self._rows: dict[int, GuidedRow] = {}
        self._is_guided: Bool = np.zeros(max_rows, dtype=np.bool_)
        self._followed: I32 = np.full(max_rows, _EVERYTHING, dtype=np.int32)
        """Positions whose tokens the guides have, or are given next."""
        self._asked: Future[_Masks] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._makers: LLExecutor | None = None

    def take_in(self, batch: Batch) -> None:
        """Follow a batch: rows that go and come, and the tokens that it computes. Repeating a batch changes nothing."""
        if self._asked is not None:  # of a step that failed
            self._asked.exception()
            self._asked = None
        for row in batch.drops.tolist() if self._rows else ():
            self._forget(row)
        for init in batch.admits:
            self._forget(init.row)
            if init.sampling.is_guided:
                self._admit(init)
        if self._rows:
            self._follow(batch)

    def concern(self, rows: I32) -> bool:
        """Return whether any of the rows [n] is guided."""
        return bool(self._rows) and bool(self._is_guided[rows].any())

    def prepare(self, rows: I32, *, on_host: bool = True) -> None:
        """Begin to find out what these rows [n] may draw, in another thread; `apply` waits for it.

        Args:
            rows: [n]
            on_host: their logits will be in main memory.
        """
        if not self.concern(rows):
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        asked = [(place, int(rows[place])) for place in np.flatnonzero(self._is_guided[rows]).tolist()]
        self._asked = self._thread.submit(self._find_masks, asked, on_host)

    def apply(self, logits: torch.Tensor, *, may_undo: bool) -> Callable[[], None]:
        """Exclude what the rows of `prepare` may not draw, in place.

        Args:
            logits: [n, vocab_size] float32, of these rows.
            may_undo: the returned function will be called.

        Returns:
            A function that puts the logits back as they were, to the bit.

        Raises:
            RowsBrokenError: guides failed.
        """
        asked, self._asked = self._asked, None
        masks = None if asked is None else asked.result()
        if masks is not None and masks.broken:
            raise RowsBrokenError(masks.cause, masks.broken)
        if masks is None or not masks.places:
            return lambda: None
        places = send(np.array(masks.places), logits.device)
        before = logits[places] if may_undo else None
        if masks.on_host:
            rows: F32 = logits.numpy()
            for place, mask in zip(masks.places, masks.on_host, strict=True):
                mask.exclude(rows[place])
        else:
            _exclude_on_device(logits, places, masks.words)

        def undo() -> None:
            assert before is not None
            logits.index_copy_(0, places, before)

        return undo

    def expect(self, rows: I32, drawn: Callable[[], I64]) -> None:
        """Take note that these rows [n] go on with tokens that the host does not have yet.

        Args:
            rows: [n]
            drawn: waits for them and returns their ids [n]; called in another thread, once for each guided row.
        """
        for place in np.flatnonzero(self._is_guided[rows]).tolist() if self._rows else ():
            self._rows[int(rows[place])].drawn = partial(self._wait, drawn, place)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _admit(self, init: RowInit) -> None:
        self._rows[init.row] = GuidedRow(init)
        self._is_guided[init.row] = True
        self._followed[init.row] = init.tokens.size

    def _forget(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._is_guided[row] = False
            self._followed[row] = _EVERYTHING

    def _follow(self, batch: Batch) -> None:
        """Take note of the tokens at positions that are new to their rows, and of those that are drawn anew."""
        end, followed = batch.start + batch.num_tokens, self._followed[batch.rows]
        first = np.cumsum(batch.num_tokens) - batch.num_tokens
        for i in np.flatnonzero(end > followed).tolist():
            row, start = int(batch.rows[i]), int(batch.start[i])
            assert start <= followed[i], f"row {row} skips tokens that are to be followed"
            self._rows[row].extend(batch.tokens[first[i] + followed[i] - start : first[i] + batch.num_tokens[i]])
            self._followed[row] = end[i]
        for i in np.flatnonzero(batch.sample & self._is_guided[batch.rows] & (end < followed)).tolist():
            row = int(batch.rows[i])
            self._rows[row].cut(int(end[i]))
            self._followed[row] = end[i]

    def _wait(self, drawn: Callable[[], I64], place: int) -> int:
        """Return a token as the step behind it reads it: of logits that are no numbers it may be none."""
        return min(int(drawn()[place]), self._vocab_size - 1)

    def _find_masks(self, asked: list[tuple[int, int]], on_host: bool) -> _Masks:  # noqa: FBT001  called by a pool
        """Let the guides follow their rows, and return what these may draw.

        Args:
            asked: place among the rows that were asked for, row of the table.
            on_host: see `prepare`.
        """
        words: Words = np.full((len(asked), self._num_words), 0xFFFFFFFF, dtype=np.uint32)
        guides: list[RowGuide] = []
        broken: list[int] = []
        cause = ""
        for _, row in asked:
            try:
                guides.append(self._rows[row].catch_up(self._make_guide))
            except GrammarError as error:
                cause = cause or error.reason
                broken.append(row)
        if broken:
            return _Masks([], words, [], tuple(broken), cause)
        matchers = [(matcher, i) for i, guide in enumerate(guides) if (matcher := guide.asks_matcher) is not None]
        self._make_masks(matchers, words)
        broken = [asked[i][1] for matcher, i in matchers if matcher.is_error()]
        if broken:
            cause = next(matcher.get_error() for matcher, _ in matchers if matcher.is_error())
            return _Masks([], words, [], tuple(broken), cause)
        kept = [i for i, guide in enumerate(guides) if guide.adjust(words[i])]
        masks = [_HostMask.of(words[i], self._vocab_size) for i in kept] if on_host else []
        return _Masks([asked[i][0] for i in kept], words[kept], masks)

    def _make_guide(self, sampling: SamplingParams) -> RowGuide:
        """Return the guide of a row that has said nothing.

        Raises:
            GrammarError: the grammar does not compile.
        """
        matcher = None
        if sampling.grammar:
            if self._grammars is None:
                raise GrammarError("the model's folder has no tokenizer that grammars can be compiled over")
            matcher = self._grammars.matcher(sampling.grammar)
        return RowGuide(sampling, self._end_ids, matcher)

    def _make_masks(self, matchers: list[tuple[LLMatcher, int]], words: Words) -> None:
        """Write what the matchers allow into the rows of `words` that go with them."""
        num_bytes = 4 * self._num_words
        if len(matchers) == 1:
            ((matcher, i),) = matchers
            matcher.unsafe_compute_mask_ptr(words[i].ctypes.data, num_bytes)
        elif matchers:
            if self._makers is None:
                self._makers = LLExecutor(MASK_THREADS)
            self._makers.unsafe_compute_mask_ptr(matchers, words.ctypes.data, num_bytes, len(words))


def _exclude_on_device(logits: torch.Tensor, places: torch.Tensor, words: Words) -> None:
    """Set to minus infinity what the rows at these places [k] may not draw, by their words [k, num_words]."""
    packed = send(words.view(np.int32), logits.device).unsqueeze(-1)
    bits = packed >> torch.arange(WORD_BITS, device=logits.device, dtype=torch.int32) & 1
    excluded = (bits == 0).flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, places, logits[places].masked_fill_(excluded, -torch.inf))
