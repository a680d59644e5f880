"""What the engine does with sampling parameters: refusals, what the executor is told, log-probabilities of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError
from services.worker.engine.engine import Engine
from services.worker.sequences.config import AddRefusal, NewSequence
from services.worker.sequences.events import RowExtra
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams, Thinking
from tests.support.engine_builders import make_engine, new_sequence


def asking(name: int = 0, *, generated: list[int] | None = None, **values: Any) -> NewSequence:
    return replace(new_sequence(name, generated=generated), sampling=SamplingParams(max_tokens=50, **values))


def made(engine: Engine, now_s: float) -> Batch:
    batch = engine.next_batch(now_s)
    assert batch is not None
    return batch


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"logit_bias": ((99, 1.0), (0, -1.0))}, False),
        ({"logit_bias": ((0, 1.0), (100, 1.0))}, True),
        ({"thinking": Thinking(opening_id=98, closing_id=99)}, False),
        ({"thinking": Thinking(opening_id=98, closing_id=100)}, True),
        ({"thinking": Thinking(opening_id=100, closing_id=98)}, True),
        ({"min_tokens": 9, "stop_token_ids": tuple(range(40))}, False),
        ({"min_tokens": 60, "ignore_eos": True}, False),
    ],
)
def test_biased_ids_lie_in_the_vocabulary(values: dict[str, Any], refused: bool) -> None:
    outcome = make_engine(eos_token_ids=(1,)).registry.add(asking(**values))
    assert (outcome is AddRefusal.INVALID) is refused


def test_a_sequence_whose_minimal_length_leaves_no_token_to_say_is_refused() -> None:
    engine = make_engine(vocab_size=5, eos_token_ids=(0, 1))
    small = replace(asking(min_tokens=1, stop_token_ids=(2, 3, 4)), prompt=np.array([1], dtype=np.uint32))
    assert engine.registry.add(small) is AddRefusal.INVALID
    assert engine.registry.add(replace(small, sampling=SamplingParams(max_tokens=9, stop_token_ids=(2, 3, 4)))) == 0
    possible = replace(asking(1, min_tokens=1, stop_token_ids=(2, 3, 9)), prompt=small.prompt)
    assert not isinstance(engine.registry.add(possible), AddRefusal)


def test_the_executor_learns_the_known_tokens_of_rows_that_count_them() -> None:
    engine = make_engine()
    engine.registry.add(asking(0, generated=[7, 8], presence_penalty=0.5))
    engine.registry.add(asking(1, logit_bias=((3, 1.0),), min_tokens=2))
    batch = made(engine, 0.0)
    first, second = batch.admits
    assert (first.num_prompt, first.tokens.tolist()[5:]) == (5, [7, 8])
    assert first.tokens[:5].tolist() == new_sequence(0).prompt.tolist()
    assert (second.num_prompt, second.tokens.size) == (5, 0)


def test_log_probabilities_go_with_their_events_and_stay_for_replays() -> None:
    """Row 1 is cancelled while in flight: it ends without a token, and the events behind it move up."""
    engine = make_engine()
    news = [asking(i, logprobs=1) for i in range(3)]
    for new in news:
        engine.registry.add(new)
    said = [TokenLogprob(-float(i), ((i, 0.0),)) for i in range(8)]
    batch = made(engine, 0.0)
    engine.registry.cancel(news[1].request_id, 1)
    tokens = np.array([5, 6, 7], dtype=np.int32)
    events = engine.absorb(batch, BatchOutput(batch.step_id, tokens, 0.0, {2: said[2], 0: said[0], 1: said[1]}), 1.0)
    assert events.tokens.tolist() == [5, 7, -1]
    assert events.extras == (RowExtra(0, logprobs=(said[0],)), RowExtra(1, logprobs=(said[2],)))

    batch = made(engine, 2.0)
    assert not len(engine.roll_back(batch, BatchFailedError(batch.step_id, "a bad step"), 3.0))
    for _ in range(2):  # the two halves of the failed batch
        batch = made(engine, 4.0)
        row = int(batch.rows[0])
        events = engine.absorb(batch, BatchOutput(batch.step_id, tokens[:1], 0.0, {0: said[5 + row]}), 5.0)
        assert events.extras == (RowExtra(0, logprobs=(said[5 + row],)),)
    kept = {name: engine.logprobs.last((news[name].request_id, 1), 9) for name in range(3)}
    assert kept == {0: [said[0], said[5]], 1: [], 2: [said[2], said[7]]}
    engine.registry.cancel(news[2].request_id, 1)
    assert engine.logprobs.last((news[2].request_id, 1), 1) == [said[7]], (
        "an ended sequence can be replayed for a while"
    )


def test_a_step_without_log_probabilities_has_no_extras() -> None:
    engine = make_engine()
    engine.registry.add(asking(0))
    batch = made(engine, 0.0)
    events = engine.absorb(batch, BatchOutput(batch.step_id, np.array([5], dtype=np.int32), 0.0), 1.0)
    assert events.extras == ()
