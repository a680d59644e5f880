"""The shadow KV: equal to the undisturbed text when nothing is wrong, different when anything is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.contract.arrays import I32
from services.worker.contract.batch import Batch, CopyOps, RowInit, TableDelta
from services.worker.contract.executor import HostCopy
from services.worker.modelled.executor import step_s
from services.worker.modelled.shadow_kv import ShadowKv, TokenDraw, expected_outputs, layer_weight
from shared.cost import CostModel, StageCost
from shared.layers import LayerRange, even_split
from shared.types import SamplingParams

HOST_BLOCKS = 4
DRAW = TokenDraw.of_vocabulary(1000, (5, 6), first_id=3)


def i32(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def batch(tokens: list[int], *, start: int, step_id: int = 0, table: list[int] | None = None, row: int = 0) -> Batch:
    """One row computes `tokens`; with `table` it is admitted, with these blocks."""
    blocks = table or []
    return Batch(
        step_id=step_id,
        rows=i32(row),
        num_tokens=i32(len(tokens)),
        start=i32(start),
        tokens=i32(*tokens),
        sample=np.array([True]),
        table_delta=TableDelta(i32(*([row] * len(blocks))), np.arange(len(blocks), dtype=np.int32), i32(*blocks)),
        admits=(RowInit(row, SamplingParams(max_tokens=99)),) if blocks else (),
    )


def run(kv: ShadowKv, step: Batch) -> int:
    kv.take_in(step)
    return int(kv.compute(step)[0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=30), st.integers(1, 30), st.booleans())
def test_prefill_in_any_chunks_and_decodes_give_the_undisturbed_text(
    prompt: list[int], chunk: int, exact: bool
) -> None:
    kv, text = ShadowKv(16, 4, DRAW, verify_ratio=float(exact)), []  # type: tuple[ShadowKv, list[int]]
    table = np.random.default_rng(len(prompt)).permutation(16).tolist()
    for start in range(0, len(prompt), chunk):
        token = run(kv, batch(prompt[start : start + chunk], start=start, table=None if start else table))
    for position in range(len(prompt), len(prompt) + 10):
        text.append(token)
        token = run(kv, batch([token], start=position))
    assert text == expected_outputs(i32(*prompt), i32(), 10, 0, DRAW).tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=30), st.integers(1, 30), st.booleans())
def test_a_block_can_be_shared_from_both_ends(prompt: list[int], chunk: int, exact: bool) -> None:
    """Two rows with the same blocks of 64, one of which fills them from the left and one from the right."""
    kv, texts = ShadowKv(16, 64, DRAW, verify_ratio=float(exact)), ([], [])  # type: tuple[ShadowKv, tuple[list[int], ...]]
    prompts = (prompt, prompt[:11][::-1])
    for row, (mine, table) in enumerate(zip(prompts, ([5], [~5]), strict=True)):
        for start in range(0, len(mine), chunk):
            step = batch(mine[start : start + chunk], start=start, table=None if start else table, row=row)
            token = run(kv, step)
        texts[row].append(token)
    for i in range(9):
        for row in (0, 1):
            texts[row].append(run(kv, batch([texts[row][-1]], start=len(prompts[row]) + i, row=row)))
    for mine, text in zip(prompts, texts, strict=True):
        assert text == expected_outputs(i32(*mine), i32(), 10, 0, DRAW).tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_meet_in_a_block_change_the_text(shared: bool) -> None:
    """Three tokens from the left and two from the right do not fit into a block of four."""
    kv = ShadowKv(8, 4, DRAW, verify_ratio=1.0)
    run(kv, batch([10, 11, 12], start=0, table=[5]))
    run(kv, batch([20, 21], start=0, table=[~5 if shared else ~6], row=1))
    assert (run(kv, batch([13], start=3)) == expected_outputs(i32(10, 11, 12, 13), i32(), 1, 0, DRAW)[0]) != shared


def text_after(damage: object) -> tuple[int, int]:
    """Return the token after some damage to the KV of eight tokens in blocks 2 and 5, and the one without."""
    kv = ShadowKv(8, 4, DRAW, num_host_blocks=HOST_BLOCKS, verify_ratio=1.0)
    run(kv, batch([10, 11, 12, 13, 14, 15, 16, 17], start=0, table=[2, 5, 3]))
    damage(kv)  # type: ignore[operator]
    kv_whole = ShadowKv(8, 4, DRAW, verify_ratio=1.0)
    run(kv_whole, batch([10, 11, 12, 13, 14, 15, 16, 17], start=0, table=[2, 5, 3]))
    step = batch([18], start=8)
    return run(kv, step), run(kv_whole, step)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv: kv.poison(i32(2)),
        lambda kv: kv.take_in(batch([1], start=0, table=[5], row=1)) or kv.spoil(batch([1], start=0, row=1)),
        lambda kv: kv.take_in(replace(batch([1], start=0), copies=CopyOps(i32(2), i32(5)))),
        lambda kv: kv._slots.__setitem__(5, kv._slots[5][::-1] + np.uint64(1)),
        lambda kv: kv._table.__setitem__((0, 1), 2),
        lambda kv: run(kv, batch([99], start=0, table=[2], row=1)),
    ],
    ids=["freed early", "spoiled by a failed step", "copied over", "changed", "doubled", "shared with another"],
)
def test_any_damage_changes_the_text(damage: object) -> None:
    damaged, whole = text_after(damage)
    assert damaged != whole


def test_copied_blocks_carry_the_text_on() -> None:
    """The copy of block 2 into block 7, and a table that names 7 instead, leave the text as it was."""

    def move(kv: ShadowKv) -> None:
        step = replace(batch([1], start=0), copies=CopyOps(i32(2), i32(7)))
        kv.take_in(replace(step, table_delta=TableDelta(i32(0), i32(0), i32(7))))
        kv.poison(i32(2))

    moved, whole = text_after(move)
    assert moved == whole


def swapped(kv: ShadowKv, *, out: HostCopy, back: HostCopy, reuse_before_end: bool = False) -> None:
    """Copy the row's blocks to the host, let another row's KV into them, and bring them back into other blocks."""
    kv.begin_copy(out)
    if reuse_before_end:
        kv.poison(out.device)
    kv.end_copy(out)
    kv.poison(out.device)
    kv.begin_copy(back)
    kv.end_copy(back)


GOING = {
    "out": HostCopy(0, i32(2, 5), i32(1, 3), to_host=True),
    "back": HostCopy(1, i32(7, 6), i32(1, 3), to_host=False),
}


@pytest.mark.parametrize(
    ("changes", "is_whole"),
    [
        ({}, True),
        ({"reuse_before_end": True}, False),
        ({"back": HostCopy(1, i32(7, 6), i32(1, 2), to_host=False)}, False),
        ({"out": HostCopy(0, i32(2, 4), i32(1, 3), to_host=True)}, False),
    ],
    ids=["whole", "freed before the copy was done", "from a wrong host block", "of a wrong block"],
)
def test_kv_that_was_on_the_host_carries_the_text_on_if_every_slot_is_right(
    changes: dict[str, object], is_whole: bool
) -> None:
    def move(kv: ShadowKv) -> None:
        swapped(kv, **{**GOING, **changes})  # type: ignore[arg-type]
        kv.take_in(replace(batch([1], start=0), table_delta=TableDelta(i32(0, 0), i32(0, 1), i32(7, 6))))

    moved, whole = text_after(move)
    assert (moved == whole) is is_whole


def test_nobody_can_use_kv_before_its_copy_has_ended() -> None:
    def early(kv: ShadowKv) -> None:
        kv.begin_copy(GOING["out"])
        kv.end_copy(GOING["out"])
        kv.begin_copy(GOING["back"])
        kv.take_in(replace(batch([1], start=0), table_delta=TableDelta(i32(0, 0), i32(0, 1), i32(7, 6))))

    moved, whole = text_after(early)
    assert moved != whole


def test_a_running_sum_is_taken_anew_when_the_table_changes_in_the_middle() -> None:
    """Without any verification at random: the changed entry alone is the reason."""
    kv = ShadowKv(8, 4, DRAW, verify_ratio=0.0)
    run(kv, batch([10, 11, 12, 13, 14], start=0, table=[2, 5]))
    kv.take_in(replace(batch([1], start=0), table_delta=TableDelta(i32(0), i32(0), i32(6))))
    whole = expected_outputs(i32(10, 11, 12, 13, 14, 15), i32(), 1, 0, DRAW)
    assert run(kv, batch([15], start=5)) != whole[0]


def test_the_model_says_only_allowed_ids() -> None:
    text = expected_outputs(i32(1), i32(), 3000, 7, DRAW)
    assert text.min() >= 3
    assert text.max() < 1000
    assert not np.isin(text, [5, 6]).any()
    assert np.unique(text).size > 900, "the whole range is in use"


def test_rows_must_be_admitted_before_use_and_dropped_before_they_are_admitted_again() -> None:
    kv = ShadowKv(8, 4, DRAW)
    with pytest.raises(AssertionError, match="does not know"):
        run(kv, batch([1], start=0))
    run(kv, batch([1], start=0, table=[1]))
    with pytest.raises(AssertionError, match="before it was dropped"):
        run(kv, batch([1], start=0, table=[1]))


@pytest.mark.parametrize(
    ("start", "num_tokens", "expected_s"),
    [
        ([9, 4, 10], [1, 1, 3], 1.0 + 0.5 + 0.15 + 0.036),
        ([9, 4], [1, 1], 1.0 + 0.2 + 0.15),
        ([9, 4, 0], [1, 1, 2], 1.0 + 0.4 + 0.15 + 0.003),
    ],
)
def test_the_cost_of_a_batch_counts_decodes_and_prefill_pairs(
    start: list[int], num_tokens: list[int], expected_s: float
) -> None:
    """Decodes at 9 and 4: 15 KV tokens. Chunk of 3 after 10: 3 * 10 + (9 + 3) / 2 = 36 pairs; of 2 at the front: 3."""
    rows, tokens = np.arange(len(start), dtype=np.int32), np.ones(sum(num_tokens), dtype=np.int32)
    step = Batch(0, rows, i32(*num_tokens), i32(*start), tokens, np.ones(rows.size, dtype=np.bool_))
    cost = CostModel(g0_s=1.0, b0_s=0.1, g1_s=0.0, b1_s=0.0, d_s=0.01, a_s=0.001)
    assert step_s(cost, step) == pytest.approx(expected_s)


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.4, 1.0])
def test_of_the_rows_of_all_steps_the_share_that_was_asked_for_is_verified(ratio: float) -> None:
    """Twelve rows decode 160 times. Their running sums are spoilt before each step, so what is right was verified."""
    num_rows, num_steps, num_right = 12, 160, 0
    rows, ones = np.arange(num_rows, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
    table = TableDelta(
        row=np.repeat(rows, num_steps // 8),
        index=np.tile(np.arange(num_steps // 8, dtype=np.int32), num_rows),
        block_id=np.arange(num_rows * num_steps // 8, dtype=np.int32),
    )
    memories = ShadowKv(300, 8, DRAW, verify_ratio=ratio, seed=3), ShadowKv(300, 8, DRAW, verify_ratio=1.0)
    admits = tuple(RowInit(row, SamplingParams(max_tokens=999)) for row in rows.tolist())
    for position in range(num_steps):
        step = Batch(position, rows, ones, position * ones, rows, np.ones(num_rows, dtype=np.bool_))
        for kv in memories:
            kv.take_in(step if position else replace(step, table_delta=table, admits=admits))
        found, right = (kv.share(step) for kv in memories)
        num_right += int(np.count_nonzero(found == right))
        memories[0]._sum[:num_rows] = right + np.uint64(1)
    num, chance = num_rows * (num_steps - 1), ratio * (1 - ratio)
    assert num_right - num_rows == pytest.approx(num * ratio, abs=num_rows + 4 * (num * chance) ** 0.5)


# Stages of a pipeline


def stages_of(ranges: tuple[LayerRange, ...], num_blocks: int = 16) -> list[ShadowKv]:
    num_layers = ranges[-1].end
    return [ShadowKv(num_blocks, 4, DRAW, weight=layer_weight(layers, num_layers)) for layers in ranges]


def run_through(stages: list[ShadowKv], step: Batch) -> int:
    words = np.zeros(step.rows.size, dtype=np.uint64)
    for kv in stages:
        kv.take_in(step)
        words = words + kv.share(step)
    return int(stages[-1].sample(step, words)[0])


TILINGS = st.sets(st.integers(1, 47)).map(lambda borders: sorted({0, 48, *borders}))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 999), min_size=1, max_size=12), TILINGS)
def test_the_text_does_not_depend_on_how_the_layers_are_split(prompt: list[int], borders: list[int]) -> None:
    stages = stages_of(tuple(LayerRange(a, b) for a, b in pairwise(borders)))
    token, text = run_through(stages, batch(prompt, start=0, table=[9, 3, 7, 1, 12, 5])), []
    for position in range(len(prompt), len(prompt) + 8):
        text.append(token)
        token = run_through(stages, batch([token], start=position))
    assert text == expected_outputs(i32(*prompt), i32(), 8, 0, DRAW).tolist()


def test_a_stage_has_a_share_and_not_the_word() -> None:
    first, _ = stages_of((LayerRange(0, 1), LayerRange(1, 2)))
    step = batch([1], start=0, table=[1])
    first.take_in(step)
    with pytest.raises(AssertionError, match="share"):
        first.compute(step)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_a_block_that_is_lost_on_any_stage_changes_the_text(num_stages: int) -> None:
    tokens = []
    for damaged in (None, *range(num_stages)):
        stages = stages_of(even_split(7, num_stages))
        run_through(stages, batch([10, 11, 12, 13, 14], start=0, table=[2, 5]))
        if damaged is not None:
            stages[damaged].poison(i32(2))
            stages[damaged].verify(1.0)
        tokens.append(run_through(stages, batch([15], start=5)))
    assert len(set(tokens)) == num_stages + 1, "each loss shows, and differently"


@given(TILINGS, st.integers(0, 4000), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 5))
def test_the_stages_of_any_split_take_as_long_as_the_model_in_one_piece(
    borders: list[int], num_tokens: int, kv_tokens: int, pairs: int, head_layers: float
) -> None:
    whole = CostModel(g0_s=0.02, b0_s=5e-5, g1_s=0.015, b1_s=9e-5, d_s=1e-7, a_s=5e-9, era_s=0.003)
    ranges = [LayerRange(a, b) for a, b in pairwise(borders)]
    parts = [StageCost(whole, layers, 48, head_layers).step_s(num_tokens, kv_tokens, pairs) for layers in ranges]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(whole.step_s(num_tokens, kv_tokens, pairs))
