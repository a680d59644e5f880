"""The engine's parts against plain lists and loops that do the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.retry import RetryGroup, RetryQueue
from services.worker.sequences.assemble import decodes_first
from services.worker.sequences.events import NO_EVENTS, RowExtra, StepEvents
from services.worker.sequences.rows import RowQueue
from services.worker.sequences.sequence import FinishedStore
from services.worker.sequences.stops import StopRules
from services.worker.sequences.token_log import CHUNK, TokenLog
from shared.ids import RequestId
from shared.types import FinishReason, SamplingParams


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_the_token_log_equals_a_list_per_row(seed: int) -> None:
    random = np.random.default_rng(seed)
    log, lists = TokenLog(5, 4 * CHUNK), [[] for _ in range(5)]  # type: tuple[TokenLog, list[list[int]]]
    for _ in range(80):
        row = int(random.integers(5))
        if random.random() < 0.2:
            log.clear(row, len(lists[row]))
            lists[row] = random.integers(0, 1000, size=random.integers(0, 3 * CHUNK)).tolist()
            log.extend(row, np.array(lists[row], dtype=np.int32))
        rows = np.flatnonzero(random.random(5) < 0.7)
        rows = rows[[len(lists[r]) < 4 * CHUNK - 1 for r in rows]]
        tokens = random.integers(0, 1000, size=rows.size).astype(np.int32)
        log.append(rows, np.array([len(lists[r]) for r in rows], dtype=np.int32), tokens)
        for r, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            lists[r].append(token)
        start = int(random.integers(0, len(lists[row]) + 1))
        stop = int(random.integers(0, len(lists[row]) + 1))
        assert log.read(row, start, stop).tolist() == lists[row][start:stop]
        assert log.num_used_chunks == sum(-(-len(tokens) // CHUNK) for tokens in lists)


def test_a_full_chunk_is_followed_by_a_new_one() -> None:
    log = TokenLog(2, 3 * CHUNK)
    for i in range(2 * CHUNK + 1):
        log.append(np.array([1]), np.array([i], dtype=np.int32), np.array([i], dtype=np.int32))
    assert log.num_used_chunks == 3
    assert log.read(1, 0, 2 * CHUNK + 1).tolist() == list(range(2 * CHUNK + 1))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_a_row_queue_keeps_rows_in_order_of_its_keys(keys: list[int], random: object) -> None:
    major, minor = np.array(keys, dtype=np.float64), np.arange(8)[::-1].copy()
    queue, present = RowQueue(8), []  # type: tuple[RowQueue, list[int]]
    for row in random.sample(range(8), 8):  # type: ignore[attr-defined]
        queue.insert(row, major, minor)
        present = sorted([*present, row], key=lambda r: (major[r], minor[r]))
        assert queue.view.tolist() == present
        if len(present) > 3:
            gone = [present.pop(1), present.pop(-1)]
            queue.remove(np.array(gone))
            assert queue.view.tolist() == present


def test_a_row_queue_is_read_only_for_others_and_refuses_to_remove_what_is_not_there() -> None:
    queue = RowQueue(3)
    queue.append(2)
    with pytest.raises(ValueError, match="read-only"):
        queue.view[0] = 1
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(np.array([1]))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_stop_rules_equal_the_rules_read_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    eos, rules = (2, 5), StopRules(6, 12, (2, 5))
    params = []
    for row in range(6):
        stops = tuple(random.integers(0, 12, size=random.integers(0, 4)).tolist())
        params.append(SamplingParams(max_tokens=9, stop_token_ids=stops, ignore_eos=bool(random.integers(2))))
        if row < 3:  # a row that had other rules before
            rules.set(row, SamplingParams(max_tokens=9, stop_token_ids=tuple(range(12))))
            rules.clear(row)
        rules.set(row, params[row])
    rows = random.permutation(6)[: random.integers(1, 7)]
    tokens, count = random.integers(0, 12, size=rows.size).astype(np.int32), rng_counts(random, rows.size)
    limit = rng_counts(random, rows.size)
    for i, finish in enumerate(rules.check(rows, tokens, count, limit).tolist()):
        sampling, token = params[rows[i]], int(tokens[i])
        stopped = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
        expected = FinishReason.LENGTH if count[i] >= limit[i] else FinishReason.NONE
        assert finish == (FinishReason.STOP if stopped else expected)


def rng_counts(random: np.random.Generator, size: int) -> np.ndarray:
    return random.integers(1, 4, size=size).astype(np.int32)


def group(*rows: int) -> RetryGroup:
    return RetryGroup(np.array(rows, dtype=np.intp), np.ones(len(rows), dtype=np.int32))


def test_a_failed_group_is_halved_and_tried_before_what_waits() -> None:
    retry = RetryQueue()
    assert retry.failed(group(1, 2, 3, 4, 5), np.zeros(5, dtype=np.bool_)) == []
    first = retry.pop()
    assert first.rows.tolist() == [1, 2]
    assert retry.failed(first, np.zeros(2, dtype=np.bool_)) == []
    assert [retry.pop().rows.tolist() for _ in range(3)] == [[1], [2], [3, 4, 5]]


def test_rows_that_the_executor_blames_are_tried_alone_after_the_others() -> None:
    retry = RetryQueue()
    retry.failed(group(1, 2, 3, 4), np.array([False, True, False, True]))
    assert [retry.pop().rows.tolist() for _ in range(3)] == [[1, 3], [2], [4]]


def test_a_row_is_lost_when_it_fails_alone_for_the_second_time() -> None:
    retry, innocent = RetryQueue(), np.zeros(1, dtype=np.bool_)
    assert retry.failed(group(7), innocent) == []
    assert retry.failed(retry.pop(), innocent) == [7]
    retry.discard(7)
    assert retry.failed(group(7), innocent) == [], "another sequence in the same row begins without a record"


def test_discarding_a_row_takes_it_out_of_its_group() -> None:
    retry = RetryQueue()
    retry.failed(group(1, 2, 3), np.zeros(3, dtype=np.bool_))
    retry.discard(1)
    retry.discard(3)
    assert retry.rows == [2]
    assert len(retry) == 1


def test_decodes_come_before_chunks_in_their_given_order() -> None:
    rows, tokens = np.array([4, 1, 3, 2]), np.array([8, 1, 1, 1], dtype=np.int32)
    ordered, counts = decodes_first(rows, tokens, np.array([9, 1, 5, 1], dtype=np.int32))
    assert ordered.tolist() == [1, 2, 4, 3]
    assert counts.tolist() == [1, 1, 8, 1]


def test_the_finished_store_forgets_the_oldest_first() -> None:
    store = FinishedStore(2)
    keys = [(RequestId(f"r{i}"), 1) for i in range(3)]
    for i, key in enumerate(keys):
        store.add(key, np.arange(i, dtype=np.int32), FinishReason.STOP)
    assert keys[0] not in store
    found = store.find(keys[2], 1)
    assert found is not None
    assert (found[0].tolist(), found[1]) == ([1], FinishReason.STOP)
    assert store.find(keys[0], 0) is None


def test_events_are_joined_column_by_column() -> None:
    def events(*tokens: int) -> StepEvents:
        size = len(tokens)
        return StepEvents(
            channel=np.arange(size, dtype=np.int32),
            stream=np.arange(size, dtype=np.uint32) + 10,
            attempt=np.ones(size, dtype=np.uint16),
            first_index=np.zeros(size, dtype=np.uint32),
            tokens=np.array(tokens, dtype=np.int32),
            finish=np.zeros(size, dtype=np.uint8),
            extras=tuple(RowExtra(i, cached_tokens=token) for i, token in enumerate(tokens) if token > 1),
        )

    joined = StepEvents.concatenate([events(1, 2), NO_EVENTS, events(3)])
    assert joined.tokens.tolist() == [1, 2, 3]
    assert joined.stream.tolist() == [10, 11, 10]
    assert joined.attempt.dtype == np.uint16
    assert joined.extras == (RowExtra(1, cached_tokens=2), RowExtra(2, cached_tokens=3))
    assert StepEvents.concatenate([NO_EVENTS]) is NO_EVENTS
    assert len(joined) == 3


def test_no_stop_counts_before_the_minimal_length() -> None:
    rules = StopRules(4, vocab_size=10, eos_token_ids=(9,))
    rules.set(1, SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(4,)))
    rules.set(2, SamplingParams(max_tokens=9, min_tokens=2**40))
    rows, most = np.array([1, 1, 1, 2, 1]), np.full(5, 9, dtype=np.int32)
    finish = rules.check(
        rows, np.array([9, 4, 9, 9, 5], dtype=np.int32), np.array([2, 3, 4, 8, 9], dtype=np.int32), most
    )
    assert finish.tolist() == [0, 0, FinishReason.STOP, 0, FinishReason.LENGTH]
    rules.clear(1)
    rules.set(1, SamplingParams(max_tokens=9))
    assert rules.check(rows[:1], np.array([9], dtype=np.int32), np.array([1], dtype=np.int32), most[:1])[0]
