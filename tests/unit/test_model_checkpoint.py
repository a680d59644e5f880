"""Checks of safetensors files before any tensor is read, and the loading that follows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.models.checkpoint import INDEX_NAME, SINGLE_NAME, check_against, find_tensors
from services.worker.models.loader import load_weights
from services.worker.models.spec import read_spec
from services.worker.models.weights import ModelWeights, num_parameters, parameter_bytes
from shared.errors import StartupError
from tests.support.checkpoints import CheckpointShape, save_checkpoint, stored_checkpoint

SHAPE = CheckpointShape(seed=7)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(stored_checkpoint(SHAPE)[0], tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32, progress: Any = None) -> ModelWeights:
    spec = read_spec(folder)
    tensors = find_tensors(folder)
    check_against(spec, tensors)
    return load_weights(spec, tensors, dtype, CPU, progress or (lambda _done, _what: None))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_parts_hold_the_checkpoints_tensors(folder: Path) -> None:
    tensors, weights = load_file(folder / SINGLE_NAME), load(folder)
    attention = "model.layers.1.self_attn"
    stacked = torch.cat([tensors[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(weights.layers[1]["qkv"], stacked)
    assert torch.equal(weights.outer["head"], tensors["lm_head.weight"])
    assert torch.equal(weights.layers[0]["down"], tensors["model.layers.0.mlp.down_proj.weight"])
    spec = read_spec(folder)
    assert num_parameters(spec) == sum(tensor.numel() for tensor in tensors.values())
    assert weights.num_bytes == parameter_bytes(spec, torch.float32)


def test_a_layers_parameters_lie_in_one_aligned_buffer(folder: Path) -> None:
    layer = load(folder, torch.bfloat16).layers[0]
    begin, end = layer.storage.data_ptr(), layer.storage.data_ptr() + layer.storage.numel()
    for part in layer.parts:
        view = layer[part.name]
        assert view.dtype == torch.bfloat16
        assert begin <= view.data_ptr() <= end - view.numel() * 2
        assert (view.data_ptr() - begin) % 64 == 0


def test_shards_give_the_same_parameters_and_progress_counts_bytes(tmp_path: Path, folder: Path) -> None:
    sharded = tmp_path / "sharded"
    save_checkpoint(sharded, SHAPE, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    seen: list[float] = []
    shards, whole = load(sharded, progress=lambda done, _what: seen.append(done)), load(folder)
    for one, other in zip((shards.outer, *shards.layers), (whole.outer, *whole.layers), strict=True):
        assert torch.equal(one.storage.view(torch.float32), other.storage.view(torch.float32))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float64])
def test_types_are_converted(folder: Path, source: torch.dtype) -> None:
    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(source) for name, tensor in tensors.items()})

    rewrite(folder, convert)
    expected = load_file(folder / SINGLE_NAME)["model.norm.weight"].float()
    assert torch.equal(load(folder).outer["norm"], expected)


def test_a_tied_model_ignores_a_saved_head(tmp_path: Path) -> None:
    tied = tmp_path / "tied"
    save_checkpoint(tied, CheckpointShape(tied=True))
    rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert load(tied).outer.get("head") is None


def test_old_buffers_of_angles_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)


DAMAGE: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda t: t.pop("model.norm.weight"), r"no tensor model\.norm\.weight"),
    (lambda t: t.pop("lm_head.weight"), r"no tensor lm_head\.weight"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"shape \[65\], config\.json asks for \[64\]"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "type I8, which is not supported"),
    (lambda t: t.update({"x.lora_A.weight": torch.zeros(1)}), r"1 tensors that LlamaForCausalLM does not use.*lora_A"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_tensors_that_do_not_fit_the_config_are_refused(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    rewrite(folder, damage)
    with pytest.raises(StartupError, match=message):
        load(folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -100_000])
def test_a_truncated_file_is_refused_at_any_length(folder: Path, keep: int) -> None:
    path = folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StartupError, match=r"model\.safetensors is broken"):
        find_tensors(folder)


HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h["model.norm.weight"].update(shape=[63]), "length and shape of model.norm.weight contradict"),
    (lambda h: h["model.norm.weight"].update(shape=[-64]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(shape=[64.0]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(data_offsets=[0]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(data_offsets=[0, 256]), "overlap or leave a gap"),
    (lambda h: h["model.norm.weight"].pop("dtype"), "entry of model.norm.weight is broken"),
    (lambda h: h.update({"x": 3}), "entry of x is broken"),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_a_header_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_header(folder / SINGLE_NAME, change)
    with pytest.raises(StartupError, match=message):
        find_tensors(folder)


def test_surplus_bytes_are_refused(folder: Path) -> None:
    with (folder / SINGLE_NAME).open("ab") as file:
        file.write(b"1234")
    with pytest.raises(StartupError, match="4 bytes too many"):
        find_tensors(folder)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        find_tensors(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match="pickled weights"):
        find_tensors(folder)
    sharded = tmp_path / "sharded"
    save_checkpoint(sharded, SHAPE, max_shard_size="100KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(StartupError, match=f"{gone.name} is missing"):
        find_tensors(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ({"x": "../model.safetensors"}, "no file of the folder"),
        ({"x": 3}, "no file of the folder"),
        ({"x": SINGLE_NAME}, "has no tensor x"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, weight_map: Any, message: str) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartupError, match=message):
        find_tensors(folder)
