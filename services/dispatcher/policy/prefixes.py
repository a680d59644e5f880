"""Which worker holds how much of a prompt, by the sketches of their reports and by what was sent there.

    names of a prompt     0    1    2    3    4    5         below a worker's bound are 1 and 4, say
    worker a              ·    ✓    ·    ·    –    ·         it lists 1, not 4: it holds two to four blocks, say three
    worker b              ·    –                             it holds less than two, say none

A block is of use only behind all those before it, so the first name that is missing ends what a worker holds. That is
at least up to the last name that is listed, or was sent there just now. Of the names between these two half count as
held. That two names have one mark by chance, or that some were lost, costs a wrong choice of a worker, which computes
what it does not have.

Sets of workers are the bits of a number, so that a prompt is compared with all workers at a time. Only equal salts and
tokens make equal names: of another tenant's prompts nothing is found.

Pure but for what it keeps; times are arguments. Source: the project's own design.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from shared.ids import WorkerId
from shared.messages.report_parts import PrefixSketch
from shared.prefix_names import RunName, following_names, mark_of, root_name
from shared.prefix_sketch import listed_marks

SENT_S: Final = 10.0
"""For so long what was sent to a worker counts as being there, whatever its reports say: it may wait to be computed."""
MAX_NAMED_BLOCKS: Final = 4096
"""Of a prompt that are looked for at workers: naming them takes a millisecond or two. What is behind counts as new."""
_NOTHING: Final = PrefixSketch(bound=0)


class _Marks:
    """By mark the workers that have it, as bits of a number."""

    def __init__(self) -> None:
        self.workers: dict[int, int] = {}

    def add(self, own: dict[int, int], bit: int, marks: Iterable[int]) -> None:
        """Let a worker have marks once more; `own` counts how often it has each."""
        for mark in marks:
            count = own.get(mark, 0)
            own[mark] = count + 1
            if not count:
                self.workers[mark] = self.workers.get(mark, 0) | bit

    def drop(self, own: dict[int, int], bit: int, marks: Iterable[int]) -> None:
        """Let a worker have marks once less."""
        for mark in marks:
            own[mark] -= 1
            if not own[mark]:
                del own[mark]
                self.workers[mark] &= ~bit
                if not self.workers[mark]:
                    del self.workers[mark]


@dataclass(slots=True, eq=False)
class _Held:
    """What one worker holds."""

    bit: int
    """Its place in sets of workers."""
    sketch: PrefixSketch = _NOTHING
    listed: set[int] = field(default_factory=set)
    """Marks of the sketch."""
    fresh: deque[tuple[float, list[int]]] = field(default_factory=deque)
    """When prompts were sent not long ago, and their marks."""
    held: dict[int, int] = field(default_factory=dict)
    """How often each mark is in either."""


class HeldPrefixes:
    """The prefixes of all workers."""

    def __init__(self) -> None:
        self.block_size = 0
        """Tokens of a block at the workers that are here; 0: there is none. Others' names are others."""
        self._workers: dict[WorkerId, _Held] = {}
        self._by_bit: dict[int, WorkerId] = {}
        self._holders = _Marks()
        self._bounds: list[int] | None = None
        """Ascending, of all workers; None: to be sorted anew."""
        self._silent: list[int] = []
        """[n + 1] the workers with the n smallest bounds, as bits."""

    def __len__(self) -> int:
        """Return how many workers say what they hold."""
        return len(self._workers)

    def take(self, worker_id: WorkerId, sketch: PrefixSketch | None, block_size: int, now_s: float) -> None:
        """A worker has reported.

        Args:
            worker_id: of it.
            sketch: None: it does not say, and holds nothing; so does one that says what is no sketch.
            block_size: its own, tokens.
            now_s: for what has been sent to it.
        """
        if not self._workers:
            self.block_size = block_size
        is_alike = block_size == self.block_size > 0
        try:
            listed = self._listed(worker_id, sketch) if sketch is not None and is_alike else None
        except ValueError:
            listed = None
        if sketch is None or listed is None:
            self.forget(worker_id)
            return
        held = self._workers.get(worker_id)
        if held is None:
            held = self._workers[worker_id] = _Held(self._free_bit())
            self._by_bit[held.bit] = worker_id
            self._bounds = None
        while held.fresh and held.fresh[0][0] < now_s - SENT_S:
            self._holders.drop(held.held, 1 << held.bit, held.fresh.popleft()[1])
        if listed is not held.listed:
            if sketch.bound != held.sketch.bound:
                self._bounds = None
            self._holders.add(held.held, 1 << held.bit, listed - held.listed)
            self._holders.drop(held.held, 1 << held.bit, held.listed - listed)
            held.sketch, held.listed = sketch, listed

    def _listed(self, worker_id: WorkerId, sketch: PrefixSketch) -> set[int]:
        """Return the marks that a sketch lists.

        Raises:
            ValueError: it is none.
        """
        held = self._workers.get(worker_id)
        return held.listed if held is not None and held.sketch == sketch else set(listed_marks(sketch).tolist())

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone, or another process."""
        held = self._workers.pop(worker_id, None)
        if held is None:
            return
        self._holders.drop(dict.fromkeys(held.held, 1), 1 << held.bit, list(held.held))
        del self._by_bit[held.bit]
        self._bounds = None

    def sent(self, worker_id: WorkerId, names: Sequence[RunName], now_s: float) -> None:
        """A prompt with these names goes to a worker, which computes and holds it then."""
        held = self._workers.get(worker_id)
        if held is None or not names:
            return
        marks = [mark_of(name) for name in names]
        held.fresh.append((now_s, marks))
        self._holders.add(held.held, 1 << held.bit, marks)

    def take_back(self, worker_id: WorkerId, names: Sequence[RunName]) -> None:
        """A worker has refused a prompt that was sent to it."""
        held, marks = self._workers.get(worker_id), [mark_of(name) for name in names]
        fresh = [] if held is None else [each for each in held.fresh if each[1] == marks]
        if held is not None and fresh:
            held.fresh.remove(fresh[-1])
            self._holders.drop(held.held, 1 << held.bit, marks)

    def names_of(self, prompt: bytes, cache_salt: str) -> Sequence[RunName]:
        """Return the names of a prompt's first blocks, by which `cached` asks; none if nobody says what it holds.

        Args:
            prompt: as `NewRequest` has it.
            cache_salt: see `shared.messages.request.Submit`.
        """
        if not self._workers:
            return ()
        return following_names(root_name(cache_salt), prompt[: 4 * MAX_NAMED_BLOCKS * self.block_size], self.block_size)

    def cached(self, names: Sequence[RunName]) -> dict[WorkerId, int]:
        """Return how many tokens of a prompt with these names each worker holds; without those that hold none.

        It takes about a microsecond for each name, whatever the number of workers.
        """
        if not names:
            return {}
        if self._bounds is None:
            self._sort_bounds()
        bounds, silent, holders = self._bounds or [], self._silent, self._holders.workers
        going = silent[-1] if silent else 0
        found: list[tuple[int, int]] = []
        ended: list[tuple[int, int]] = []
        for num_blocks, name in enumerate(names, 1):
            mark = mark_of(name)
            says_nothing = silent[bisect_right(bounds, mark)]
            holding = holders.get(mark, 0)
            if hits := going & holding:
                found.append((num_blocks, hits))
            if lacking := going & ~(holding | says_nothing):
                ended.append((num_blocks - 1, lacking))
                going &= ~lacking
                if not going:
                    break
        ended.append((len(names), going))
        least: dict[int, int] = {}
        shown = 0
        for num_blocks, hits in reversed(found):
            least.update(dict.fromkeys(_bits(hits & ~shown), num_blocks))
            shown |= hits
        return {
            self._by_bit[bit]: (least[bit] + most) // 2 * self.block_size
            for most, ending in ended
            for bit in _bits(ending & shown)
        }

    def _sort_bounds(self) -> None:
        """Find out who says nothing of a mark: those whose bounds are not above it."""
        order = sorted(self._workers.values(), key=lambda held: held.sketch.bound)
        self._bounds = [held.sketch.bound for held in order]
        self._silent = [0, *accumulate((1 << held.bit for held in order), int.__or__)]

    def _free_bit(self) -> int:
        return next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)


def _bits(number: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
