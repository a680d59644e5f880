"""Scheduler views from a few numbers per row, and the contract that every scheduler's answer keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from services.worker.contract.arrays import AnyRows
from services.worker.scheduling.registry import make_scheduler
from services.worker.scheduling.view import (
    I32,
    CachedPrefix,
    Columns,
    HostView,
    Limits,
    PreemptHow,
    SchedulerOutput,
    SchedulerView,
    Sides,
)
from shared.cost import CostModel
from tests.support.engine_builders import SLOW, per_token

Row = tuple[int, int, int, int]
"""num_prompt, num_output, num_computed, held_blocks"""


@dataclass(frozen=True, slots=True)
class StatedBlocks:
    """Answers as the test states them: blocks that each row frees, whoever else gives way; what rows find cached."""

    free_by_row: I32
    held_tokens: I32
    cached_by_row: dict[int, CachedPrefix] = field(default_factory=dict)

    def freeable(self, rows: AnyRows) -> I32:
        return self.free_by_row[rows]

    def cached(self, row: int) -> CachedPrefix:
        return self.cached_by_row.get(row, CachedPrefix(int(self.held_tokens[row])))


def decoding(context: int, *, held: int | None = None, block_size: int = 4) -> Row:
    """A row that decodes with `context` tokens of KV, in as many blocks as they need unless told otherwise."""
    return (1, context, context, -(-context // block_size) if held is None else held)


def host_view(
    *,
    free_blocks: int = 100,
    leaving_blocks: int = 0,
    num_leaving: int = 0,
    arriving: tuple[int, ...] = (),
    block_copy_s: float = 0.0,
    lent_blocks: int = 0,
) -> HostView:
    """Host memory that costs nothing to use, unless told otherwise."""
    rows = np.array(arriving, dtype=np.int32)
    return HostView(free_blocks, leaving_blocks, num_leaving, rows, block_copy_s, lent_blocks=lent_blocks)


def prefilling(num_prompt: int, computed: int, *, held: int | None = None, block_size: int = 4) -> Row:
    return (num_prompt, 0, computed, -(-computed // block_size) if held is None else held)


def parked(num_known: int, *, held: int = 0) -> Row:
    """A row that does not run, and that holds so many of its first blocks of 4 still."""
    return (num_known, 0, 4 * held, held)


def make_view(
    *,
    running: list[Row] | None = None,
    preempted: list[Row] | None = None,
    waiting: list[Row] | None = None,
    free_blocks: int = 100,
    block_size: int = 4,
    max_batch_tokens: int = 32,
    max_batch_rows: int = 8,
    num_in_flight: int = 0,
    pinned: dict[int, int] | None = None,
    cached: dict[int, CachedPrefix] | None = None,
    now_s: float = 0.0,
    host: HostView | None = None,
    on_host: dict[int, int] | None = None,
    cost: CostModel = SLOW,
) -> SchedulerView:
    """Rows are numbered through: running, preempted, waiting.

    `pinned` gives pinned blocks per row, `on_host` the tokens of preempted rows whose KV is on the host. Rows that
    `host` names as arriving are left out of those that run.
    """
    queues = (running or [], preempted or [], waiting or [])
    values = np.array([row for queue in queues for row in queue], dtype=np.int32).reshape(-1, 4)
    numbers = np.split(np.arange(len(values), dtype=np.int32), np.cumsum([len(queue) for queue in queues])[:2])
    freeable = values[:, 3].copy()
    for row, count in (pinned or {}).items():
        freeable[row] -= count
    host_tokens = np.array([(on_host or {}).get(row, 0) for row in range(len(values))], dtype=np.int32)
    runs = numbers[0] if host is None else numbers[0][~np.isin(numbers[0], host.arriving)]
    return SchedulerView(
        now_s=now_s,
        columns=_columns(values, host_tokens),
        waiting=numbers[2],
        running=runs,
        preempted=numbers[1],
        num_in_flight=num_in_flight,
        free_blocks=free_blocks,
        block_size=block_size,
        limits=Limits(max_batch_tokens, max_batch_rows),
        blocks=StatedBlocks(freeable, values[:, 2], cached or {}),
        host=host,
        cost=cost,
    )


def _columns(values: I32, host_tokens: I32) -> Columns:
    """Return columns of rows of which nothing but counts is known: [n, 4] prompt, output, computed, blocks."""
    nan = np.full(len(values), np.nan)
    return Columns(
        num_prompt=values[:, 0],
        num_output=values[:, 1],
        num_computed=values[:, 2],
        held_blocks=values[:, 3],
        host_tokens=host_tokens,
        order=np.arange(len(values), dtype=np.int64),
        arrival_s=np.arange(len(values), dtype=np.float64),
        expires_s=np.full(len(values), np.inf),
        last_token_s=np.arange(len(values), dtype=np.float64),
        num_preemptions=np.zeros(len(values), dtype=np.int32),
        tier=np.ones(len(values), dtype=np.uint8),
        slo_ttft_s=np.full(len(values), np.inf),
        slo_tpot_s=np.full(len(values), np.inf),
        qoe_ttft_s=nan,
        qoe_speed=nan,
        qoe_gap_s=nan,
        thinks=np.zeros(len(values), dtype=np.bool_),
        num_thought=np.zeros(len(values), dtype=np.int32),
        qoe_last_s=nan,
        qoe_delay_sum_s=nan,
    )


def in_lanes(
    view: SchedulerView,
    num_lanes: int,
    *in_flight: list[int],
    last_step: list[int] | None = None,
    ends: I32 | None = None,
) -> SchedulerView:
    """Return the view with some of its running rows in flight, batch by batch, and when each row ran last.

    Args:
        view: with nothing in flight.
        num_lanes: of the pipeline.
        in_flight: rows of each batch, the oldest first; a row may be in several.
        last_step: by row; 0 for all if left out.
        ends: by row, tokens whose KV exists when all is back; left out: all that are known. A row that falls short of
            these may be in the next step too.
    """
    flights = tuple(np.array(rows, dtype=np.int32) for rows in in_flight if rows)
    away = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *flights]))
    columns, steps = view.columns, np.array(last_step or [0] * view.columns.order.size, dtype=np.int64)
    known: I32 = columns.num_prompt + columns.num_output
    ends = known if ends is None else ends
    extensible = away[ends[away] < known[away]] if num_lanes > 1 else away[:0]
    return replace(
        view,
        running=view.running[~np.isin(view.running, away)],
        flights=flights,
        num_in_flight=int(away.size),
        in_flight=away,
        in_flight_ends=ends[away],
        extensible=extensible,
        extensible_begins=ends[extensible],
        limits=replace(view.limits, num_lanes=num_lanes),
        columns=replace(columns, last_step=steps),
    )


def random_flights(view: SchedulerView, num_lanes: int, random: np.random.Generator) -> SchedulerView:
    """Put some of the running rows into a batch or two; prompts among them may have part of their tokens there."""
    columns = view.columns
    away = view.running[random.random(view.running.size) < random.choice([0.0, 0.3, 0.6])]
    ends: I32 = (columns.num_prompt + columns.num_output).astype(np.int32)
    for row in away.tolist():
        if random.random() < 0.7:
            ends[row] = random.integers(columns.num_computed[row] + 1, ends[row] + 1)
    held = np.maximum(columns.held_blocks, -(-ends // view.block_size))
    held = np.where(np.isin(np.arange(held.size), away), held, columns.held_blocks).astype(np.int32)
    view = replace(view, columns=replace(columns, held_blocks=held))
    twice = away[(ends[away] < (columns.num_prompt + columns.num_output)[away]) & (random.random(away.size) < 0.5)]
    last_step = random.integers(0, 5, columns.order.size).tolist()
    return in_lanes(view, num_lanes, away.tolist(), twice.tolist(), last_step=last_step, ends=ends)


def random_cached(num_known: int, random: np.random.Generator, held: int = 0) -> CachedPrefix:
    """Some full blocks, part of them in use; with a follower that few names stand for, now and then on its way."""
    num_blocks = int(random.integers(held, (num_known - 1) // 4 + 1))
    return CachedPrefix(
        num_tokens=4 * num_blocks,
        num_shared_blocks=int(random.integers(0, num_blocks - held + 1)),
        next_block=bytes([random.integers(4)]) if 4 * (num_blocks + 1) < num_known else None,
        is_coming=bool(random.random() < 0.2) and 4 * (num_blocks + 1) < num_known,
    )


def random_view(random: np.random.Generator, *, swaps: bool = False) -> SchedulerView:
    """A moment that an engine can be in: some rows run (decoding, prefilling, just rolled back), others wait.

    With `swaps` some preempted rows have KV on the host or hold their first blocks, others are on their way back, and
    copies take some time.
    """
    running: list[Row] = []
    for _ in range(random.integers(0, 9)):
        known = int(random.integers(1, 60))
        computed = known - 1 if random.random() < 0.6 else int(random.integers(0, known))
        blocks = max(-(-computed // 4), 1) + int(random.random() < 0.1)
        running.append((known - known // 3, known // 3, computed, blocks))
    preempted = [
        parked(n, held=int(random.integers(0, (n - 1) // 4 + 1)) if swaps and random.random() < 0.5 else 0)
        for n in random.integers(1, 60, size=random.integers(0, 4)).tolist()
    ]
    waiting = [parked(int(n)) for n in random.integers(1, 60, size=random.integers(0, 6))]
    parked_rows = enumerate([*preempted, *waiting], start=len(running))
    on_host = {
        len(running) + i: int(random.integers(computed + 1, known))
        for i, (known, _, computed, _) in enumerate(preempted)
        if swaps and known > computed + 1 and random.random() < 0.5
    }
    view = make_view(
        running=running,
        preempted=preempted,
        waiting=waiting,
        free_blocks=int(random.choice([0, 1, 2, 5, 20, 100])) + (0 if running else 20),
        max_batch_tokens=int(random.choice([1, 8, 32, 64])),
        max_batch_rows=int(random.integers(1, 10)),
        cached={
            row: random_cached(known, random, held) for row, (known, _, _, held) in parked_rows if random.random() < 0.5
        },
        host=_random_host(len(running), random) if swaps else None,
        on_host=on_host,
        cost=per_token(0.01),
    )
    return _with_tiers(view, random) if random.random() < 0.5 else view


def _with_tiers(view: SchedulerView, random: np.random.Generator) -> SchedulerView:
    """Return it with requests of any tier, some of which have limits."""
    num = view.columns.num_prompt.size
    limits = np.where(random.random((2, num)) < 0.3, random.random((2, num)), np.inf)
    tiers = random.integers(0, 3, num).astype(np.uint8)
    return replace(view, columns=replace(view.columns, tier=tiers, slo_ttft_s=limits[0], slo_tpot_s=limits[1]))


def with_sides(view: SchedulerView, from_right: list[int]) -> SchedulerView:
    """Return it where blocks are shared, and some rows fill theirs from the right; all decode."""
    rows, columns = view.running, view.columns
    num_left = columns.held_blocks[rows] * view.block_size - columns.num_computed[rows]
    others = rows[(num_left > 1) & (num_left < view.block_size)]
    is_right = np.isin(np.arange(columns.order.size), from_right)
    return replace(view, sides=Sides(others[is_right[others]], others[~is_right[others]], is_right))


def _random_host(num_running: int, random: np.random.Generator) -> HostView:
    leaving = int(random.choice([0, 0, 1, 8]))
    return host_view(
        free_blocks=int(random.choice([0, 3, 100])),
        leaving_blocks=leaving,
        num_leaving=leaving + int(random.integers(3)),
        arriving=tuple(row for row in range(1, num_running) if random.random() < 0.15),
        block_copy_s=float(random.choice([0.0, 0.01, 10.0])),
        lent_blocks=int(random.choice([0, 5])) if leaving else 0,
    )


def check_contract(view: SchedulerView, output: SchedulerOutput) -> None:
    """Check the answer against what `Scheduler.schedule` promises."""
    columns, rows = view.columns, output.rows
    swaps = output.preempt_how == PreemptHow.SWAP
    dropped, swapped = output.preempt[~swaps], output.preempt[swaps]
    kept, held = output.preempt_kept, columns.held_blocks
    known = columns.num_prompt + columns.num_output
    listed = np.concatenate([view.running, view.extensible, view.preempted, view.waiting])
    computed = columns.num_computed.copy()
    computed[view.extensible] = view.extensible_begins
    assert len(set(rows.tolist())) == rows.size == output.num_tokens.size, "each row once"
    assert set(rows.tolist()) <= set(listed.tolist())
    assert rows.size <= view.limits.max_batch_rows
    assert int(output.num_tokens.sum()) <= view.limits.max_batch_tokens
    assert (output.num_tokens >= 1).all()
    parked_rows = np.isin(rows, np.concatenate([view.preempted, view.waiting]))
    found = [view.blocks.cached(row) if parks else None for row, parks in zip(rows.tolist(), parked_rows, strict=True)]
    begin = np.where(parked_rows, [hit.num_tokens if hit else 0 for hit in found], computed[rows])
    shared = np.where(parked_rows, [hit.num_shared_blocks if hit else 0 for hit in found], 0)
    assert (begin + output.num_tokens <= known[rows]).all()
    holding = view.preempted[held[view.preempted] > 0]
    assert set(output.preempt.tolist()) <= {*view.running.tolist(), *holding.tolist()} - set(rows.tolist())
    if output.preempt.size:
        shared = np.zeros_like(shared)
    needed = np.maximum(-(-(begin + output.num_tokens) // view.block_size) - held[rows] - shared, 0).sum()
    back = output.resume
    assert set(back.tolist()) <= set(view.preempted.tolist()) - set(rows.tolist())
    assert len(set(back.tolist())) == back.size, "each comes back once"
    assert (columns.host_tokens[back] > 0).all(), "only what is on the host can be brought back"
    assert not columns.host_tokens[rows].any(), "KV on the host is not computed anew"
    assert not set(back.tolist()) & set(output.preempt.tolist()), "who comes back gives nothing up"
    needed += (-(-columns.host_tokens[back] // view.block_size) - held[back]).sum()
    needed -= _num_opening(view, output)
    assert needed <= view.free_blocks + view.blocks.freeable(dropped).sum() - kept[~swaps].sum(), "it fits"
    _check_victims(view, output)
    decodes = (known[rows] - columns.num_computed[rows]) == 1
    first_chunk = int(np.flatnonzero(~decodes)[0]) if (~decodes).any() else rows.size
    running_decodes = np.isin(rows, view.running) & decodes
    assert not running_decodes[first_chunk:].any(), "decodes first"
    if view.running.size:
        next_token = columns.num_computed[view.running] + 1
        missing = np.maximum(-(-next_token // view.block_size) - held[view.running], 0)
        others = int(view.blocks.freeable(np.concatenate([view.running[1:], holding])).sum())
        can_go_on = (missing <= view.free_blocks).any() or missing[0] <= view.free_blocks + others
        on_its_way = view.host is not None and (view.host.leaving_blocks or view.host.arriving.size)
        copies = swapped.size or back.size or on_its_way
        assert rows.size or copies or not can_go_on, "somebody who runs can go on, so somebody does"
    elif not (rows.size or back.size or view.num_in_flight or (view.host is not None and view.host.arriving.size)):
        _check_nobody_starves(view, output)


def _num_opening(view: SchedulerView, output: SchedulerOutput) -> int:
    """Return how many of those that run on begin a block and find the end of one of somebody who does not give way."""
    columns, sides = view.columns, view.sides
    begins = columns.num_computed[output.rows] == columns.held_blocks[output.rows] * view.block_size
    rows = output.rows[begins & (output.num_tokens == 1) & np.isin(output.rows, view.running)]
    left, right = (of[~np.isin(of, output.preempt)] for of in (sides.for_left, sides.for_right))
    return Sides(left, right, sides.from_right).num_of(rows)


def _check_victims(view: SchedulerView, output: SchedulerOutput) -> None:
    """Check who gives way: each gives something, and what goes to the host fits there."""
    victims, kept, swaps = output.preempt, output.preempt_kept, output.preempt_how == PreemptHow.SWAP
    computed, held = view.columns.num_computed[victims], view.columns.held_blocks[victims]
    assert output.preempt_how.size == victims.size == kept.size == len(set(victims.tolist()))
    assert (kept * view.block_size <= computed).all(), "only full blocks are kept"
    assert ((kept < held) | ((kept == 0) & (held == 0))).all(), "who gives way gives something"
    if swaps.any():
        assert view.host is not None
        wanted = -(-computed[swaps] // view.block_size) - kept[swaps]
        assert wanted.sum() <= view.host.free_blocks, "it fits the host"
        assert (wanted > 0).all(), "there is something to move"


def _check_nobody_starves(view: SchedulerView, output: SchedulerOutput) -> None:
    """Where nobody runs, the first of the parked rows comes in if it fits the memory that nobody runs in."""
    columns = view.columns
    parked_rows = np.concatenate([view.preempted, view.waiting])
    comes = [row for row in parked_rows.tolist() if columns.host_tokens[row] or not view.blocks.cached(row).is_coming]
    if comes:
        head = comes[0]
        need = -(-int(columns.num_prompt[head] + columns.num_output[head]) // view.block_size)
        others = view.preempted[view.preempted != head]
        room = view.free_blocks + int(columns.held_blocks[head]) + int(view.blocks.freeable(others).sum())
        makes_way = output.preempt.size or (view.host is not None and view.host.leaving_blocks)
        assert makes_way or need > room, "parked rows keep the first of them from running"


def decide(scheduler: str, view: SchedulerView) -> SchedulerOutput:
    """What a scheduler chooses, which keeps the contract."""
    output = make_scheduler(scheduler).schedule(view)
    check_contract(view, output)
    return output


def chosen(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Rows of a step, and how many tokens each computes."""
    return list(zip(output.rows.tolist(), output.num_tokens.tolist(), strict=True))


def answer(output: SchedulerOutput) -> tuple[list[int], list[tuple[int, int]]]:
    """Who gives way, and what is `chosen`."""
    return output.preempt.tolist(), chosen(output)
