"""KV that is on its way and can be attended where it lies: which of it a sequence may go on with before it is here.

    blocks of a row    0 ......... s ........ 2s ........ 3s .... n      s: blocks of a split, `SPLIT_KEYS` positions
    here               x x x x x x x . . . . . . . . . . . x x x x       . on its way
                                   └───── elsewhere ─────┘

What lies elsewhere is attended in whole splits, by one worker: so a row goes on when the splits that are not all here
are whole, and lie in one *span*, blocks that one worker had. Others wait for theirs, as they would without this.

Pure. Source: KunServe v1, section 4.2 (requests decode while their KV is exchanged); the rule of whole splits is this
project's own (`attention/remote.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.contract.kept_kv import KeptKv
from services.worker.contract.remote import SPLIT_KEYS
from shared.prefix_names import RunName


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Blocks on their way that can be attended at the worker that had them."""

    first: int
    """Block id at the target."""
    end: int


class RemoteKv:
    """What is on its way into blocks of an engine, as far as it can be attended where it lies.

    Args:
        coming: all that is on its way.
        spans: what of it, by block id; they do not overlap.
        block_size: tokens of a block.
    """

    def __init__(self, coming: KeptKv, spans: Sequence[RemoteSpan], block_size: int) -> None:
        assert not spans or SPLIT_KEYS % block_size == 0, "a split has to be made of whole blocks"
        self._split = max(SPLIT_KEYS // block_size, 1)
        self._spans = tuple(spans)
        self._block_of: dict[RunName, int] = {
            name: block
            for name, block in zip(coming.names, coming.ids.tolist(), strict=True)
            if self._span_of(block) is not None
        }
        self._missing: set[int | None] = set(self._block_of.values())

    def arrived(self, names: Sequence[RunName]) -> None:
        """Take note that some of it is here."""
        for name in names:
            self._missing.discard(self._block_of.pop(name, None))

    def num_usable(self, blocks: Sequence[int], num_full: int) -> int:
        """Return with how many of the first blocks of a row another one can go on.

        Args:
            blocks: of the row.
            num_full: which of them are shared; one behind them would be copied, so it has to be here.
        """
        remote = [place for place, block in enumerate(blocks) if block in self._missing]
        for usable in (len(blocks), num_full, num_full // self._split * self._split):
            needed = [place for place in remote if place < usable]
            if (not needed or needed[-1] < num_full) and self._can_go_on(blocks[: min(usable, num_full)], needed):
                return usable
        return remote[0]

    def extend(self, names: Sequence[RunName], here: list[int], index: PrefixIndex) -> list[int]:
        """Return the blocks with which a row can go on, as many of its first ones as there are.

        Args:
            names: of its full blocks, in order, that it may share.
            here: blocks of the first of them, which are here; what follows is not.
            index: of the blocks that are here.
        """
        if len(here) == len(names) or names[len(here)] not in self._block_of:
            return here
        found = [*here]
        remote: list[int] = []
        for name in names[len(here) :]:
            block = index.get(name)
            if block is None:
                block = self._block_of.get(name)
                if block is None:
                    break
                remote.append(len(found))
            found.append(block)
        return found if self._can_go_on(found, remote) else here

    def _can_go_on(self, blocks: Sequence[int], remote: list[int]) -> bool:
        if not remote:
            return True
        first = remote[0] // self._split * self._split
        end = -(-(remote[-1] + 1) // self._split) * self._split
        span = self._span_of(blocks[remote[0]])
        if end > len(blocks) or span is None:
            return False
        return all(span.first <= block < span.end for block in blocks[first:end])

    def _span_of(self, block: int) -> RemoteSpan | None:
        return next((span for span in self._spans if span.first <= block < span.end), None)


def tail_begin(num_blocks: int, block_size: int) -> int:
    """Return where the last split of a sequence begins if it is not whole, else its end; in blocks.

    Args:
        num_blocks: full ones of the sequence.
        block_size: tokens of a block.
    """
    split = SPLIT_KEYS // block_size
    return num_blocks // split * split if split and not SPLIT_KEYS % block_size else num_blocks
