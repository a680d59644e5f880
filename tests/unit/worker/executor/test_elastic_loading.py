"""Layers whose parameters come back beside an open stage: it computes the same bits, and what is lacking is read."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.worker.executor.elastic_model import ElasticModel
from services.worker.memory.change import MemoryLostError
from shared.errors import StartupError
from shared.layers import LayerRange
from tests.support.checkpoints import stored_checkpoint
from tests.support.live_groups import PAGE, SHAPES, ranges_of, spoil
from tests.support.loading_gate import LoadingGate, byte_ranges, wait_until_loaded
from tests.support.model_bits import calm_logits, logits_of, parameters_of
from tests.support.runners import KERNELS
from tests.support.seeds import first_of
from tests.unit.worker.executor.conftest import ModelOf

pytestmark = pytest.mark.kernels

CASES = sorted(
    {
        ("llama", "float32", KERNELS),
        ("llama", "bfloat16", "torch"),
        ("tied", "float32", KERNELS),
        ("tied, learned positions", "bfloat16", KERNELS),
        ("projected embedding", "float32", "torch"),
    }
)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> LoadingGate:
    return LoadingGate(monkeypatch)


def stage_of(model: ElasticModel, layers: LayerRange) -> None:
    """Let a model become an open stage; what its memory holds besides is no number."""
    model.keep(layers)
    spoil(model)
    model.open()


def all_beside(model: ElasticModel) -> int:
    """Have all parameters beside a stage, being loaded; return the blocks that it has then."""
    return model.reside(model.whole, model.blocks_with(model.layers, model.whole))


def all_loaded_beside(model: ElasticModel) -> int:
    """As `all_beside`, when all that can be loaded is; return the blocks."""
    blocks = all_beside(model)
    wait_until_loaded(model)
    return blocks


def held_up(model: ElasticModel, layers: LayerRange, gate: LoadingGate, num_pieces: int = 0) -> int:
    """Let a model become an open stage, whose other parameters stop after some pieces; return the blocks it has."""
    stage_of(model, layers)
    gate.hold(num_pieces)
    blocks = all_beside(model)
    gate.wait()
    return blocks


def loaded(model: ElasticModel, gate: LoadingGate) -> bool:
    """Let the rest be loaded, and return whether nothing is lacking."""
    gate.open()
    wait_until_loaded(model)
    return model.loaded_ratio == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
@pytest.mark.parametrize("ends", [(2, 4), (1, 2, 4)])
def test_stages_say_the_same_while_layers_load_beside_them(
    model_of: ModelOf, name: str, dtype: str, kernels: str, ends: tuple[int, ...], gate: LoadingGate
) -> None:
    """Before, with some pieces loaded, with all, when they are memory for KV again, and with the layers restored."""
    expected = calm_logits(name, dtype, kernels)
    models = [model_of(name, dtype=dtype, kernels=kernels) for _ in ends]
    parameters, whole = parameters_of(models[0]), models[0].whole
    for model, layers in zip(models, ranges_of(*ends), strict=True):
        stage_of(model, layers)
    runners, alone = [model._runner for model in models], [model._memory.num_blocks for model in models]
    gate.hold(2)
    for model, before in zip(models, alone, strict=True):
        beside = all_beside(model)
        assert model._runner.capacity.num_blocks == beside == model._memory.num_blocks < before
        assert (model.resident, model.info.num_layers) == (whole, len(whole))
        model.check_invariants()
    gate.wait(len(models))
    assert torch.equal(logits_of(*runners), expected)
    gate.open()
    for model, layers, before in zip(models, ranges_of(*ends), alone, strict=True):
        wait_until_loaded(model)
        assert all(map(torch.equal, parameters_of(model), parameters))
        assert torch.equal(logits_of(*runners), expected)
        assert model.reside(layers, before) == model._runner.capacity.num_blocks == before
        spoil(model)
        model.check_invariants()
    assert torch.equal(logits_of(*runners), expected)
    for model in models:
        all_loaded_beside(model)
        num_read = gate.num_pieces
        model.restore()
        assert gate.num_pieces == num_read, "there was nothing to load"
        assert all(map(torch.equal, parameters_of(model), parameters))
        spoil(model)
        assert torch.equal(logits_of(model.open()), expected)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layers", [*ranges_of(1, 4), LayerRange(1, 3)])
def test_only_what_an_open_stage_does_not_have_is_written(
    model_of: ModelOf, name: str, layers: LayerRange, gate: LoadingGate
) -> None:
    """Each part once, and all but those in pages that the stage has anyway, where they have stayed."""
    model = model_of(name, page_bytes=3 * PAGE)
    parameters = parameters_of(model)
    stage_of(model, layers)
    weights = model._opener.weights
    own, everything = (
        set[tuple[int, int]]().union(*(byte_ranges(each) for each in (stage.outer, *stage.layers)))
        for stage in (weights.of_stage(model._opener.spec, layers), weights)
    )
    all_loaded_beside(model)
    read = [where for buffer in gate.read for where in byte_ranges(buffer)]
    assert len(read) == len(set(read))
    assert not own & set(read)
    assert set(read) <= everything
    assert all(map(torch.equal, parameters_of(model), parameters))


def test_the_loaded_ratio_counts_bytes_and_is_one_when_all_is_there(model_of: ModelOf, gate: LoadingGate) -> None:
    """A stage of two layers of four, whose embedding is on both ends: two layers and a norm are lacking."""
    model = model_of("tied")
    assert model.loaded_ratio == 1
    stage_of(model, LayerRange(0, 2))
    assert (model.loaded_ratio, model.resident) == (1, LayerRange(0, 2)), "of what is resident"
    weights = model._opener.weights
    everything = weights.outer.num_bytes + sum(layer.num_bytes for layer in weights.layers)
    left = sum(layer.num_bytes for layer in weights.layers[2:]) + 32 * 4
    seen: list[float] = []
    gate.on_pass = lambda: seen.append(model.loaded_ratio)
    all_loaded_beside(model)
    assert seen[0] == pytest.approx(1 - left / everything)
    assert all(before < after for before, after in pairwise([*seen, 1.0]))
    assert len(seen) == gate.num_pieces > 20
    assert model.loaded_ratio == 1


@pytest.mark.parametrize("num_pieces", [0, 1, 8, 11, 20])
def test_a_restore_ends_the_loading_and_reads_the_rest(model_of: ModelOf, num_pieces: int, gate: LoadingGate) -> None:
    """Wherever it is: of what has been loaded, no more is read again than the layer that was under way."""
    model = model_of("llama")
    parameters = parameters_of(model)
    held_up(model, LayerRange(1, 2), gate, num_pieces)
    num_lacking = len(model._loading._lacking)
    assert num_lacking == (3 if num_pieces == 20 else 4), "three layers of 15 pieces, and what is outside"
    gate.read.clear()
    model.restore()
    assert model._loading._thread is None
    assert len(gate.read) == num_lacking
    assert model.loaded_ratio == 1
    assert all(map(torch.equal, parameters_of(model), parameters))
    assert torch.equal(logits_of(model.open()), calm_logits("llama", "float32", KERNELS))


def test_what_was_under_way_does_not_count(model_of: ModelOf, gate: LoadingGate) -> None:
    model = model_of("llama")
    held_up(model, LayerRange(1, 2), gate)
    at_first = model.loaded_ratio
    gate.hold(8)
    gate.wait()
    assert model.loaded_ratio > at_first
    model._loading.stop()
    assert model.loaded_ratio == at_first


@pytest.mark.parametrize("num_pieces", [0, 5, 12])
def test_a_loading_that_fails_is_tried_again(model_of: ModelOf, num_pieces: int, gate: LoadingGate) -> None:
    model = model_of("tied")
    parameters = parameters_of(model)
    stage_of(model, LayerRange(2, 4))
    runner = model._runner
    gate.fail_after(num_pieces)
    blocks = all_loaded_beside(model)
    ratio = model.loaded_ratio
    assert ratio < 1
    assert all_loaded_beside(model) == blocks
    assert model.loaded_ratio == ratio, "it was tried, and failed at once"
    assert model._runner is runner
    assert runner.is_open
    with pytest.raises(StartupError, match="cannot be read"):
        model.restore()
    assert model.loaded_ratio == ratio
    with pytest.raises(AssertionError, match="parameters are missing"):
        model.open()
    gate.mend()
    model.restore()
    assert all(map(torch.equal, parameters_of(model), parameters))
    assert torch.equal(logits_of(model.open()), calm_logits("tied", "float32", KERNELS))


def test_another_file_is_not_loaded_beside(model_of: ModelOf, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES["llama"])[0], tmp_path / "model"))
    model = model_of("llama", folder)
    stage_of(model, LayerRange(0, 3))
    (folder / "model.safetensors").write_bytes(b"")
    all_loaded_beside(model)
    assert model.loaded_ratio < 1
    with pytest.raises(StartupError, match=r"model\.safetensors is not the file that was loaded"):
        model.restore()


def test_what_cannot_lie_beside_is_refused_and_the_loading_goes_on(model_of: ModelOf, gate: LoadingGate) -> None:
    model = model_of("llama")
    blocks = held_up(model, LayerRange(1, 3), gate, 3)
    before = model._memory.holding
    for layers, wanted, reason in (
        (LayerRange(0, 2), 0, r"\[1, 3\) are not all among the resident ones, \[0, 2\)"),
        (LayerRange(0, 5), 0, r"are not all among the resident ones, \[0, 5\)"),
        (LayerRange(0, 4), blocks + 1, rf"{blocks} blocks fit beside layers \[0, 4\), {blocks + 1} were promised"),
    ):
        with pytest.raises(ValueError, match=reason):
            model.reside(layers, wanted)
    assert model._memory.holding == before
    assert loaded(model, gate)


def test_memory_that_refuses_leaves_the_loading_as_it_was(
    model_of: ModelOf, gate: LoadingGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    held_up(model, LayerRange(1, 3), gate, 3)
    before = model._memory.holding
    with monkeypatch.context() as patch:
        patch.setattr(model._memory, "reside", Mock(side_effect=OSError(12, "too many mappings")))
        with pytest.raises(OSError, match="too many mappings"):
            model.reside(model.layers, 0)
    assert (model._memory.holding, model.resident) == (before, model.whole)
    assert loaded(model, gate)


def test_nothing_is_loaded_into_memory_that_is_lost(
    model_of: ModelOf, gate: LoadingGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    held_up(model, LayerRange(1, 3), gate, 3)
    monkeypatch.setattr(model._memory, "reside", Mock(side_effect=MemoryLostError("pages are nowhere")))
    with pytest.raises(MemoryLostError):
        model.reside(model.layers, 0)
    assert model._loading._thread is None
    with pytest.raises(StartupError, match="dropped layers cannot come back: pages are nowhere"):
        model.restore()


@pytest.mark.parametrize("share", [0, 0.3])
@pytest.mark.parametrize("layers", [*ranges_of(2, 4), LayerRange(1, 3)])
def test_kv_that_comes_ahead_of_its_layers_is_there_when_they_are_held(
    model_of: ModelOf, layers: LayerRange, share: float, gate: LoadingGate
) -> None:
    """As is the stage's own; `share`: how much more it has meanwhile than alone, of what it has without."""
    model = model_of("llama")
    num_blocks = model.info.capacity.num_blocks
    assert model.ahead() is None
    stage_of(model, layers)
    assert model.ahead() is None
    all_beside(model)
    assert model.ahead() is None, "only parameters are beside"
    with pytest.raises(ValueError, match="leave no memory for KV of all layers"):
        model.reside(model.whole, model.cache.num_blocks, is_ahead=True)
    blocks = num_blocks + int(share * (model.cache.num_blocks - num_blocks))
    assert blocks <= model.reside(model.whole, blocks, is_ahead=True) == model.cache.num_blocks < blocks + 16
    ahead = model.ahead()
    assert ahead is not None
    fitting = model.blocks_ahead(layers, blocks)
    assert ahead.num_blocks == fitting == num_blocks if not share else 0 < fitting < num_blocks
    wait_until_loaded(model)
    model.check_invariants()
    written = [torch.randn_like(pool) for pool in ahead.pools()]
    for pool, data in zip(ahead.pools(), written, strict=True):
        pool.copy_(data)
    model.check_invariants()
    model.restore()
    assert model.ahead() is None
    assert (model.cache.num_blocks, model.layers) == (num_blocks, model.whole)
    found = [pool[: ahead.num_blocks] for pool in model.cache.pools()]
    assert all(map(torch.equal, found, written))
    model.check_invariants()


class Life:
    """A model whose layers go, come back and lie beside others, while loadings are ended and fail, as a seed says."""

    def __init__(self, model: ElasticModel, gate: LoadingGate, seed: int) -> None:
        self.model, self.gate = model, gate
        self.rng = np.random.default_rng(seed)
        self.parameters = parameters_of(model)
        self.done: set[str] = set()

    def step(self) -> None:
        name = ("keep", "restore", "beside", "beside", "unload", "ahead")[int(self.rng.integers(6))]
        self.disturb()
        getattr(self, name)()
        self.done.add(name)
        model, memory = self.model, self.model._memory
        if model.ahead() is None:
            assert model._memory.num_blocks == model.blocks_with(model.layers, model.resident)
        assert 0 < model.loaded_ratio <= 1
        assert (model.loaded_ratio == 1) == (model._loading._bytes[0] == 0)
        model.check_invariants()
        facts, holding = model.facts, memory.holding
        kv_pages = 2 * len(holding.layers) * holding.kv.total
        assert memory.layout.fixed_pages(holding) + kv_pages + memory._pool.num_free == facts.num_pages
        self.check_loaded()

    def disturb(self) -> None:
        """Let what is loaded next be held up or fail, in any place; who is told to stop passes."""
        self.gate.mend()
        self.gate.open()
        fate = self.rng.random()
        if fate < 0.4:
            self.gate.hold(int(self.rng.integers(0, 30)))
        elif fate < 0.7:
            self.gate.fail_after(int(self.rng.integers(0, 12)))

    def check_loaded(self) -> None:
        """Check the parameters of the layers that are computed here: nothing may have touched them."""
        for layer in self.model.layers:
            assert torch.equal(self.model._opener.weights.layers[layer].storage, self.parameters[1 + layer])

    def part(self, of: LayerRange) -> LayerRange:
        first = int(self.rng.integers(of.first, of.end))
        return LayerRange(first, int(self.rng.integers(first + 1, of.end + 1)))

    def keep(self) -> None:
        held = self.model.layers
        layers = held if self.rng.random() < 0.3 else self.part(held)
        self.model.keep(layers)
        assert (self.model.layers, self.model.resident) == (layers, layers)
        assert self.model._memory.num_blocks >= self.model.info.capacity.num_blocks
        runner, memory = self.model.open(), self.model._memory
        kv_pages, page_bytes = 2 * len(layers) * memory.holding.kv.total, self.model.facts.page_bytes
        spent = runner.info.param_bytes + (kv_pages + memory._pool.num_free) * page_bytes
        assert spent == self.model.facts.num_pages * page_bytes
        spoil(self.model)
        runner.close()

    def beside(self) -> None:
        held, whole = self.model.layers, self.model.whole
        if held == whole:
            return
        first, end = int(self.rng.integers(held.first + 1)), int(self.rng.integers(held.end, whole.end + 1))
        layers = whole if self.rng.random() < 0.6 else LayerRange(first, end)
        blocks = self.model.blocks_with(held, layers)
        assert self.model.reside(layers, int(self.rng.integers(blocks + 1))) == blocks

    def ahead(self) -> None:
        if self.model.layers != self.model.whole:
            held, blocks = self.model.layers, int(self.rng.integers(1, self.model._memory.num_blocks + 1))
            fitting = self.model.blocks_ahead(held, blocks)
            if not fitting:
                return
            assert self.model.reside(self.model.whole, blocks, is_ahead=True) >= blocks
            cache = self.model.ahead()
            assert cache is not None
            assert (cache.num_blocks, len(cache.layers)) == (fitting, len(self.model.whole))

    def unload(self) -> None:
        if self.model.layers != self.model.whole:
            blocks = self.model.blocks_with(self.model.layers)
            assert self.model.reside(self.model.layers, blocks) == blocks
            assert self.model.ahead() is None
            spoil(self.model)

    def restore(self) -> None:
        try:
            self.model.restore()
        except StartupError:
            self.gate.mend()
            self.model.restore()
        assert all(map(torch.equal, parameters_of(self.model), self.parameters))


@pytest.mark.parametrize("seed", first_of(range(12), 3))
def test_random_lives_lose_no_page_and_no_parameter(model_of: ModelOf, seed: int, gate: LoadingGate) -> None:
    name, rng = list(SHAPES)[seed % len(SHAPES)], np.random.default_rng(seed)
    model = model_of(name, page_bytes=PAGE * int(rng.integers(1, 4)), block_size=int(rng.integers(3, 20)))
    life = Life(model, gate, seed)
    for _ in range(60):
        life.step()
    assert life.done == {"keep", "restore", "beside", "unload", "ahead"}
    gate.mend()
    life.restore()
