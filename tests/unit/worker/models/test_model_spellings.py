"""What transformers loads, loads: one model in many spellings of its files, and the reference's greedy text of each.

Each spelling changes a folder that transformers wrote. The reference is read from the changed folder too, so that it
says itself what a spelling means.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.worker.models.checkpoint import INDEX_NAME, SINGLE_NAME, find_tensors
from services.worker.models.matching import match_checkpoint
from services.worker.models.spec import read_spec
from tests.support.checkpoints import CheckpointShape, greedy_text, stored_checkpoint
from tests.support.runner_driver import Driver
from tests.support.runners import load

pytestmark = pytest.mark.kernels

PROMPT = list(range(3, 303, 7))
NUM_TOKENS = 12
Spelling = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]

SHAPES = {
    "llama": CheckpointShape(seed=7),
    "llama, tied": CheckpointShape(num_kv_heads=4, tied=True),
    "mistral": CheckpointShape(family="mistral", seed=7),
    "qwen2": CheckpointShape(family="qwen2", seed=2),
    "qwen3, tied": CheckpointShape(family="qwen3", tied=True),
    "phi3": CheckpointShape(family="phi3", num_kv_heads=1, seed=13),
    "opt": CheckpointShape(family="opt", tied=True),
    "opt, norms behind": CheckpointShape(
        family="opt", tied=True, extra={"do_layer_norm_before": False, "word_embed_proj_dim": 40}
    ),
    "opt, untied": CheckpointShape(family="opt"),
}
LLAMA = ("llama",)
TIED = ("llama, tied", "qwen3, tied", "opt")


def tensors(change: Callable[[Tensors], Tensors]) -> Spelling:
    """Return what writes the changed tensors into the one file of a folder."""

    def respell(folder: Path) -> None:
        path = folder / SINGLE_NAME
        changed = {name: each.clone() for name, each in change(load_file(path)).items()}
        save_file(changed, path, metadata={"format": "pt"})

    return respell


def renamed(rename: Callable[[str], str]) -> Spelling:
    return tensors(lambda found: {rename(name): each for name, each in found.items()})


def added(**more: torch.Tensor) -> Spelling:
    return tensors(lambda found: {**found, **{name.replace("__", "."): each for name, each in more.items()}})


def config(drop: tuple[str, ...] = (), **changes: Any) -> Spelling:
    """Return what changes config.json."""

    def respell(folder: Path) -> None:
        content = {**json.loads((folder / "config.json").read_text()), **changes}
        kept = {name: value for name, value in content.items() if name not in drop}
        (folder / "config.json").write_text(json.dumps(kept))

    return respell


def only_head(found: Tensors) -> Tensors:
    embedding = next(name for name in found if name.endswith("embed_tokens.weight"))
    return {"lm_head.weight" if name == embedding else name: each for name, each in found.items()}


def other_head(found: Tensors) -> Tensors:
    embedding = next(each for name, each in found.items() if name.endswith("embed_tokens.weight"))
    return {**found, "lm_head.weight": embedding.flip(0)}


def in_shards(change: Callable[[dict[str, str]], object], *, keep_whole: bool = False) -> Spelling:
    """Return what splits the one file into two with a changed index."""

    def respell(folder: Path) -> None:
        found = load_file(folder / SINGLE_NAME)
        names = sorted(found)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file_name, held in parts.items():
            stale = 2 if keep_whole else 1
            save_file({name: found[name] * stale for name in held}, folder / file_name, metadata={"format": "pt"})
        weight_map = {name: file_name for file_name, held in parts.items() for name in held}
        change(weight_map)
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        if not keep_whole:
            (folder / SINGLE_NAME).unlink()

    return respell


def in_subfolder(folder: Path) -> None:
    """Split the one file into two: one is named as in a shell, the other lies in a folder of its own."""
    here, there = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    names = {here: f"./{here}", there: f"weights/{there}"}
    in_shards(lambda index: index.update({name: names[file] for name, file in index.items()}))(folder)
    (folder / "weights").mkdir()
    (folder / there).rename(folder / "weights" / there)


def unseen_window(folder: Path) -> None:
    """Name a window, of which the reference's model knows nothing; only its cache would drop keys by it."""
    config(sliding_window=16)(folder)
    (folder / "generation_config.json").write_text(json.dumps({"use_cache": False}))


LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
SHORT = renamed(lambda name: name.removeprefix("model."))
ZERO = torch.zeros(1, 1, 8, 16)

SPELLINGS: dict[str, tuple[tuple[str, ...], Spelling]] = {
    "without the base model's prefix": (tuple(SHAPES), SHORT),
    "with the prefix before the head too": (
        ("llama", "opt, untied"),
        renamed(lambda name: "model." + name.removeprefix("model.")),
    ),
    "with the prefix twice": (LLAMA, renamed(lambda name: "model." + name)),
    "without the prefix here and there": (LLAMA, renamed(lambda name: name.replace("model.layers.1", "layers.1"))),
    "only the head of a tied model": (TIED, tensors(only_head)),
    "only the head, without the prefix": (TIED, renamed(lambda name: name.removeprefix("model."))),
    "head and embedding of a tied model alike": (
        ("llama, tied",),
        tensors(lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"]}),
    ),
    "another head although it is said to be tied": (TIED, tensors(other_head)),
    "angles of old checkpoints": (
        LLAMA,
        added(
            model__layers__0__self_attn__rotary_emb__inv_freq=ZERO,
            model__layers__0__self_attn__rotary_emb__cos_cached=ZERO,
            model__layers__1__self_attn__rotary_emb__sin_cached=ZERO,
            model__rotary_emb__inv_freq=ZERO,
        ),
    ),
    "masks of old checkpoints": (LLAMA, added(model__causal_mask=ZERO, model__layers__0__self_attn__masked_bias=ZERO)),
    "a head for values": (LLAMA, added(v_head__summary__weight=ZERO, v_head__summary__bias=ZERO)),
    "a version of old OPT": (("opt",), added(model__decoder__version=ZERO)),
    "tensors of three types": (
        LLAMA,
        tensors(lambda found: {n: each.bfloat16().double() if "mlp" in n else each for n, each in found.items()}),
    ),
    "a whole file beside a stale index": (LLAMA, in_shards(lambda index: index, keep_whole=True)),
    "an index that promises more": (
        LLAMA,
        in_shards(lambda index: index.update(absent="model-00001-of-00002.safetensors")),
    ),
    "an index that leaves some out": (LLAMA, in_shards(lambda index: index.pop("model.norm.weight"))),
    "an index with the files exchanged": (
        LLAMA,
        in_shards(lambda index: index.update({n: f"{f[:10]}{3 - int(f[10])}{f[11:]}" for n, f in index.items()})),
    ),
    "an index of paths": (LLAMA, in_subfolder),
    "no architectures": (LLAMA, config(drop=("architectures",))),
    "the base model's architecture": (LLAMA, config(architectures=["LlamaModel"])),
    "several architectures": (LLAMA, config(architectures=["LlamaForCausalLM", "LlamaForTokenClassification"])),
    "an architecture of another name": (LLAMA, config(architectures="YiForCausalLM")),
    "a window that the family does not apply": (LLAMA, unseen_window),
    "half of a surrogate pair": (LLAMA, config(note="\ud83d")),
    "no context": (("llama", "qwen2", "phi3"), config(drop=("max_position_embeddings",))),
    "no type of numbers": (LLAMA, config(drop=("dtype", "torch_dtype"))),
    "the older name of the type": (LLAMA, config(drop=("dtype",), torch_dtype="float16")),
    "no number of key heads": (("llama, tied",), config(drop=("num_key_value_heads",))),
    "key heads that are null": (("llama, tied",), config(num_key_value_heads=None)),
    "no width of heads": (LLAMA, config(drop=("head_dim",))),
    "a width of heads that is null": (LLAMA, config(head_dim=None)),
    "no word about tying": (("llama", "opt"), config(drop=("tie_word_embeddings",))),
    "no activation, no epsilon": (LLAMA, config(drop=("hidden_act", "rms_norm_eps"))),
    "no word about biases": (LLAMA, config(drop=("attention_bias", "mlp_bias"))),
    "no rope": (LLAMA, config(drop=ROPE)),
    "rope in the older fields": (LLAMA, config(rope_parameters=None, rope_theta=500.0, rope_scaling=LINEAR)),
    "rope in the newer field": (
        LLAMA,
        config(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}),
    ),
    "rope by type and rope_type": (
        LLAMA,
        config(rope_parameters={**LINEAR, "rope_type": "default", "rope_theta": 5.0}),
    ),
    "theta beside newer parameters": (LLAMA, config(rope_theta=500.0, rope_parameters={"rope_type": "default"})),
    "older fields beside the newer one": (
        LLAMA,
        config(rope_parameters={"rope_type": "default", "rope_theta": 9.0}, rope_theta=500.0, rope_scaling=LINEAR),
    ),
    "llama3 in the older field": (LLAMA, config(rope_parameters=None, rope_scaling={"rope_type": "llama3", **LLAMA3})),
    "an end token beyond the vocabulary": (LLAMA, config(eos_token_id=[1, 100_000])),
}
CASES = [(name, shape) for name, (shapes, _) in SPELLINGS.items() for shape in shapes]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_spelling_gives_the_references_text(tmp_path: Path, name: str, shape: str) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES[shape])[0], tmp_path / "model"))
    SPELLINGS[name][1](folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    driver = Driver(load(folder))
    sequence = driver.add(PROMPT)
    driver.run(NUM_TOKENS, chunk=50, max_tokens=96)
    assert sequence.output == greedy_text(reference, PROMPT, NUM_TOKENS)


def test_what_is_left_out_or_taken_otherwise_than_config_json_says_is_logged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(SHAPES["llama, tied"])[0], tmp_path / "model"))
    SPELLINGS["another head although it is said to be tied"][1](folder)
    SPELLINGS["a head for values"][1](folder)
    with capture_logs() as logs:
        load(folder)
    said = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in said] == [
        "config.json ties the head to the embedding, but they differ: the head counts",
        "tensors left out, which are no part of the model",
    ]
    assert (said[1]["count"], said[1]["first"].rpartition(".")[0]) == (2, "v_head.summary")


def test_a_checkpoint_as_transformers_writes_it_leaves_nothing_out() -> None:
    for shape in SHAPES.values():
        folder = stored_checkpoint(shape)[0]
        matched = match_checkpoint(read_spec(folder), find_tensors(folder))
        assert matched.spec == read_spec(folder)
        assert matched.unused == ()
