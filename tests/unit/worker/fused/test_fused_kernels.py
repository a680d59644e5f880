"""Triton's kernels compute what torch's operators do, are compiled for GPUs, and are used only where they agree."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import structlog
import torch

from services.worker.executor import kernels as kernels_module
from services.worker.executor.kernels import Kernels, WantedKernels, choose_kernels
from services.worker.fused import launching
from services.worker.fused.drawing import choose
from services.worker.fused.library import FusedKernels, open_fused
from services.worker.fused.operators import FusedOperators, FusedScoring
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.posix import PosixMemory
from services.worker.models.operators import LayerOperators
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec, read_spec
from services.worker.models.weights import ParameterBuffer, buffer_bytes, layer_parts
from services.worker.sampling.draw import RowSampling, draw
from services.worker.sampling.scoring import Scoring
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.interpreted import interpret
from tests.support.late_blocks import stored_behind_nothing
from tests.support.row_samplings import row_sampling

CPU = torch.device("cpu")
PAGE = 1 << 16
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.8}
SHAPES = {
    "llama": CheckpointShape(),
    "llama, heads of 80": CheckpointShape(num_heads=3, num_kv_heads=1, head_dim=80, hidden_size=72),
    "qwen3, norms over heads": CheckpointShape(family="qwen3", num_heads=5, num_kv_heads=1, head_dim=24),
    "phi3, partly rotated": CheckpointShape(family="phi3", head_dim=20, extra={"rope_parameters": PARTIAL}),
    "opt": CheckpointShape(family="opt", hidden_size=60),
}
DTYPES = (torch.float32, torch.bfloat16)
ODD_NUMBERS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""Of numpy, which computes; a device says nothing."""
NUM_BLOCKS, BLOCK_SIZE, NUM_POSITIONS = 6, 16, 128


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def spec_of(name: str) -> ModelSpec:
    return read_spec(stored_checkpoint(SHAPES[name])[0])


def head_specs() -> list[ModelSpec]:
    """Those of the shapes, and one that no family has yet: norms over heads that are partly rotated."""
    both = replace(spec_of("qwen3, norms over heads"), rotary_dim=16)
    return [*(spec_of(name) for name in SHAPES), both]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def opened(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[LayerOperators, KVCache]]:
    """Return torch's operators and the fused ones, each over a cache of its own that is full of NaN."""
    rope = RopeTable(spec.rope, spec.rotary_dim, NUM_POSITIONS, dtype, CPU)
    both: list[tuple[LayerOperators, KVCache]] = []
    for operators in (LayerOperators, FusedOperators):
        cache = KVCache(spec, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
        for pool in cache.pools():
            pool.fill_(torch.nan)
        both.append((operators(spec, rope, cache), cache))
    return both


def layer_weights(spec: ModelSpec, dtype: torch.dtype) -> ParameterBuffer:
    parts = layer_parts(spec, 0)
    weights = ParameterBuffer(parts, dtype, torch.zeros(buffer_bytes(parts, dtype), dtype=torch.uint8))
    for seed, part in enumerate(parts):
        weights[part.name].copy_(numbers(*part.shape, dtype=dtype, seed=seed))
    return weights


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """To the bit in bfloat16, which rounds away how sums are ordered; a NaN equals itself."""
    close = {} if ours.dtype == torch.float32 else {"atol": 0.0, "rtol": 0.0}
    torch.testing.assert_close(ours, theirs, equal_nan=True, **close)  # type: ignore[arg-type]  # both or none


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(SHAPES) + 1))
def test_heads_are_turned_and_stored_where_they_belong_and_nowhere_else(index: int, dtype: torch.dtype) -> None:
    spec = head_specs()[index]
    weights, num_heads = layer_weights(spec, dtype), spec.num_heads + 2 * spec.num_kv_heads
    positions = torch.tensor([0, 1, 17, 127, 64, 2, 2])
    slots = torch.tensor([95, 0, 17, 33, 64, 5, 6])
    results = []
    for operators, cache in opened(spec, dtype):
        heads = numbers(7, num_heads, spec.head_dim, dtype=dtype)
        queries = operators.rotation(positions, slots)(1, heads, weights)
        assert queries.shape == (7, spec.num_heads, spec.head_dim)
        results.append([queries, *cache.pools()])
    for theirs, ours in zip(*results, strict=True):
        assert_same(ours, theirs)


def test_keys_go_to_blocks_before_which_there_is_no_memory() -> None:
    """Whoever touches the first block dies."""
    ours, theirs = stored_behind_nothing(PosixMemory(PAGE, 2), CPU)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_normalised(name: str, dtype: torch.dtype) -> None:
    spec = spec_of(name)
    weights, (theirs, ours) = layer_weights(spec, dtype), [each for each, _ in opened(spec, dtype)]
    hidden = numbers(9, spec.hidden_size, dtype=dtype) * 3 + 1
    hidden[3] = 0
    for rows in (hidden, hidden[:1], hidden[:0], hidden[::2]):
        before = rows.clone()
        found, expected = (each.norm(rows, weights, "mlp_norm") for each in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert torch.equal(rows, before)


@ODD_NUMBERS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_tanh"])
def test_gates_are_activated_and_multiplied(activation: Any, dtype: torch.dtype) -> None:
    """Also where there are more of them than one program takes; large numbers neither vanish nor overflow."""
    spec = replace(spec_of("llama"), activation=activation, intermediate_size=1500)
    pair = numbers(3, 3000, dtype=dtype)
    pair[0, :9] = torch.tensor([0.0, -0.0, 90.0, -90.0, 1e4, -1e4, 1e-6, torch.inf, torch.nan], dtype=dtype)
    theirs, ours = (each.gate(pair.clone()) for each, _ in opened(spec, dtype))
    if activation == "gelu_tanh":  # by another formula
        rtol = 1e-2 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=rtol, atol=1e-6)
    else:
        assert_same(ours, theirs)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_added(has_bias: bool) -> None:
    spec = spec_of("llama")
    hidden, inputs, matrix = (numbers(*shape, dtype=torch.float32) for shape in ((5, 64), (5, 96), (64, 96)))
    bias = numbers(64, dtype=torch.float32, seed=7) if has_bias else None
    theirs, ours = (each.add_product(hidden.clone(), inputs, matrix, bias) for each, _ in opened(spec, torch.float32))
    torch.testing.assert_close(ours, theirs)


@ODD_NUMBERS
@pytest.mark.parametrize("vocab_size", [5, 384, 20_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_looked_at(vocab_size: int, dtype: torch.dtype) -> None:
    products = numbers(7, vocab_size, dtype=dtype)
    products[0] = 1.0  # all tie
    products[1, [2, -1]] = 50.0  # two do
    products[2, -1] = torch.nan
    products[3, 1] = torch.inf
    products[4, 0] = -torch.inf
    products[5] = -torch.inf
    hidden = numbers(7, 96, dtype=dtype)
    hidden[1, 95], hidden[4, 0] = torch.nan, -torch.inf
    last = torch.tensor([4, 0, 6, 1, 5])
    results = []
    for scoring in (Scoring(), FusedScoring()):
        into = (torch.full((7, vocab_size), 7.0), torch.full((7,), 7))
        given = scoring.largest(products, into)
        assert given[0] is into[0]
        results.append([*given, *scoring.largest(products, None), scoring.finite(hidden, last, None)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    assert results[1][4].tolist() == [False, True, True, False, True]
    assert [tuple(each.shape) for each in FusedScoring().largest(products[:0], None)] == [(0, vocab_size), (0,)]


def torch_choice(logits: torch.Tensor, sampling: RowSampling, points: np.ndarray) -> list[int]:
    tokens = logits.argmax(dim=-1).numpy().copy()
    drawn = np.flatnonzero(sampling.temperature)
    tokens[drawn] = draw(logits[drawn], sampling.select(drawn), points[drawn])
    found: list[int] = tokens.tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [7, 384, 9000])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_drawn_as_torch_draws_them(vocab_size: int, seed: int) -> None:
    """Filters of all kinds and of none, with ties at their borders, far beyond what torch's operators sort first."""
    random, count = np.random.default_rng(seed), 24
    logits = torch.from_numpy(random.normal(size=(count, vocab_size)).astype(np.float32))
    logits[: count // 2] = (logits[: count // 2] * 4).round() / 2
    sampling = RowSampling(
        temperature=random.choice([0.0, 0.01, 0.7, 1.0, 5.0], count),
        top_p=random.choice([1.0, 0.999, 0.9, 0.3, 1e-9], count),
        top_k=random.choice([0, 1, 3, 300, 2000, 2**30], count),
        min_p=random.choice([0.0, 0.02, 0.4, 1.0], count, p=[0.7, 0.1, 0.1, 0.1]),
        seed=np.arange(count),
    )
    points = random.random(count)
    points[:4] = (0.0, 1 - 2**-53, 1e-300, 0.5)
    before = logits.clone()
    assert choose(logits, sampling, points).tolist() == torch_choice(logits, sampling, points)
    assert torch.equal(logits, before)


def test_tokens_that_are_excluded_are_never_drawn() -> None:
    logits = torch.full((6, 9000), -torch.inf)
    logits[:, [0, 4500, 8999]] = torch.tensor([1.0, 3.0, 1.0])
    points = np.array([0.0, 0.05, 0.5, 0.93, 1 - 2**-53, 0.99])
    found = choose(logits, row_sampling(6), points)
    assert found.tolist() == [0, 0, 4500, 8999, 8999, 8999]


def test_the_first_point_is_the_first_token_that_is_not_excluded() -> None:
    """Also where the ids that are looked at first are all excluded."""
    logits = torch.full((2, 20_000), -torch.inf)
    logits[:, 9000:9003] = 1.0
    assert choose(logits, row_sampling(2), np.array([0.0, 0.5])).tolist() == [9000, 9001]


@pytest.mark.parametrize("seed", range(4))
def test_the_last_point_is_one_of_the_last_tokens_however_sums_round(seed: int) -> None:
    """Weights from 1 down to 2^-43: the sum of a part, and what is summed up one by one, differ in the last bits."""
    random, count = np.random.default_rng(seed), 8
    logits = torch.from_numpy(-30 * random.random((count, 9000)).astype(np.float32))
    found = choose(logits, row_sampling(count), np.full(count, 1 - 2**-53))
    weights = (logits - logits.amax(dim=-1, keepdim=True)).double().exp()
    behind = torch.stack([row[token + 1 :].sum() / row.sum() for row, token in zip(weights, found, strict=True)])
    assert (behind < 1e-9).all()


@ODD_NUMBERS
def test_a_draw_never_leaves_the_vocabulary_whatever_the_logits_are() -> None:
    """Such a step fails, but by its scores, and not by a token that does not exist."""
    logits = torch.zeros(4, 300)
    logits[0], logits[1, 5], logits[2, 5], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    for top_p, top_k in ((1.0, 0), (0.5, 7)):
        for temperature in (0.0, 1.0):
            found = choose(logits, row_sampling(4, temperature=temperature, top_p=top_p, top_k=top_k), np.full(4, 0.5))
            assert ((found >= 0) & (found < 300)).all()


@pytest.mark.slow
def test_the_trial_accepts_them() -> None:
    for name in SHAPES:
        for dtype in DTYPES:
            found, reason = open_fused(spec_of(name), dtype, CPU)
            assert reason is None
            assert isinstance(found, FusedKernels)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("norm_rows", "norms differ"),
        ("rotate_heads", "queries differ"),
        ("gate_rows", "gates differ"),
        ("finite_rows", "finite rows differ"),
        ("largest_rows", "logits differ"),
        ("draw_rows", "drew tokens"),
    ],
)
def test_the_trial_names_what_differs(broken: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves its results undone stands for one that computes something else."""
    launch = launching.launch

    def leaving_out(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel.fn.__name__ == broken:
            for each in arguments:
                if isinstance(each, torch.Tensor):
                    each.zero_()
        else:
            launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(launching, "launch", leaving_out)
    found, reason = open_fused(spec_of("llama"), torch.float32, CPU)
    assert found is None
    assert reason is not None
    assert said in reason


def test_the_trial_says_what_a_compiler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "launch", Mock(side_effect=RuntimeError("no C compiler")))
    assert open_fused(spec_of("llama"), torch.float32, CPU) == (None, "they failed: RuntimeError: no C compiler")


GPU = torch.device("cuda")


@pytest.fixture
def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "_without_flashinfer", lambda *_, **__: "it is not wanted")


def chosen(**changes: Any) -> Kernels:
    return choose_kernels(WantedKernels(**changes), spec_of("llama"), GPU, torch.bfloat16)


@pytest.mark.usefixtures("no_flashinfer")
@pytest.mark.parametrize("changes", [{}, {"fused": False}, {"kind": "torch"}, {"deterministic": True}], ids=str)
def test_they_are_chosen_on_a_gpu_unless_they_are_not_to_be(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.fused.library.open_fused", lambda *_: (FusedKernels(), None))
    found = chosen(**changes)
    assert (found.name, found.fused is None) == (("torch", True) if changes else ("torch, fused", False))


@pytest.mark.usefixtures("no_flashinfer")
def test_the_log_says_why_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.fused.library.open_fused", lambda *_: (None, "their norms differ"))
    with structlog.testing.capture_logs() as logs:
        assert chosen().name == "torch"
    assert logs[-1]["reason"] == "their norms differ"
    monkeypatch.setattr(importlib, "import_module", lambda _: exec("import no_triton"))
    with structlog.testing.capture_logs() as logs:
        assert chosen().name == "torch"
    assert "Triton cannot be imported (No module named 'no_triton')" in logs[-1]["reason"]
