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

from services.worker.executor.runner import load_runner
from services.worker.memory.model_memory import ModelSizes, PlainMemory
from services.worker.models.checkpoint import INDEX_NAME, SINGLE_NAME, find_tensors
from services.worker.models.loader import load_weights
from services.worker.models.matching import match_checkpoint
from services.worker.models.spec import read_spec
from services.worker.models.weights import ModelWeights, num_parameters, parameter_bytes
from shared.errors import StartupError
from tests.support.checkpoints import CheckpointShape, save_checkpoint, stored_checkpoint
from tests.support.runners import runner_settings

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(stored_checkpoint(SHAPE)[0], tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32, progress: Any = None) -> ModelWeights:
    matched = match_checkpoint(read_spec(folder), find_tensors(folder))
    memory = PlainMemory(ModelSizes(matched.spec, 16, dtype), CPU)
    return load_weights(
        matched.spec, matched.tensors, dtype, memory.parameters, progress or (lambda _done, _what: None)
    )


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
    assert sum(each.storage.numel() for each in (weights.outer, *weights.layers)) == parameter_bytes(
        spec, torch.float32
    )


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


DAMAGE: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = [
    (lambda t: t.pop("model.norm.weight"), r"no tensor model\.norm\.weight"),
    (lambda t: t.pop("lm_head.weight"), r"no tensor lm_head\.weight"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"shape \[65\], config\.json asks for \[64\]"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), "type I8, which is not supported"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(96)}), r"up_proj\.bias that Llama"),
    (lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(1)}), r"tensor layers\.2\.\S+ that Llama"),
    (lambda t: t.update({"lm_head.bias": torch.zeros(1)}), r"lm_head\.bias that LlamaForCausalLM does not use"),
    (lambda t: t.update({"norm.weight": torch.zeros(64)}), r"has model\.norm\.weight twice.*they differ"),
    (lambda t: t.update({"x.lora_A.weight": torch.zeros(1)}), r"x\.lora_A\.weight that LlamaForCausalLM does not use"),
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


def test_fused_tensors_fill_the_same_parts(tmp_path: Path) -> None:
    shape = CheckpointShape(family="phi3")
    save_checkpoint(tmp_path, shape)
    tensors, layer = load_file(tmp_path / SINGLE_NAME), load(tmp_path).layers[0]
    assert torch.equal(layer["qkv"], tensors["model.layers.0.self_attn.qkv_proj.weight"])
    assert torch.equal(layer["gate_up"], tensors["model.layers.0.mlp.gate_up_proj.weight"])
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 64)}))
    with pytest.raises(StartupError, match=r"qkv_proj\.weight has shape \[64, 64\], config\.json asks for \[128, 64\]"):
        load(tmp_path)


def truncate_shard(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes a file of a folder."""

    def change_file(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return change_file


def change_config(**changes: Any) -> Callable[[Path], None]:
    return in_json("config.json", lambda config: config.update(changes))


def promise_all_in_one_file(index: dict[str, Any]) -> None:
    files: dict[str, str] = index["weight_map"]
    index["weight_map"] = dict.fromkeys(files, min(files.values()))


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (truncate_shard, r"-of-\d+\.safetensors is broken: it is truncated: 4 bytes are missing"),
    (in_json(INDEX_NAME, promise_all_in_one_file), r"the checkpoint has no tensor model\."),
    (lambda folder: max(folder.glob("*.safetensors")).unlink(), r"-of-\d+\.safetensors is missing"),
    (lambda folder: (folder / INDEX_NAME).write_text("{"), r"index\.json is not valid JSON"),
    (change_config(hidden_size=128), r"has shape \[\d+, \d+\], config\.json asks for"),
    (change_config(num_hidden_layers=3), r"no tensor model\.layers\.2\."),
    (change_config(num_hidden_layers=1), r"a tensor model\.layers\.1\.\S+ that LlamaForCausalLM does not use"),
    (change_config(mlp_bias=True), r"no tensor model\.layers\.0\.mlp\.gate_proj\.bias"),
    (change_config(model_type="mixtral"), "model_type 'mixtral' is not supported"),
    (change_config(quantization_config={"bits": 4}), "quantized checkpoint"),
    (change_config(rope_parameters={"rope_type": "proportional"}), "rotary embedding of type 'proportional'"),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_broken_or_foreign_checkpoint_is_refused_in_one_line_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], message: str
) -> None:
    def allocate(*_arguments: Any) -> None:
        raise AssertionError("parameters were allocated")

    save_checkpoint(tmp_path, SHAPE, max_shard_size="100KB")
    damage(tmp_path)
    monkeypatch.setattr("services.worker.executor.runner.load_weights", allocate)
    with pytest.raises(StartupError, match=message) as error:
        load_runner(runner_settings(tmp_path), lambda _done, _what: None)
    assert "\n" not in str(error.value)


HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda h: h["model.norm.weight"].update(shape=[63]), "length and shape of model.norm.weight contradict"),
    (lambda h: h["model.norm.weight"].update(shape=[-64]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(shape=[64.0]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(data_offsets=[0]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(data_offsets=[0, 256]), "overlap or leave a gap"),
    (lambda h: h["model.norm.weight"].pop("dtype"), "entry of model.norm.weight is broken"),
    (lambda h: h.update({"x": 3}), "entry of x is broken"),
    (lambda h: h["model.norm.weight"].update(shape=[1] * 4000), "has 4000 dimensions, more than 8"),
    (lambda h: h["model.norm.weight"].update(shape=[10**400, 0]), "entry of model.norm.weight is broken"),
    (lambda h: h["model.norm.weight"].update(shape=[True]), "entry of model.norm.weight is broken"),
    (lambda h: h.update(__metadata__=[1]), "is broken: .*invalid type: sequence"),
    (lambda h: h.update(__metadata__={"format": 1}), "is broken: .*invalid type: integer"),
    (lambda h: h["model.norm.weight"].update(dtype="X"), "is broken: .*unknown variant"),
    (lambda h: h.update({"x": json.loads("[" * 250 + "]" * 250)}), "its header is not valid JSON: .* nested too deep"),
    (lambda h: h.update({str(index): h["lm_head.weight"] for index in range(100_001)}), "more than 100000"),
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


def test_missing_files_are_named(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        find_tensors(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match="pickled weights"):
        find_tensors(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        *(
            ({"x": path}, "no file of the folder")
            for path in ("../a.safetensors", "./b/../../a.safetensors", "/a", "..")
        ),
        ({"x": 3}, "no file of the folder"),
        ({"x": "absent.safetensors"}, "absent.safetensors is missing"),
        ({"x": "n" * 300}, "nnn is missing"),
        ({"x": "a\0b"}, "is missing"),
        (json.loads("[" * 250 + "]" * 250), "is not valid JSON: .* nested too deep"),
        (dict.fromkeys(map(str, range(100_001)), SINGLE_NAME), "names 100001 tensors, more than 100000"),
        (dict.fromkeys(map(str, range(10**6)), SINGLE_NAME), "is larger than 16.0 MiB"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, weight_map: Any, message: str) -> None:
    (folder / SINGLE_NAME).rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartupError, match=message):
        find_tensors(folder)
