"""config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.worker.models.families import FAMILIES
from services.worker.models.rope import RopeTable, inverse_frequencies, rotate
from services.worker.models.spec import ModelSpec, RopeSpec, read_spec
from shared.errors import StartupError
from tests.support.checkpoints import CheckpointShape, stored_checkpoint

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def read(tmp_path: Path, *, generation: Any = None, **changes: Any) -> ModelSpec:
    config = {name: value for name, value in {**MINIMAL, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(tmp_path)


def test_absent_fields_take_the_architectures_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (4, 8, 1e-6)
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.head_norm) == (False,) * 5
    assert spec.rope == RopeSpec("default", 10_000.0)
    assert spec.eos_token_ids == ()
    assert (spec.q_size, spec.kv_size, spec.group_size) == (32, 32, 1)


def test_a_checkpoint_that_the_reference_saved_is_read_back() -> None:
    shape = CheckpointShape(num_kv_heads=1, head_dim=40, seed=7)
    spec = read_spec(stored_checkpoint(shape)[0])
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (384, 64, 96)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 1, 40)
    assert (spec.max_positions, spec.tied_embeddings, spec.eos_token_ids) == (512, False, (1,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec("default", 5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeSpec("default", 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec("linear", 5e5, 2.0)),
        ({"rope_theta": 7, "rope_scaling": None}, RopeSpec("default", 7.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeSpec("llama3", 5e5, 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_fields(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert read(tmp_path, **changes).rope == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (5, None, (5,)),
        ([7, 5, 7], None, (5, 7)),
        (5, {"eos_token_id": [9, 8]}, (8, 9)),
        (5, {"eos_token_id": None}, (5,)),
        (None, {}, ()),
        (0, None, (0,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, generation=generation, eos_token_id=config).eos_token_ids == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported. Supported are Llama"),
    ({"architectures": ["LlamaForCausalLM", "X"]}, "names no single architecture"),
    ({"architectures": ...}, "names no single architecture"),
    ({"model_type": "gemma"}, "model_type 'gemma' does not fit LlamaForCausalLM"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoint .quantization_config"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"vision_config": {"depth": 2}}, "vision tower"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "code lies in its folder"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"sliding_window": 64}, "sliding-window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn' is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ from layer to layer"),
    ({"partial_rotary_factor": 0.5}, "partial rotary embedding"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope parameter factor is missing"),
    ({"vocab_size": ...}, "vocab_size is missing"),
    ({"hidden_size": "32"}, "hidden_size is '32', not int"),
    ({"hidden_size": True}, "hidden_size is True, not int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"eos_token_id": 100}, "eos_token_id holds 100"),
    ({"eos_token_id": "x"}, "eos_token_id holds 'x'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read(tmp_path, **changes)


def test_a_window_that_is_switched_off_does_not_matter(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
    assert read(tmp_path, **qwen, use_sliding_window=False).qkv_bias
    with pytest.raises(StartupError, match="sliding-window"):
        read(tmp_path, **qwen, use_sliding_window=True)


def test_folders_without_a_model_say_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no folder"):
        read_spec(tmp_path / "absent")
    with pytest.raises(StartupError, match=r"has no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(StartupError, match="LoRA adapter"):
        read_spec(tmp_path)
    with pytest.raises(StartupError, match="LoRA adapter"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_angles_equal_the_references(tmp_path: Path, parameters: dict[str, Any]) -> None:
    spec = read(tmp_path, rope_parameters=parameters, head_dim=64, max_position_embeddings=2048)
    config = LlamaConfig(
        head_dim=64, hidden_size=32, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=parameters
    )
    reference = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(spec.rope, 64), reference.inv_freq, rtol=1e-6, atol=0)


def test_rotation_preserves_length_and_depends_on_distance_only() -> None:
    """The rotary embedding's definition: <R(m) q, R(n) k> is a function of m - n."""
    table = RopeTable(RopeSpec(), 16, 100, torch.float32, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def product(at_query: int, at_key: int) -> torch.Tensor:
        turned = [
            rotate(heads, *table.rows(torch.tensor([position])))
            for heads, position in ((query, at_query), (key, at_key))
        ]
        assert torch.allclose(turned[0].norm(), query.norm())
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(61, 57), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(product(7, 3), product(7, 4), rtol=1e-4)


def test_every_family_is_named_after_its_architecture() -> None:
    assert all(name.lower().startswith(family.model_type) for name, family in FAMILIES.items())
