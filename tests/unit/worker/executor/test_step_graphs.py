"""Recorded steps: the same numbers as computed ones, whatever the batch, and only the batch's own slots are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.attention.torch_paged import TorchPagedAttention
from services.worker.executor import runner as runner_module
from services.worker.executor.elastic_model import load_elastic_model
from services.worker.executor.kernels import Kernels
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.step_graphs import MAX_ROWS, filled_up, graph_sizes
from services.worker.memory import host_link
from shared.layers import LayerRange
from shared.types import SamplingParams
from tests.support import fake_flashinfer
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.overlap import driven_texts
from tests.support.replay import ReplayRecorder, record_with
from tests.support.runner_driver import GREEDY, Driven, Driver
from tests.support.runners import MIB, load, runner_settings, soil
from tests.support.seeds import first_of

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64, weight_std=0.05)
PAGE = 1 << 16
CLOSE = 0.05
"""bfloat16's products may depend on the number of rows; logits are some units large."""


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayRecorder]:
    """Every runner that opens computes attention by the stand-in, and records if its settings say so."""
    recorder = record_with(monkeypatch, Kernels("flashinfer", flashinfer=fake_flashinfer))
    yield recorder
    fake_flashinfer._WRAPPERS.clear()


def open_runner(**changes: object) -> ModelRunner:
    return load(stored_checkpoint(SHAPE)[0], **{"dtype": "bfloat16", "max_batch_rows": 6, **changes})


def grow(drivers: list[Driver], prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[Driven]]:
    return [[driver.add(p, s) for p, s in zip(prompts, sampling, strict=True)] for driver in drivers]


def random_prompts(seed: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, SHAPE.vocab_size, int(random.integers(1, 40))).tolist() for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of(range(6), in_ci=3))
def test_logits_are_those_of_computed_steps_whatever_decodes_together(seed: int, recorder: ReplayRecorder) -> None:
    """Random subsets decode, prompts come in between, blocks lie anywhere; every step of decodes only is a graph."""
    random = np.random.default_rng(seed)
    runners = [open_runner(graphs=graphs) for graphs in (True, False)]
    for runner in runners:
        soil(runner)
    drivers = [Driver(runner, seed=seed) for runner in runners]
    prompts = random_prompts(seed, 6)
    sequences = grow(drivers, prompts, [GREEDY] * 6)
    num_decodes = 0
    for _ in range(60):
        picked = random.permutation(6)[: int(random.integers(1, 7))].tolist()
        left = [len(sequences[0][i].tokens) - sequences[0][i].num_computed for i in picked]
        counts = [1 if n == 1 else int(random.integers(1, min(n, 15) + 1)) for n in left]
        order = sorted(range(len(picked)), key=lambda at: counts[at] > 1)
        follows = [int(random.integers(3, SHAPE.vocab_size)) if counts[at] == left[at] else None for at in order]
        num_decodes += all(counts[at] == 1 for at in order)
        for driver, own in zip(drivers, sequences, strict=True):
            driver.step_logits([(own[picked[at]], counts[at]) for at in order], follows)
    for recorded, computed in zip(*sequences, strict=True):
        for ours, theirs in zip(recorded.logits, computed.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)
    assert recorder.num_starts == num_decodes > 5


def test_texts_are_drawn_as_from_computed_steps(recorder: ReplayRecorder) -> None:
    """Through the sampler: greedy rows, drawn rows, rows with rules and log-probabilities side by side."""
    sampling = [
        GREEDY,
        SamplingParams(max_tokens=9, temperature=0.5, top_k=5, seed=1),
        SamplingParams(max_tokens=9, temperature=0.5, top_p=0.5, seed=2, logprobs=2),
        SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.5),
    ]
    said = []
    for graphs in (True, False):
        driver = Driver(open_runner(graphs=graphs))
        (own,) = grow([driver], random_prompts(3, 4), sampling)
        driver.run(12, chunk=16, max_tokens=64)
        said.append([sequence.output for sequence in own])
    assert recorder.num_starts
    same = sum(a == b for ours, theirs in zip(*said, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.8 * 48, "a near tie may fall the other way, and a text goes on from there"


def test_only_the_slots_of_the_batch_are_written() -> None:
    """Of three rows in a graph of four; the fourth is a copy of the shortest, which writes what that one writes."""
    runner = open_runner(max_batch_tokens=256)
    driver = Driver(runner)
    own = grow([driver], random_prompts(1, 5), [GREEDY] * 5)[0]
    driver.step([(sequence, len(sequence.tokens)) for sequence in own])
    before = [pool.clone() for pool in runner.cache.pools()]
    batch = driver.batch([(sequence, 1) for sequence in own[:3]])
    runner.run(batch)
    slots = [sequence.blocks[sequence.num_computed // 16] * 16 + sequence.num_computed % 16 for sequence in own[:3]]
    for pool, was in zip(runner.cache.pools(), before, strict=True):
        changed = (pool != was).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert set(changed) <= set(slots)
        assert changed


def test_steps_of_rows_with_blocks_from_the_right_are_computed_without_a_graph(recorder: ReplayRecorder) -> None:
    """The second row's second block is such a one; the third row's entry behind its end does not count."""
    runner = open_runner()
    soil(runner)
    driver = Driver(runner)
    own = [driver.add(list(range(5, 5 + length))) for length in (20, 20, 9)]
    for sequence, entries in zip(own, ([3, 4], [7, ~6], [9, ~8]), strict=True):
        driver.give(sequence, entries, 0)
    for sequence in own:
        driver.step([(sequence, len(sequence.tokens))])
    for picked, num_starts in (((0, 2), 1), ((0, 1, 2), 1), ((1,), 1), ((2,), 2)):
        driver.step([(own[i], 1) for i in picked])
        assert recorder.num_starts == num_starts


@pytest.mark.slow
def test_logits_of_rows_with_blocks_from_the_right_are_those_of_other_rows() -> None:
    """FlashInfer's parts are rounded by themselves, so close to them; decodes among prompts, on sharers of a block."""
    found = []
    for entries in ([[3, 4], [7, 6], [9, 8]], [[~3, 4], [7, ~4], [9, 8]]):
        driver = Driver(open_runner())
        soil(driver.runner)
        own = [driver.add(list(range(5, 5 + length))) for length in (20, 21, 30)]
        for sequence, table in zip(own, entries, strict=True):
            driver.give(sequence, table, 0)
        driver.step_logits([(own[0], 20), (own[1], 9)], [50, None])
        driver.step_logits([(own[0], 1), (own[1], 12), (own[2], 17)], [51, 52, None])
        driver.step_logits([(own[0], 1), (own[1], 1), (own[2], 13)], [53, 54, 55])
        driver.step_logits([(sequence, 1) for sequence in own], [None] * 3)
        found.append([logits for sequence in own for logits in sequence.logits])
    for expected, logits in zip(*found, strict=True):
        torch.testing.assert_close(logits, expected, atol=CLOSE, rtol=CLOSE)


def test_rows_that_are_not_sampled_from_are_left_out_of_the_logits(recorder: ReplayRecorder) -> None:
    """A prompt's last tokens but one, computed one at a time beside decodes."""
    drivers = [Driver(open_runner(graphs=graphs)) for graphs in (True, False)]
    prompts = random_prompts(5, 3)
    sequences = grow(drivers, prompts, [GREEDY] * 3)
    for driver, own in zip(drivers, sequences, strict=True):
        driver.step([(own[0], len(own[0].tokens)), (own[1], len(own[1].tokens))])
        batch = driver.batch([(own[2], 1), (own[0], 1), (own[1], 1)])
        tokens = driver.runner.run(replace(batch, sample=np.array([False, True, True]))).tokens
        assert tokens[0] == -1
        assert (tokens[1:] >= 0).all()
    assert recorder.num_starts == 1


@pytest.mark.slow
def test_recorded_steps_take_their_tokens_from_those_before_that_have_not_ended(
    recorder: ReplayRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows and drawn ones, in another order with every step; the rows that fill a graph up have no token."""
    texts = []
    for is_ahead in (False, True):
        monkeypatch.setattr(host_link, "BESIDE", ("cpu",) if is_ahead else ())
        driver = Driver(open_runner(max_rows=16))
        for row, prompt in enumerate(random_prompts(3, 5)):
            driver.add(prompt, SamplingParams(max_tokens=9, temperature=0.7 * (row % 2), seed=row))
        for sequence in driver.sequences:
            driver.step([(sequence, len(sequence.tokens))])
        num_starts = recorder.num_starts
        texts.append(driven_texts(driver, 6, seed=2, is_ahead=is_ahead))
        assert recorder.num_starts == num_starts + 6
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 5


@pytest.mark.slow
def test_layers_that_were_dropped_and_came_back_are_computed_by_the_same_graphs(recorder: ReplayRecorder) -> None:
    """A stage computes each step anew: it has other layers."""
    folder = stored_checkpoint(SHAPE)[0]
    settings = runner_settings(folder, dtype="bfloat16", max_batch_rows=6, page_bytes=PAGE, memory_bytes=32 * MIB)
    model = load_elastic_model(settings, lambda _done, _what: None)
    texts = []
    for _ in range(2):
        driver = Driver(model.open(), num_blocks=model.info.capacity.num_blocks)
        soil(driver.runner)
        driver.add(list(range(5, 30)))
        num_before = recorder.num_starts
        driver.run(8, chunk=25, max_tokens=64)
        assert recorder.num_starts == num_before + 7
        texts.append(driver.sequences[0].output)
        num_before = recorder.num_starts
        model.keep(LayerRange(0, 1))
        stage = Driver(model.open())
        stage.add([5])
        stage.runner.advance(stage.batch([(stage.sequences[0], 1)]))
        assert recorder.num_starts == num_before
        model.restore()
    assert texts[0] == texts[1]
    model.close()


def test_a_runner_of_another_context_does_not_use_graphs_of_other_angles() -> None:
    """Angles were recorded by where they lie."""
    runner = open_runner(max_model_len=100)
    record = runner._open()._record  # type: ignore[attr-defined]
    assert record is not None
    other = open_runner(max_model_len=120)
    assert not record.fits(other._open()._layers)  # type: ignore[attr-defined]
    assert record.fits(runner._open()._layers)  # type: ignore[attr-defined]


def test_attention_of_torch_is_not_recorded(monkeypatch: pytest.MonkeyPatch, recorder: ReplayRecorder) -> None:
    """Its shapes follow from the batch."""
    monkeypatch.setattr(runner_module, "choose_kernels", lambda *_, **__: Kernels("torch"))
    driver = Driver(open_runner())
    assert isinstance(driver.runner._open()._attention, TorchPagedAttention)  # type: ignore[attr-defined]
    driver.add([5, 6, 7])
    driver.run(3, chunk=9, max_tokens=64)
    assert not recorder.num_starts


@given(max_rows=st.integers(1, 5000))
def test_every_number_of_rows_has_a_graph_that_is_hardly_larger(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, MAX_ROWS)
    for num_rows in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= num_rows)
        assert size <= max(2 * num_rows - 1, 1)
        assert size - num_rows < 64


def test_a_batch_is_filled_up_with_its_shortest_row() -> None:
    driver = Driver(open_runner())
    own = grow([driver], [[5] * 9, [6] * 3, [7] * 5], [GREEDY] * 3)[0]
    driver.step([(sequence, len(sequence.tokens)) for sequence in own])
    batch = driver.batch([(sequence, 1) for sequence in own])
    full = filled_up(batch, 6)
    assert full.rows.tolist() == [0, 1, 2, 1, 1, 1]
    assert full.start.tolist() == [9, 3, 5, 3, 3, 3]
    assert full.tokens[3:].tolist() == [batch.tokens[1]] * 3
    assert filled_up(batch, 3) is batch
