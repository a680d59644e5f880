"""Cached prefixes in the engine: who finds what, who waits for whom, and what is forgotten. Blocks have 4 slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.policy.prefixes import HeldPrefixes
from services.worker.blocks.prefix_index import PrefixIndex
from services.worker.blocks.run_ends import RunEnds
from services.worker.contract.arrays import I32
from services.worker.contract.batch import BatchOutput
from services.worker.engine.sketch import sketch_prefixes
from services.worker.engine.stats import take_stats
from services.worker.migration.shared_prefixes import find_prefix
from services.worker.sequences.config import NewSequence
from services.worker.sequences.events import RowExtra
from shared.ids import WorkerId
from shared.messages.report_parts import MAX_SKETCH_MARKS
from shared.prefix_names import NUM_MARKS, following_names, root_name
from shared.prefix_sketch import listed_marks
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason
from tests.support.engine_builders import FIRST_COME, new_sequence
from tests.support.engine_harness import EngineHarness, make_harness

PROMPT = [(11 * i) % 97 + 2 for i in range(40)]


def i32(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def first_batch_of(harness: EngineHarness, new: NewSequence) -> tuple[int, int]:
    """Add a sequence, run it to its end, and return (start, tokens) of the first step that computed it."""
    row, found = harness.add(new), None
    while harness.engine.table.num_sequences:
        batch = harness.step()
        if found is None and batch is not None and row in batch.rows:
            at = batch.rows.tolist().index(row)
            found = int(batch.start[at]), int(batch.num_tokens[at])
    assert found is not None
    return found


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.booleans())
def test_names_are_equal_exactly_as_far_as_salt_and_all_tokens_are(a: list[int], b: list[int], salted: bool) -> None:
    names_a = following_names(root_name(""), i32(*a).tobytes(), 3)
    names_b = following_names(root_name("x" if salted else ""), i32(*b).tobytes(), 3)
    assert (len(names_a), len(names_b)) == (len(a) // 3, len(b) // 3)
    for i, (name_a, name_b) in enumerate(zip(names_a, names_b, strict=False), start=1):
        assert (name_a == name_b) == (not salted and a[: 3 * i] == b[: 3 * i])
    assert following_names(names_a[0], i32(*a[3:]).tobytes(), 3) == names_a[1:] if names_a else True


def test_the_index_finds_a_beginning_and_keeps_the_first_block_of_a_name() -> None:
    index = PrefixIndex(8)
    for block, name in ((3, b"a"), (5, b"b"), (6, b"a"), (1, b"d")):
        index.add(name, block)
    assert index.find([b"a", b"b", b"c", b"d"]) == [3, 5]
    index.forget(i32(3, 6, 7))
    assert index.find([b"a"]) == []
    assert (index.find([b"b"]), len(index)) == ([5], 2)
    index.check_invariants()


@pytest.mark.parametrize(("num_prompt", "num_found"), [(3, 0), (4, 0), (5, 4), (20, 16), (21, 20), (40, 36)])
def test_a_prompt_is_found_but_for_its_last_token(num_prompt: int, num_found: int) -> None:
    harness = make_harness()
    assert first_batch_of(harness, new_sequence(0, prompt=PROMPT[:num_prompt])) == (0, min(num_prompt, 32))
    assert first_batch_of(harness, new_sequence(1, prompt=PROMPT[:num_prompt])) == (num_found, num_prompt - num_found)
    harness.judge()
    stats = take_stats(harness.engine)
    assert (stats.totals.num_prefix_cache_queries, stats.totals.num_prefix_cache_hits) == (2 * num_prompt, num_found)


def test_the_first_token_says_how_much_of_the_prompt_was_found() -> None:
    harness = make_harness()
    first_batch_of(harness, new_sequence(0, prompt=PROMPT[:20]))
    harness.add(new_sequence(1, prompt=[5, *PROMPT[:9]]))
    harness.add(new_sequence(2, prompt=[*PROMPT[:17], 5]))
    events = []
    while harness.engine.table.num_sequences:
        harness.submit()
        events.append(harness.land())
    assert events[0].stream.tolist() == [1001, 1002]
    assert [step.extras for step in events] == [(RowExtra(1, cached_tokens=16),), (), (), ()]


def test_what_was_found_and_log_probabilities_come_in_one_extra() -> None:
    harness = make_harness()
    first_batch_of(harness, new_sequence(0, prompt=PROMPT[:20]))
    for name, prompt in ((1, [5] * 6), (2, PROMPT[:20]), (3, PROMPT[:18])):
        harness.add(new_sequence(name, prompt=prompt, max_tokens=1))
    batch, said = harness.submit(), TokenLogprob(-0.5)
    assert batch is not None
    output = BatchOutput(batch.step_id, np.full(3, 7, dtype=np.int32), 0.0, {0: said, 1: said})
    events = harness.engine.absorb(batch, output, 0.0)
    assert events.extras == (RowExtra(0, None, (said,)), RowExtra(1, 16, (said,)), RowExtra(2, 16))


def test_the_next_turn_of_a_talk_finds_the_answer_too() -> None:
    """10 prompt tokens and 9 outputs: 18 tokens have KV, 4 full blocks; the next turn begins behind 16 tokens."""
    harness = make_harness()
    first_batch_of(harness, new_sequence(0, prompt=PROMPT[:10], max_tokens=9))
    text = harness.stories[1000].text
    assert first_batch_of(harness, new_sequence(1, prompt=[*PROMPT[:10], *text, 7, 8])) == (16, 5)
    harness.judge()


@pytest.mark.parametrize("num_host_blocks", [0, 64])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_a_dispatcher_finds_by_the_sketch_what_the_engine_finds(num_blocks: int, num_host_blocks: int) -> None:
    """Prompts that begin alike come, answers are cached too, and much of it is lost again; only whole blocks count."""
    harness = make_harness(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    worker_id, held, found = WorkerId("w0"), HeldPrefixes(), 0
    for name in range(24):
        prompt = [*PROMPT[: 4 * (name % 7) + 5], name % 5 + 2, *range(2, 4 + name % 9)]
        held.take(worker_id, sketch_prefixes(harness.engine), 4, float(name))
        names = held.names_of(np.array(prompt[:-1], dtype="<u4").tobytes(), "")
        says = held.cached(names).get(worker_id, 0)
        row = harness.add(new_sequence(name, prompt=prompt, max_tokens=6))
        assert isinstance(row, int)
        assert says == len(find_prefix(harness.engine, harness.engine.sharing.shareable(row))) * 4
        found += says
        while harness.engine.table.num_sequences:
            harness.step()
    assert found > 40
    assert sketch_prefixes(make_harness(prefix_caching=False).engine) is None


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=30)


@settings(deadline=None)
@given(PATHS, st.integers(0, 6), st.sets(st.integers(0, 30)), st.integers(1, 8))
def test_the_newest_ends_are_those_that_nobody_went_on_from(
    paths: list[list[int]], most: int, lost: set[int], bound: int
) -> None:
    """A name is a path here; who ended at an end, or went on behind it, takes its place."""
    ends, expected = RunEnds(), list[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.worker.blocks.run_ends.MAX_ENDS", bound)
        for path in paths:
            names = [bytes(path[: end + 1]) for end in range(len(path))]
            ends.note(names)
            expected = [*(each for each in expected if each not in names), *names[-1:]][-bound:]
    held = [name for number, name in enumerate(reversed(expected)) if number not in lost]
    assert ends.newest(most, held.__contains__) == held[:most]


def test_a_sketch_of_much_knows_where_talks_ended_and_finds_the_next_turn_to_the_block() -> None:
    """150 talks of 9 full blocks each, of which the memory has 100; the sample lists every other block."""
    harness, random = make_harness(num_blocks=900), np.random.default_rng(0)
    talks = [random.integers(2, 97, 36).tolist() for _ in range(150)]
    for name, talk in enumerate(talks):
        first_batch_of(harness, new_sequence(name, prompt=talk, max_tokens=2))
    sketch, worker_id, held = sketch_prefixes(harness.engine), WorkerId("w0"), HeldPrefixes()
    held.take(worker_id, sketch, 4, 0.0)
    assert sketch is not None
    assert len(listed_marks(sketch)) <= MAX_SKETCH_MARKS
    assert sketch.bound < NUM_MARKS / 2
    found = [held.cached(following_names(root_name(""), np.array(talk, dtype="<u4").tobytes(), 4)) for talk in talks]
    assert found[-90:] == [{worker_id: 36}] * 90
    assert found[:45] == [{}] * 45
    before, name = harness.engine.sharing.ends.newest(1, lambda _: True), 150
    first_batch_of(harness, new_sequence(name, prompt=[*talks[-1], *harness.stories[1149].text, 5, 5], max_tokens=4))
    assert before[0] not in harness.engine.sharing.ends.newest(1000, lambda _: True), "it went on"


def test_salts_and_other_beginnings_keep_sequences_apart() -> None:
    harness = make_harness(num_blocks=128)
    first_batch_of(harness, new_sequence(0, prompt=PROMPT[:20]))
    assert first_batch_of(harness, new_sequence(1, prompt=PROMPT[:20], salt="tenant")) == (0, 20)
    assert first_batch_of(harness, new_sequence(2, prompt=[5, *PROMPT[1:20]])) == (0, 20)
    assert first_batch_of(harness, new_sequence(3, prompt=PROMPT[:20], salt="tenant")) == (16, 4)
    assert first_batch_of(harness, new_sequence(4, prompt=[*PROMPT[:8], 5, *PROMPT[9:20]])) == (8, 12)


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    harness = make_harness(prefix_caching=False)
    for name in range(2):
        assert first_batch_of(harness, new_sequence(name, prompt=PROMPT[:20])) == (0, 20)
    stats = take_stats(harness.engine)
    assert (stats.totals.num_prefix_cache_queries, stats.totals.num_prefix_cache_hits) == (0, 0)
    assert not harness.contents, "every freed block is lost"


def test_what_was_used_longest_ago_is_lost_first() -> None:
    """16 blocks. A and B leave 6 named blocks each (20 + 4 - 1 tokens: 5 full), A is used again; C takes 10."""
    harness = make_harness(num_blocks=16)
    a, b = PROMPT[:20], [5, *PROMPT[:19]]
    first_batch_of(harness, new_sequence(0, prompt=a))
    first_batch_of(harness, new_sequence(1, prompt=b))
    assert first_batch_of(harness, new_sequence(2, prompt=a)) == (16, 4)
    first_batch_of(harness, new_sequence(3, prompt=[6] * 37, max_tokens=4))
    assert first_batch_of(harness, new_sequence(4, prompt=a)) == (16, 4)
    assert first_batch_of(harness, new_sequence(5, prompt=b)) == (0, 20)
    harness.judge()


@pytest.mark.parametrize("num_good", [0, 1])
def test_nothing_of_a_sequence_that_failed_is_found(num_good: int) -> None:
    """Chunks of 16 tokens; the first step or the second fails until the sequence is given up."""
    harness = make_harness(max_batch_tokens=16)
    harness.add(new_sequence(0, prompt=PROMPT))
    for _ in range(num_good):
        harness.step()
    while harness.engine.table.num_sequences:
        harness.submit()
        harness.land("broken")
    assert harness.stories[1000].finish is FinishReason.ERROR
    assert first_batch_of(harness, new_sequence(1, prompt=PROMPT)) == (0, 16)
    harness.judge()


def test_a_failed_step_leaves_no_block_behind_that_others_find() -> None:
    """Tokens 0 to 15 are computed; the step of 16 to 31 fails, and the sequence is cancelled."""
    harness = make_harness(max_batch_tokens=16)
    harness.add(new_sequence(0, prompt=PROMPT))
    harness.step()
    harness.submit()
    harness.land("bad luck")
    harness.cancel(harness.stories[1000])
    assert first_batch_of(harness, new_sequence(1, prompt=PROMPT)) == (16, 16)
    harness.judge()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    """12 prompt tokens and 2 outputs are computed when it gives way: 3 full blocks."""
    harness = make_harness(num_blocks=16)
    row = harness.add(new_sequence(0, prompt=PROMPT[:12], max_tokens=9))
    for _ in range(3):
        harness.step()
    assert harness.engine.table.num_computed[row] == 14
    harness.engine.pause(0)
    harness.engine.resume(0)
    harness.settle()
    batch = harness.stepped()
    assert (batch.start.tolist(), batch.num_tokens.tolist()) == ([12], [3])
    assert harness.engine.totals.num_recomputed_tokens == 2
    harness.finish()


def test_a_pinned_block_of_an_ended_sequence_can_be_shared() -> None:
    harness = make_harness(num_blocks=16)
    row = harness.add(new_sequence(0, prompt=PROMPT[:20], max_tokens=3))
    harness.step()
    harness.pin_full_blocks("transfer", row)
    harness.drain()
    assert harness.engine.blocks.num_free == 11
    assert first_batch_of(harness, new_sequence(1, prompt=PROMPT[:20])) == (16, 4)
    harness.unpin("transfer")
    harness.settle()
    assert harness.engine.blocks.num_free == 16
    harness.judge()


@pytest.mark.parametrize("max_batch_tokens", [16, 256])
def test_equal_prompts_at_the_same_time_are_computed_once(scheduler: str, max_batch_tokens: int) -> None:
    """40 tokens once, and 4 more for each of the others, which find 36."""
    harness = make_harness(scheduler, num_blocks=128, max_batch_tokens=max_batch_tokens)
    for name in range(6):
        harness.add(new_sequence(name, prompt=PROMPT, max_tokens=1, seed=name))
    num_tokens = 0
    while harness.engine.table.num_sequences:
        batch = harness.stepped()
        num_tokens += int(batch.num_tokens.sum())
    assert num_tokens == 40 + 5 * 4
    assert harness.engine.totals.num_prefix_cache_hits == 5 * 36
    harness.judge()


@pytest.mark.parametrize("scheduler", FIRST_COME)
def test_who_waits_for_a_block_lets_others_pass_and_is_next_when_it_is_there(scheduler: str) -> None:
    """B begins like A for 16 tokens, and waits for A's first steps; C has nothing in common and comes in meanwhile."""
    harness = make_harness(scheduler, max_batch_tokens=64)
    for name, prompt in enumerate((PROMPT, [*PROMPT[:16], 5, 5], [7] * 10)):
        harness.add(new_sequence(name, prompt=prompt))
    first, second = harness.stepped(), harness.stepped()
    assert first.rows.tolist() == [0, 2]
    assert (second.rows.tolist()[-1], second.start.tolist()[-1], second.num_tokens.tolist()[-1]) == (1, 16, 2)
    harness.finish()


@pytest.mark.parametrize("end", ["cancel", "fail", "no room"])
def test_who_waits_for_a_block_goes_on_when_it_will_not_come(end: str) -> None:
    """A has computed 8 of 40 tokens and B waits for the third block. After a change A no longer fits, but B does."""
    harness = make_harness(num_blocks=16, max_batch_tokens=8)
    harness.add(new_sequence(0, prompt=PROMPT, max_tokens=4))
    harness.add(new_sequence(1, prompt=PROMPT[:14], max_tokens=2))
    harness.step()
    assert take_stats(harness.engine).num_waiting == 1
    if end == "cancel":
        harness.cancel(harness.stories[1000])
    elif end == "fail":
        for _ in range(2):
            harness.submit()
            harness.land("broken")
    else:
        harness.change_executor(6)
    batch = harness.stepped()
    assert batch.rows.tolist() == [1]
    assert batch.start.tolist() == [8 if end == "cancel" else 0]
    harness.step_until_end_of(1001)
    harness.judge()


@pytest.mark.parametrize("scheduler", FIRST_COME)
@pytest.mark.parametrize(("prefix_caching", "num_running"), [(True, 4), (False, 1)])
def test_sequences_that_share_their_prompt_share_its_memory(
    scheduler: str, num_running: int, *, prefix_caching: bool
) -> None:
    """16 blocks; each sequence needs 10 for its prompt and its next token, of which 9 are shared."""
    harness = make_harness(scheduler, num_blocks=16, max_batch_tokens=64, prefix_caching=prefix_caching)
    harness.add_all(4, prompt=PROMPT[:39], max_tokens=2)
    harness.step()
    harness.step()
    assert harness.engine.totals.num_finished + take_stats(harness.engine).num_running >= num_running
    assert (take_stats(harness.engine).num_waiting == 0) == prefix_caching
    harness.finish()
