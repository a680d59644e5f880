"""Which worker gets a request, by the last snapshot and what was sent there since: the least loaded one, or by fit.

    load = KV that is held or asked for / KV memory  +  weight · seconds of computing that wait there

Real-time work and best effort see other loads (`services.dispatcher.state`): where best effort gives way, a real-time
request is placed by what other real-time work is there.

Memory alone would send everything to a worker that has just got more of it, a new group, until prompts queue there for
their computing; and where all have the same memory, to one whose sequences are few and long, whatever waits there. A
group computes with all of its stages. Every worker says what a token costs it, whatever its system, so that systems
differ in what they do and not in how they are placed; who does not say it is compared by memory.

With prefixes a prompt is placed by what of it is new to a worker, times how many share that worker:

    tokens of the prompt that it does not hold  ·  sequences there, this one included

As a product it has no weight between the two: a prefix is worth a longer batch in proportion, and no more. Tokens that
the worker would bring from another one, as that is quicker than computing them, count by the time of that. Where nobody
holds any of the prompt there is nothing to weigh, and the load tells more than the batch.

Best fit and worst fit are what packing is compared with: they fill workers that are in use, and take another one only
if none has room. They look at memory alone; `gradient` is best fit that looks at steps and at prompts that wait as
well. When memory runs out, the worker preempts as ever. By class goes where a planner says that requests of a size go
next.

Pure: a snapshot in, a choice with its reason out. Source: the project's own design; KunServe v1 (section 4.3) has the
dispatcher look at how many requests a group runs well; the fits are baselines of Mell (section VIII-B), and `gradient`
is the load gradient of PolyServe, with one limit for all. The product is LMetric's (2603.15202), in seconds where
workers say what a token takes them; deviation: who has none of it anywhere goes by load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final, Protocol

from shared.hot import hot_dataclass
from shared.ids import WorkerId
from shared.messages.report_parts import DecodeCost
from shared.messages.request import PrefixSource
from shared.prefix_names import RunName
from shared.systems import PACKED_STEP_S, PACKED_WAIT_S, ROOM_FOR_GROWTH_S

WAITING_WEIGHT = 0.5
"""Of a second of prompts that wait, against all of a worker's KV memory. Higher spreads bursts more evenly, and lets
memory become more uneven."""


@hot_dataclass(frozen=True, slots=True)
class PlacementLoad:
    """One worker as placement sees it; own submissions since the snapshot are counted in."""

    worker_id: WorkerId
    ready: bool
    """Loaded, alive, not draining, and no plan holds its steps up."""
    num_sequences: int
    """Sequences that run or wait there, or whose KV comes."""
    max_sequences: int
    """Sequences that it takes; 0 if unknown."""
    num_waiting: int
    """Of these, the ones that have not begun."""
    max_waiting: int
    """Sequences that may wait there; 0 if unknown."""
    num_demanded_blocks: int
    """KV blocks that are held or asked for: also by prompts under way, for what they have yet to compute."""
    waiting_s: float
    """Seconds of computing that wait there, or were sent since; 0 if unknown."""
    token_s: float
    """Seconds that a token of a prompt takes there; 0 if unknown."""
    num_blocks: int
    """KV blocks in all; 0 if unknown."""
    block_size: int
    """Tokens of each."""
    decode_cost: DecodeCost
    """What a step costs there in which sequences decode, beside as many prompts as of late."""
    max_request_tokens: int
    """Most tokens of prompt and output together that ever fit one request there; 0 if unknown."""
    is_crowded: bool = False
    """Nobody may come to wait there."""
    is_closing: bool = False
    """Its requests are to leave: it comes after all others that have room, or, for a rule that asks for none, that take
    requests."""
    pulled_token_s: float = 0.0
    """Seconds that a token of a prefix takes there to come from another worker; 0 if unknown, or none comes."""
    next_for: tuple[tuple[int, float], ...] = ()
    """Who packs by size class has it filled next by requests of so many tokens, and up to so many."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The choice."""

    worker_id: WorkerId
    reason: str
    needs_room: bool = False
    """Chosen because it has room: if it turns out to have none, another one may be better."""
    num_cached: int = 0
    """Tokens of the prompt that are there already."""
    prefix: PrefixSource | None = None
    """Who has more of it; None: nobody does whom that worker can ask."""
    names: Sequence[RunName] = ()
    """Of the prompt's first blocks, if somebody says what it holds."""


CachedTokens = Mapping[WorkerId, int]
"""Tokens of a prompt whose KV workers have; those that are not in it have none."""
NOTHING_CACHED: Final[CachedTokens] = MappingProxyType({})


class Placement(Protocol):
    """A rule."""

    def __call__(
        self,
        workers: Sequence[PlacementLoad],
        num_tokens: int,
        refused: Collection[WorkerId] = (),
        num_known: int = 0,
        cached: CachedTokens = NOTHING_CACHED,
    ) -> Placed | None:
        """Return the choice; None: no worker can take the request now.

        Args:
            workers: all of them.
            num_tokens: most of prompt and output together.
            refused: workers that are not asked.
            num_known: of the prompt, and of the output so far: what has to find room at once.
            cached: of these, what workers need not compute.
        """


def place_least_loaded(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the worker whose KV memory is asked for least.

    Ties: fewer sequences, then the smaller id, so that one input has one answer.
    """
    able = _able(workers, num_tokens, refused)
    keys = [(each.is_closing, _load(each), each.num_sequences, each.worker_id) for each in able]
    if not keys:
        return None
    _, load, num_sequences, worker_id = min(keys)
    return Placed(worker_id, f"least loaded: {load:.0%} of its KV memory asked for, {num_sequences} sequences")


def place_prefix_aware(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the worker with the least product of what it would have to compute or bring of the prompt, and its batch.

    Those with room for what is known of the request come before the others. Where nobody holds any of the prompt it is
    the least loaded. Ties: the load; then who comes first among the workers.
    """
    able, num_most = _able(workers, num_tokens, refused), max(cached.values(), default=0)
    keys = [
        (
            each.is_closing,
            bool(cached) and each.num_blocks > 0 and _free_tokens(each) < num_known,
            _product(each, num_known, cached, num_most) if cached else 0.0,
            _load(each),
            each.num_sequences,
            turn,
        )
        for turn, each in enumerate(able)
    ]
    if not keys:
        return None
    _, lacks_room, _, load, num_sequences, turn = min(keys)
    worker_id = able[turn].worker_id
    if not cached:
        return Placed(worker_id, f"nobody has any of the prompt, and it is least loaded: {load:.0%}")
    num_cached = cached.get(worker_id, 0)
    told = f"{num_cached} of {num_known} tokens are cached there, {num_sequences} sequences"
    return Placed(worker_id, told, needs_room=not lacks_room, num_cached=num_cached)


def place_best_fit(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the fullest worker in use that has room for what is known of the request; see `_fit`."""
    return _fit(workers, num_tokens, refused, num_known, _Fit())


def place_worst_fit(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the emptiest worker in use that has room for what is known of the request; see `_fit`."""
    return _fit(workers, num_tokens, refused, num_known, _Fit(which="emptiest"))


def place_pack(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the fullest worker in use that has room for what is known of the request, and for growth besides.

    So with its steps: they are to stay as short as packing has them while all there grow. A prompt goes where few
    others wait: while one worker computes them one after the other, another one could.
    """
    fit = _Fit(ROOM_FOR_GROWTH_S, max_step_s=PACKED_STEP_S, max_waiting_s=PACKED_WAIT_S)
    return _fit(workers, num_tokens, refused, num_known, fit)


def place_gradient(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the fullest worker in use that has room and keeps limits of steps and of waiting (PolyServe)."""
    fit = _Fit(max_step_s=PACKED_STEP_S, max_waiting_s=PACKED_WAIT_S)
    return _fit(workers, num_tokens, refused, num_known, fit)


def place_by_class(
    workers: Sequence[PlacementLoad],
    num_tokens: int,
    refused: Collection[WorkerId] = (),
    num_known: int = 0,
    cached: CachedTokens = NOTHING_CACHED,
) -> Placed | None:
    """Choose the worker that is filled next by requests of this size, as the planner has it (`Filling`).

    If it has no room any more, or nobody has said who it is: one that has nothing to do, else as best fit.
    """
    able = _able(workers, num_tokens, refused)
    for worker in able:
        is_next = any(least <= num_known < above for least, above in worker.next_for)
        if is_next and not worker.is_closing and _free_tokens(worker) >= num_known:
            return Placed(worker.worker_id, "filled next by requests of its size class", needs_room=True)
    return _unused(able, num_known) or place_best_fit(workers, num_tokens, refused, num_known)


@dataclass(frozen=True, slots=True)
class _Fit:
    """What fits."""

    growth_s: float = 0.0
    """Seconds for which there has to be memory then as all grow, and steps have to be short."""
    which: str = "fullest"
    """Or "emptiest": of those that are in use and have room."""
    max_step_s: float = inf
    """Longest step there."""
    max_waiting_s: float = inf
    """Most computing of prompts that wait there."""


def _fit(
    workers: Sequence[PlacementLoad], num_tokens: int, refused: Collection[WorkerId], num_known: int, fit: _Fit
) -> Placed | None:
    """Choose among the workers that have something to do, and memory for what is known of a request.

    If there is none: the first that has nothing to do and memory for it, else one that is closing and has room, else
    the least loaded.
    """
    able = _able(workers, num_tokens, refused)
    fitting = [
        each
        for each in able
        if each.num_sequences
        and _free_tokens(each) >= num_known + _growth_tokens(each, num_known, fit.growth_s)
        and each.waiting_s <= fit.max_waiting_s
        and _step_s(each, num_known + _growth_tokens(each, num_known, fit.growth_s)) <= fit.max_step_s
    ]
    sign = 1 if fit.which == "fullest" else -1
    best = min(
        fitting,
        key=lambda worker: (worker.is_closing, sign * _free_tokens(worker), worker.worker_id),
        default=None,
    )
    if best is None or best.is_closing:
        unused = _unused(able, num_known)
        if unused is not None:
            return unused
    if best is None:
        return place_least_loaded(workers, num_tokens, refused)
    told = f"{fit.which} in use with room: {_free_tokens(best)} tokens of KV memory are free"
    return Placed(best.worker_id, told, needs_room=True)


def _unused(able: Sequence[PlacementLoad], num_known: int) -> Placed | None:
    """Choose the first that has nothing to do, and room: some may be kept there for a request that has just come."""
    unused = [each for each in able if not each.num_sequences and not each.is_closing]
    first = min((each.worker_id for each in unused if _free_tokens(each) >= num_known), default=None)
    if first is None:
        return None
    return Placed(first, "nobody who is in use has room, and this one is not", needs_room=True)


def _free_tokens(worker: PlacementLoad) -> int:
    return (worker.num_blocks - worker.num_demanded_blocks) * worker.block_size


def _growth_tokens(worker: PlacementLoad, num_known: int, growth_s: float) -> float:
    """Return by how many tokens all who are there grow in a time, with one more request.

    A block each, where the worker does not say what a step costs.
    """
    if not growth_s:
        return 0.0
    step_s = _step_s(worker, num_known)
    return (worker.num_sequences + 1) * (growth_s / step_s if step_s else worker.block_size)


def _step_s(worker: PlacementLoad, num_tokens: float) -> float:
    """Return how long a step takes there with one more request, and so many tokens more."""
    num_kv_tokens = worker.num_demanded_blocks * worker.block_size + num_tokens
    return worker.decode_cost.of(worker.num_sequences + 1, num_kv_tokens)


def _load(worker: PlacementLoad) -> float:
    ratio = worker.num_demanded_blocks / worker.num_blocks if worker.num_blocks else 0.0
    return ratio + WAITING_WEIGHT * worker.waiting_s


def _product(worker: PlacementLoad, num_known: int, cached: CachedTokens, num_most: int) -> float:
    """Return a request's prefill times the batch with it; in tokens where nothing is known of their time.

    What the worker does not have, and another one does (`num_most`), it computes or brings, whichever is quicker.
    """
    token_s, num_cached = worker.token_s or 1.0, cached.get(worker.worker_id, 0)
    new_s = max(num_known - num_cached, 1) * token_s
    if worker.token_s and worker.pulled_token_s:
        new_s = min(new_s, max(num_known - num_most, 1) * token_s + (num_most - num_cached) * worker.pulled_token_s)
    return new_s * (worker.num_sequences + 1)


def _able(workers: Sequence[PlacementLoad], num_tokens: int, refused: Collection[WorkerId]) -> list[PlacementLoad]:
    """Return those that can take a request now, in their order."""
    return [each for each in workers if each.worker_id not in refused and _can_take(each, num_tokens)]


def _can_take(worker: PlacementLoad, num_tokens: int) -> bool:
    if not worker.ready or (worker.max_request_tokens and num_tokens > worker.max_request_tokens):
        return False
    return not worker.max_sequences or worker.num_sequences < worker.max_sequences


PLACEMENTS: dict[str, Placement] = {
    "least-loaded": place_least_loaded,
    "prefix-aware": place_prefix_aware,
    "best-fit": place_best_fit,
    "worst-fit": place_worst_fit,
    "pack": place_pack,
    "gradient": place_gradient,
    "by-class": place_by_class,
}
"""By the name that a system gives (`shared.systems`)."""
