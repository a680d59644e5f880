"""A loaded model whose layers go and come back: the same bits as one that was never touched, and every page is kept."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from services.worker.contract.executor import HostCopy
from services.worker.executor import model_runner
from services.worker.executor import opening as opening_module
from services.worker.memory.change import MemoryLostError
from services.worker.memory.host_kv import HostKV
from shared.errors import StartupError
from shared.layers import LayerRange
from tests.support.checkpoints import stored_checkpoint
from tests.support.live_groups import PAGE, SHAPES, ranges_of, spoil
from tests.support.model_bits import calm_logits, logits_of, parameters_of
from tests.support.runners import KERNELS, MIB, open_runner
from tests.unit.worker.executor.conftest import ModelOf

pytestmark = pytest.mark.kernels

CASES = sorted(
    {
        ("llama", "float32", KERNELS),
        ("llama", "bfloat16", KERNELS),
        ("llama", "float32", "torch"),
        ("tied", "bfloat16", "torch"),
        ("tied", "float32", KERNELS),
        ("tied, learned positions", "float32", KERNELS),
        ("tied, learned positions", "bfloat16", "torch"),
        ("projected embedding", "float32", "torch"),
        ("projected embedding", "bfloat16", KERNELS),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "kernels"), CASES)
def test_stages_and_the_whole_say_the_same_after_every_change(
    model_of: ModelOf, name: str, dtype: str, kernels: str
) -> None:
    """Two models split in three ways and come back after each: first, middle and last stages, and stages of stages."""
    expected = calm_logits(name, dtype, kernels)
    models = [model_of(name, dtype=dtype, kernels=kernels) for _ in range(3)]
    parameters, num_blocks = parameters_of(models[0]), models[0].info.capacity.num_blocks
    for split in (ranges_of(2, 4), ranges_of(1, 2, 4), ranges_of(3, 4)):
        stages = models[: len(split)]
        for model, layers in zip(stages, split, strict=True):
            claimed = model.blocks_with(layers)
            model.keep(layers)
            model.check_invariants()
            spoil(model)
            runner = model.open()
            assert runner.info.layers == model.layers == layers
            assert runner.capacity.num_blocks == claimed > num_blocks
            assert runner.info.max_model_len == model.info.max_model_len
        runners = [model._runner for model in stages]
        assert torch.equal(logits_of(*runners), expected)
        for model in stages:
            spoil(model)
            model.restore()
            model.check_invariants()
            assert all(map(torch.equal, parameters_of(model), parameters))
            spoil(model)
            runner = model.open()
            assert runner.capacity == model.info.capacity
            assert torch.equal(logits_of(runner), expected)
            runner.close()
    for model in models:
        model.close()


def test_layers_that_are_not_held_cannot_be_kept_nor_claimed(model_of: ModelOf) -> None:
    model = model_of("llama")
    model.keep(LayerRange(1, 3))
    for layers in (LayerRange(0, 2), LayerRange(2, 4), LayerRange(0, 9)):
        with pytest.raises(ValueError, match=r"are not all among those held, \[1, 3\)"):
            model.keep(layers)
        with pytest.raises(ValueError, match=r"are not all among those held, \[1, 3\)"):
            model.blocks_with(layers)
    assert model.blocks_with(model.whole) == model.info.capacity.num_blocks
    model.check_invariants()


def test_parameters_that_a_stage_does_not_have_cannot_be_used_by_mistake(model_of: ModelOf) -> None:
    """They would be addresses without memory: the end of the process."""
    model = model_of("projected embedding", kernels="torch")
    model.keep(LayerRange(1, 3))
    weights = model._opener.weights.of_stage(model._opener.spec, model.layers)
    assert not weights.outer.parts
    for part in ("embedding", "head", "project_in"):
        assert weights.outer.get(part) is None
    with pytest.raises(KeyError):
        weights.layers[0]["qkv"]
    assert weights.layers[1]["qkv"].data_ptr() == model._opener.weights.layers[1]["qkv"].data_ptr()


def test_a_new_runner_knows_none_of_the_rows_before(model_of: ModelOf) -> None:
    model = model_of("llama")
    before = logits_of(model.open())
    first = model._runner
    assert first._tables.any()
    first.close()
    again = model.open()
    assert not again._tables.any()
    assert again.cache is model.cache
    assert torch.equal(logits_of(again), before)
    with pytest.raises(AssertionError, match="one runner is open at a time"):
        model.open()


def test_a_checkpoint_that_is_gone_or_another_is_refused_and_its_return_is_enough(
    model_of: ModelOf, tmp_path: Path
) -> None:
    shape = SHAPES["tied"]
    folder = Path(shutil.copytree(stored_checkpoint(shape)[0], tmp_path / "model"))
    model = model_of("tied", folder)
    model.keep(LayerRange(0, 2))
    file = folder / "model.safetensors"
    state, data = file.stat(), file.read_bytes()
    hidden = file.rename(tmp_path / "away")
    with pytest.raises(StartupError, match=r"model\.safetensors is not the file that was loaded"):
        model.restore()
    with pytest.raises(AssertionError, match="parameters are missing"):
        model.open()
    file.write_bytes(data)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(StartupError, match=r"model\.safetensors is not the file that was loaded"):
        model.restore()
    hidden.rename(file)
    model.restore()
    model.check_invariants()
    assert torch.equal(logits_of(model.open()), calm_logits("tied", "float32", KERNELS))


def test_a_fault_in_a_drop_leaves_all_as_it_was_and_lost_memory_never_comes_back(
    model_of: ModelOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    drop = model._memory.drop
    monkeypatch.setattr(model._memory, "drop", Mock(side_effect=OSError(12, "too many mappings")))
    with pytest.raises(OSError, match="too many mappings"):
        model.keep(LayerRange(0, 1))
    model.restore()
    assert torch.equal(logits_of(model.open()), calm_logits("llama", "float32", KERNELS))

    def lose(*args: Any, **more: Any) -> None:
        drop(*args, **more)
        raise MemoryLostError("pages are nowhere")

    monkeypatch.setattr(model._memory, "drop", lose)
    with pytest.raises(MemoryLostError):
        model.keep(LayerRange(0, 1))
    with pytest.raises(StartupError, match="dropped layers cannot come back: pages are nowhere"):
        model.restore()


@pytest.mark.parametrize("staged", [False, True])
def test_host_memory_stays_what_it_is_while_layers_go_and_come(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, *, staged: bool
) -> None:
    """A stage copies its own layers there and back, in blocks of the same numbers; what is said of a block is less."""
    monkeypatch.setattr(model_runner, "HostKV", partial(HostKV, staged=staged))
    model = model_of("llama", host_memory_bytes=MIB)
    whole = model.info.capacity.host
    assert whole is not None
    for layers in (model.whole, LayerRange(1, 3), model.whole):
        if layers == model.whole:
            model.restore()
        else:
            model.keep(layers)
        runner = model.open()
        assert runner.capacity.host == whole.share(len(layers), 4)
        rng, pools = np.random.default_rng(len(layers)), list(model.cache.pools())
        for pool in pools:
            pool[:9] = torch.from_numpy(rng.standard_normal(pool[:9].shape))
        before = [pool[:9].clone() for pool in pools]
        device, host = np.array([4, 0, 7], np.int32), np.array([1, 6, 3], np.int32)
        runner.copy(HostCopy(0, device, host, to_host=True))
        for pool in pools:
            pool[:9] = torch.nan
        runner.copy(HostCopy(1, device + 1, host, to_host=False))
        assert all(torch.equal(pool[device + 1], kept[device]) for pool, kept in zip(pools, before, strict=True))
        runner.close()
    model.check_invariants()


def test_the_reserve_of_pages_has_room_for_activations_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 of the largest batch, 96 tokens of 32 numbers of 4 bytes, and a tenth more."""
    monkeypatch.setattr(opening_module, "peak_bytes", lambda _device, _action: 10 * MIB)
    plain, paged = (open_runner(SHAPES["llama"], page_bytes=page) for page in (None, PAGE))
    extra = paged.info.reserve_bytes - plain.info.reserve_bytes
    assert extra == pytest.approx(1.1 * 4 * 96 * 32 * 4, abs=1)
    paged.close()
    plain.close()
