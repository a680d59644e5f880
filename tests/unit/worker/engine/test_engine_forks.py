"""Forks (n > 1): a child waits for its parent's prompt, shares it, copies the block that is not full; or goes alone."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.stats import take_stats
from services.worker.sequences.config import AddRefusal
from services.worker.sequences.table import Hold
from shared.api_keys import Tier
from shared.types import FinishReason
from tests.support.engine_builders import new_sequence, per_token
from tests.support.engine_harness import EngineHarness, make_harness

PROMPT = [(11 * i) % 97 + 2 for i in range(22)]


def harness_of(
    *, prefix_caching: bool = False, scheduler: str = "chunked", num_blocks: int = 64, depth: int = 1
) -> EngineHarness:
    """8 tokens a step, so that a prompt of 22 takes three; steps are faster than readers, so nobody is kept out."""
    return make_harness(
        scheduler,
        num_blocks=num_blocks,
        max_batch_tokens=8,
        prefix_caching=prefix_caching,
        depth=depth,
        cost=per_token(1e-3),
    )


def add_family(harness: EngineHarness, num_children: int, *, num_prompt: int = 22, max_tokens: int = 6) -> list[int]:
    """Add a parent and its children, each with a seed of its own; return their rows."""
    rows = []
    for name in range(num_children + 1):
        fork_of = 0 if name else None
        new = new_sequence(name, prompt=PROMPT[:num_prompt], max_tokens=max_tokens, seed=name, fork_of=fork_of)
        row = harness.add(new)
        assert not isinstance(row, AddRefusal)
        rows.append(row)
    return rows


def is_held(harness: EngineHarness, row: int) -> bool:
    return bool(harness.engine.table.hold[row] & Hold.FORK)


def run_counting(harness: EngineHarness) -> int:
    """Run to the end, judge the texts, and return how many tokens all steps computed."""
    num_tokens = 0
    while harness.engine.table.num_sequences:
        batch = harness.submit()
        num_tokens += 0 if batch is None else int(batch.num_tokens.sum())
        harness.land()
    harness.judge()
    assert harness.engine.blocks.num_free == harness.engine.blocks.num_usable
    return num_tokens


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("num_prompt", "copies"), [(1, 0), (4, 3), (5, 0), (20, 3), (21, 0), (22, 3)])
def test_children_compute_one_prompt_token_and_copy_only_a_block_that_is_not_full(
    scheduler: str, num_prompt: int, copies: int, *, prefix_caching: bool
) -> None:
    """All but the last prompt token is shared; a copy is needed unless those fill whole blocks. 5 decodes each."""
    harness = harness_of(scheduler=scheduler, prefix_caching=prefix_caching)
    add_family(harness, 3, num_prompt=num_prompt)
    assert run_counting(harness) == num_prompt + 3 + 4 * 5
    assert harness.num_copies == copies
    assert len({tuple(story.text) for story in harness.stories.values()}) == 4, "each has a seed of its own"


@pytest.mark.parametrize("depth", [1, 2])
def test_children_wait_until_the_last_chunk_of_the_prompt_is_there(depth: int) -> None:
    harness = harness_of(depth=depth)
    rows = add_family(harness, 2)
    for _ in range(2):
        harness.step()
        assert [is_held(harness, row) for row in rows] == [False, True, True]
    harness.step()
    assert [is_held(harness, row) for row in rows] == [False, False, False]
    assert run_counting(harness) > 0


def test_a_family_holds_its_prompt_once() -> None:
    """22 tokens: 5 full blocks for all, and of the rest each has one of its own."""
    harness = harness_of()
    add_family(harness, 3)
    for _ in range(4):
        harness.step()
    assert take_stats(harness.engine).num_used_blocks == 5 + 4
    harness.drain()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("end", ["cancel", "fail", "preempt"])
def test_children_go_alone_when_their_parent_is_gone(end: str, num_steps: int, *, prefix_caching: bool) -> None:
    """After 0, 1 or 2 chunks of the prompt, with the prompt done, or with the children running."""
    harness = harness_of(prefix_caching=prefix_caching)
    rows = add_family(harness, 2)
    for _ in range(num_steps):
        harness.step()
    if end == "cancel":
        harness.cancel(harness.stories[1000])
    elif end == "preempt" and num_steps:
        harness.engine.pause(0)
        harness.engine.resume(0)
        harness.settle()
    elif end == "fail":
        for _ in range(8):
            batch = harness.submit()
            if batch is not None:
                harness.land("broken" if rows[0] in batch.rows else None, blamed=(rows[0],))
    if end != "fail":
        assert [is_held(harness, row) for row in rows[1:]] == [end == "preempt" and not num_steps] * 2
    harness.finish()
    ends = [story.finish for story in harness.stories.values()]
    lost = {"cancel": FinishReason.CANCELLED, "fail": FinishReason.ERROR, "preempt": FinishReason.LENGTH}
    assert ends == [lost[end], FinishReason.LENGTH, FinishReason.LENGTH]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_parent_that_ends_with_its_first_token_leaves_no_child_behind(depth: int, *, prefix_caching: bool) -> None:
    harness = harness_of(prefix_caching=prefix_caching, depth=depth)
    add_family(harness, 3, max_tokens=1)
    num_tokens = run_counting(harness)
    assert num_tokens == (22 + 3 * 2 if prefix_caching else 4 * 22), "5 full blocks are found, or nothing"


def test_a_fork_of_nobody_runs_by_itself() -> None:
    harness = harness_of()
    row = harness.add(new_sequence(1, prompt=PROMPT, fork_of="gone"))
    assert not is_held(harness, row)
    assert run_counting(harness) == 22 + 3


@pytest.mark.parametrize("fork_of", [0, None])
@pytest.mark.parametrize("parent_runs", [True, False])
def test_a_sibling_that_found_no_room_and_comes_later_shares_the_prompt_all_the_same(
    fork_of: int | None, *, parent_runs: bool
) -> None:
    """Blocks of 4: of 22 prompt tokens 20 are cached; as a fork of a parent that still runs it lacks one token only."""
    harness = make_harness(num_blocks=64, max_sequences=2, max_batch_tokens=32)
    harness.add(new_sequence(0, prompt=PROMPT, max_tokens=40 if parent_runs else 2))
    harness.add(new_sequence(1, num_prompt=3, max_tokens=3))
    sibling = new_sequence(2, prompt=PROMPT, max_tokens=2, seed=2, fork_of=fork_of)
    refusal = new_sequence(2, prompt=PROMPT, max_tokens=2, seed=2, fork_of=0)
    assert harness.engine.registry.add(refusal) is AddRefusal.FULL
    harness.step_until_end_of(1001)
    row = harness.add(sibling)
    batch = harness.stepped()
    assert batch.num_tokens[batch.rows == row].tolist() == [1 if parent_runs and fork_of == 0 else 2]
    harness.finish()


def test_a_fork_must_have_the_parents_prompt_and_salt() -> None:
    harness = harness_of()
    harness.add(new_sequence(0, prompt=PROMPT, salt="a"))
    for name, prompt, salt in ((1, PROMPT[:21], "a"), (2, [*PROMPT[:21], 5], "a"), (3, PROMPT, "")):
        assert harness.offer(new_sequence(name, prompt=prompt, salt=salt, fork_of=0)) is AddRefusal.INVALID
    assert take_stats(harness.engine).num_waiting == 1
    run_counting(harness)


def test_a_child_that_waits_can_be_cancelled_and_one_can_have_children() -> None:
    harness = harness_of()
    rows = add_family(harness, 1)
    harness.add(new_sequence(2, prompt=PROMPT, seed=7, fork_of=1))
    harness.add(new_sequence(3, prompt=PROMPT, seed=8, fork_of=2))
    harness.step()
    assert is_held(harness, rows[1])
    harness.cancel(harness.stories[1001])
    harness.finish()


def test_a_child_goes_on_with_what_an_earlier_attempt_said() -> None:
    """20 prompt tokens are 5 blocks; the child shares them all, and computes its 3 outputs so far and 2 more."""
    whole = harness_of()
    whole.add(new_sequence(1, prompt=PROMPT[:20], max_tokens=6, seed=1))
    whole.drain()
    text = whole.stories[1001].text
    harness = harness_of()
    harness.add(new_sequence(0, prompt=PROMPT[:20], max_tokens=6))
    harness.add(new_sequence(1, prompt=PROMPT[:20], generated=text[:3], max_tokens=6, seed=1, attempt=2, fork_of=0))
    assert run_counting(harness) == 20 + 5 + 3 + 2
    assert (harness.stories[1001].text, harness.num_copies) == (text, 0)


@pytest.mark.parametrize("child", [Tier.DEFAULT, Tier.FLEX])
@pytest.mark.parametrize("parent", [Tier.DEFAULT, Tier.FLEX])
@pytest.mark.parametrize("first", [None, Tier.DEFAULT, Tier.FLEX])
def test_a_child_copies_a_block_only_if_it_was_filled_from_its_own_end(
    first: Tier | None, parent: Tier, child: Tier
) -> None:
    """Best effort fills from the right. If somebody came first, the parent found its 6 blocks as he has filled them."""
    harness, generated = make_harness(shares_blocks=True), list[int]()
    if first is not None:
        harness.add(new_sequence(0, prompt=PROMPT, max_tokens=6, tier=first))
        harness.drain()
        generated = harness.stories[1000].text[:3]
    harness.add(new_sequence(1, prompt=PROMPT, generated=generated, max_tokens=9, tier=parent))
    harness.add(new_sequence(2, prompt=PROMPT, max_tokens=5, seed=1, tier=child, fork_of=1))
    harness.finish()
    assert harness.num_copies == (child is (parent if first is None else first))


def test_a_failed_step_does_not_undo_a_copy() -> None:
    """The step that admits the children fails: the copies are made all the same, and are not asked for again."""
    harness = harness_of()
    add_family(harness, 2)
    for _ in range(3):
        harness.step()
    batch = harness.submitted()
    assert batch.copies.source.size == 2
    harness.land("bad luck")
    harness.finish()
    assert harness.num_copies == 2


def test_the_source_of_a_copy_stays_as_it_is_until_the_copy_is_made() -> None:
    """Two batches in flight: the parent ends with the first while the second, which copies from it, is under way."""
    harness = harness_of(depth=2)
    harness.add(new_sequence(0, prompt=PROMPT, max_tokens=2))
    harness.add(new_sequence(1, prompt=PROMPT, max_tokens=5, seed=1, fork_of=0))
    while is_held(harness, 1):
        harness.step()
    first, second = harness.submit(), harness.submit()
    assert first is not None
    batch = second if second is not None else first
    while not batch.copies.source.size:
        harness.land()
        following = harness.submitted()
        batch = following
    source = int(batch.copies.source[0])
    harness.cancel(harness.stories[1000])
    while harness.flights and harness.flights[0] is not batch:
        harness.land()
    assert harness.engine.blocks.pins[source] == 1
    harness.finish()


def test_no_room_for_the_parent_lets_the_children_go() -> None:
    """The parent needs 22 + 40 - 1 tokens, 16 blocks; its child stops early and needs 6. 8 blocks are left."""
    harness = harness_of(num_blocks=16)
    harness.add(new_sequence(0, prompt=PROMPT, max_tokens=40))
    row = harness.add(new_sequence(1, prompt=PROMPT, max_tokens=2, seed=1, fork_of=0))
    harness.step()
    harness.change_executor(8)
    assert isinstance(row, int)
    assert not is_held(harness, row)
    harness.step_until_end_of(1001)
    harness.judge()
    assert harness.stories[1000].finish is FinishReason.NONE


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_many_families_in_a_small_memory_all_finish(scheduler: str, *, prefix_caching: bool) -> None:
    """Each sequence alone needs up to 15 of the 18 blocks; with some policies they happen to come so that all fit."""
    random = np.random.default_rng(3)
    harness = harness_of(scheduler=scheduler, prefix_caching=prefix_caching, num_blocks=18)
    for name in range(15):
        first = name - name % 3
        num_prompt = 10 + 2 * first
        new = new_sequence(
            name,
            prompt=[(first + 5 * i) % 97 + 2 for i in range(num_prompt)],
            max_tokens=int(random.integers(1, 20)),
            seed=name,
            fork_of=first if name % 3 else None,
        )
        harness.add(new)
    harness.finish()
    assert harness.engine.totals.num_preemptions > 0 or scheduler in {"lqsf", "class-round-robin"}
    assert harness.num_copies > 0
