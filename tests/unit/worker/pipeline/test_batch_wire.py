"""Steps and stage messages as bytes: what goes in comes out, and anything else is refused by a WireError."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.contract.batch import Batch, BatchOutput, CopyOps, RowInit, TableDelta
from services.worker.contract.executor import HostCopy
from services.worker.peers.frames import FrameKind
from services.worker.pipeline.batch_wire import pack_batch, unpack_batch
from services.worker.pipeline.stage_messages import (
    STAGE_KINDS,
    Activation,
    Alive,
    CopyEnded,
    Hidden,
    KvOver,
    StageClose,
    StageMessage,
    StepDone,
    StepFailed,
    pack,
    unpack,
)
from shared.errors import WireError
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams

SEEDS = st.integers(0, 2**32 - 1)


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(values, dtype=np.int32)


def random_batch(random: np.random.Generator) -> Batch:
    num_rows = int(random.integers(1, 9))
    counts = i32(np.where(random.random(num_rows) < 0.5, 1, random.integers(1, 40, num_rows)))
    num_delta, num_copies, num_drops = random.integers(0, 5, 3).tolist()
    any_ids = lambda count: i32(random.integers(0, 2**31, count))  # noqa: E731  only here
    admits = tuple(
        RowInit(
            row,
            SamplingParams(
                max_tokens=int(random.integers(1, 99)),
                temperature=float(random.random()),
                seed=int(random.integers(-(2**62), 2**62)),
                stop_token_ids=(7, 9),
                logit_bias=((3, 1.5),),
                logprobs=None if random.random() < 0.5 else 4,
            ),
            int(random.integers(0, 99)),
            any_ids(int(random.integers(0, 6))),
        )
        for row in range(int(random.integers(0, 3)))
    )
    return Batch(
        step_id=int(random.integers(0, 2**60)),
        rows=i32(random.permutation(1000)[:num_rows]),
        num_tokens=counts,
        start=any_ids(num_rows),
        tokens=i32(random.integers(0, 2**31, int(counts.sum()))),
        sample=random.random(num_rows) < 0.5,
        table_delta=TableDelta(*(any_ids(num_delta) for _ in range(3))),
        copies=CopyOps(*(any_ids(num_copies) for _ in range(2))),
        admits=admits,
        drops=any_ids(num_drops),
    )


def random_message(random: np.random.Generator) -> StageMessage:
    durations_s = tuple(random.random(int(random.integers(1, 5))).tolist())
    num_tokens = int(random.integers(1, 9))
    kinds: list[Hidden] = [
        random.standard_normal((num_tokens, 6)).astype(np.float32),
        random.integers(0, 2**16, (num_tokens, 6)).astype(np.uint16),
        random.integers(0, 2**63, 3).astype(np.uint64),
    ]
    hidden = kinds[int(random.integers(3))]
    tokens = i32(random.integers(-1, 99, 4))
    logprobs = {2: TokenLogprob(-0.5, ((7, -0.5), (1, -1.5)))} if random.random() < 0.5 else None
    messages: list[StageMessage] = [
        random_batch(random),
        HostCopy(5, i32([1, 2]), i32([3, 4]), to_host=bool(random.integers(2))),
        Activation(int(random.integers(99)), num_tokens, hidden, durations_s),
        StepFailed(7, "out of memory: é", (1, 5), durations_s),
        StepDone(BatchOutput(8, tokens, 0.25, logprobs), durations_s),
        CopyEnded(4, None if random.random() < 0.5 else "no room"),
        StageClose(),
        Alive(),
        KvOver(),
    ]
    return messages[int(random.integers(len(messages)))]


def same(one: Any, other: Any) -> bool:
    """Equality that looks into arrays, with their types."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def packed(message: StageMessage) -> tuple[FrameKind, bytes]:
    kind, parts = pack(message)
    return kind, b"".join(bytes(part) for part in parts)


def through(message: StageMessage) -> StageMessage:
    return unpack(*packed(message))


@settings(deadline=None, max_examples=80)
@given(SEEDS)
def test_a_message_comes_out_as_it_went_in(seed: int) -> None:
    message = random_message(np.random.default_rng(seed))
    assert same(through(message), message)


@settings(deadline=None, max_examples=80)
@given(SEEDS, st.data())
def test_a_message_that_is_cut_short_or_too_long_is_refused(seed: int, data: st.DataObject) -> None:
    message = random_message(np.random.default_rng(seed))
    kind, payload = packed(message)
    if not isinstance(message, StepFailed | CopyEnded | StageClose | Alive | KvOver):  # a shorter cause is a cause too
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(WireError):
            unpack(kind, payload[:cut])
    if not isinstance(message, CopyEnded):
        with pytest.raises(WireError):
            unpack(kind, payload + b"\0")


@settings(deadline=None, max_examples=200)
@given(SEEDS, st.data())
def test_changed_bytes_give_a_message_or_a_wire_error_and_nothing_else(seed: int, data: st.DataObject) -> None:
    message = random_message(np.random.default_rng(seed))
    kind, payload = packed(message)
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for each in (kind, data.draw(st.sampled_from(STAGE_KINDS))):
        with suppress(WireError):
            unpack(each, changed)


def batch_with(**changes: Any) -> bytes:
    given_fields = {
        "step_id": 3,
        "rows": i32([4, 5]),
        "num_tokens": i32([1, 2]),
        "start": i32([7, 0]),
        "tokens": i32([1, 2, 3]),
        "sample": np.array([True, False]),
    }
    return pack_batch(Batch(**{**given_fields, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"step_id": -1},
        {"rows": i32([4, 4])},
        {"rows": i32([4, -5])},
        {"num_tokens": i32([3, 0])},
        {"num_tokens": i32([1, 1])},
        {"num_tokens": i32([2**31 - 1, 2**31 - 1])},
        {"start": i32([0, -1])},
        {"sample": np.array([2, 0], dtype=np.uint8)},
        {"drops": i32([-1])},
        {"table_delta": TableDelta(i32([1]), i32([0]), i32([-2]))},
        {"copies": CopyOps(i32([1]), i32([-1]))},
        {"rows": i32([]), "num_tokens": i32([]), "start": i32([]), "tokens": i32([]), "sample": np.zeros(0, bool)},
    ],
    ids=str,
)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    assert isinstance(unpack_batch(batch_with()), Batch)
    with pytest.raises(WireError):
        unpack_batch(batch_with(**changes))


def test_what_comes_out_cannot_be_written() -> None:
    batch = unpack_batch(bytearray(batch_with()))
    assert not batch.tokens.flags.writeable
    assert not batch.sample.flags.writeable
