"""config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.dispatcher.text.model_folder import read_model_folder
from services.worker.models.families import FAMILIES
from services.worker.models.rope import RopeTable, inverse_frequencies
from services.worker.models.spec import ModelSpec, RopeSpec, check_context, read_spec
from shared.errors import StartupError
from shared.model_families import DEFAULTS

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


def read(tmp_path: Path, **changes: Any) -> ModelSpec:
    config = {name: value for name, value in {**MINIMAL, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_spec(tmp_path)


def test_absent_fields_take_the_architectures_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (4, 8, 1e-6)
    assert (spec.norm_kind, spec.norm_bias, spec.activation, spec.gated_mlp) == ("rms", False, "silu", True)
    assert (spec.position_kind, spec.rotary_dim, spec.windows) == ("rope", 8, (None, None))
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.head_norm) == (False,) * 5
    assert spec.rope == RopeSpec("default", 10_000.0)
    assert spec.eos_token_ids == ()
    assert (spec.q_size, spec.kv_size, spec.group_size) == (32, 32, 1)


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
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeSpec("default", 10_000.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.5}},
            RopeSpec("yarn", 10_000.0, 4.0, original_max_positions=128, attention_factor=0.5),
        ),
    ],
)
def test_rope_is_read_from_old_and_new_fields(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert read(tmp_path, **changes).rope == expected


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, "num_hidden_layers": 3}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
OPT = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 48, "intermediate_size": ...}
SLIDING, FULL = "sliding_attention", "full_attention"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"], "model_type": ...}, "architecture GPT2LMHeadModel is not supported. Supp"),
    (
        {"architectures": ["X", "LlamaForSequenceClassification"]},
        "architecture LlamaForSequenceClassification writes no",
    ),
    *(
        ({"architectures": named, "model_type": model_type}, f"architecture {name} writes no text")
        for name in ("LlamaForTokenClassification", "Qwen2ForRewardModel", "LlamaForEmbedding")
        for named, model_type in ((name, "llama"), ([name], ...))
    ),
    ({"architectures": [3]}, "architectures is no list of names"),
    ({"architectures": {"LlamaForCausalLM": 1}}, "architectures is no list of names"),
    ({"architectures": "GPT2LMHeadModel", "model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
    ({"model_type": "LlamaForCausalLM"}, "model_type 'LlamaForCausalLM' is not supported"),
    ({"max_position_embeddings": 1}, "max_position_embeddings gives a context of 1, and a request has a token of"),
    ({"architectures": ..., "model_type": ...}, "has neither model_type nor architectures"),
    ({"architectures": ..., "model_type": "gpt2"}, "model_type 'gpt2' is not supported. Supported are Llama"),
    ({"model_type": "gemma"}, "model_type 'gemma' is not supported"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoint .quantization_config"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"vision_config": {"depth": 2}}, "vision tower"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "code lies in its folder"),
    ({"compression_config": {"format": "int"}}, "compressed checkpoint"),
    ({"num_experts": 8}, "mixture of experts .num_experts"),
    ({"n_routed_experts": 8}, "mixture of experts"),
    ({"audio_config": {"depth": 2}}, "audio tower"),
    ({"kv_lora_rank": 64}, "latent attention"),
    ({"alibi": True}, "ALiBi"),
    ({"attn_logit_softcapping": 50.0}, "soft cap on attention scores .attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "soft cap on logits"),
    ({"attention_chunk_size": 64}, "attention in chunks"),
    ({"attention_multiplier": 0.1}, "scale of attention scores"),
    ({"logits_scaling": 8.0}, "scaled activations .logits_scaling"),
    ({"lm_head_bias": True}, "bias of the head"),
    ({"is_encoder_decoder": True}, "encoder with a decoder"),
    ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu' .hidden_act. is not supported. Supported: silu"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types of llama that contradict sliding_window"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of type 'chunked_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types is no list of 2 types"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "type 'proportional' is not supported. Supported: default"),
    ({"rope_scaling": {"rope_type": "axial"}}, "type 'axial' is not supported"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "type 'su' is not supported"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "multimodal rotary embedding"),
    ({"rope_scaling": {"type": "mrope"}}, "type 'mrope' is not supported"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is no list of 4 positive numbers"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, 0]}}, "short_factor is no list"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 4}}, "long_factor is no list"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope parameter factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope parameter factor is 0.0, must be above 0"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor is 4.0, must be above low_freq_factor",
    ),
    ({"rope_theta": 0}, "rope_theta is 0.0, must be above 0"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ from layer to layer"),
    ({"partial_rotary_factor": 0.5}, "partial rotary embedding .partial_rotary_factor. of llama"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope parameter factor is missing"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "32"}, "hidden_size is '32', not int"),
    ({"hidden_size": True}, "hidden_size is True, not int"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({**QWEN2, "layer_types": [SLIDING, FULL, FULL]}, "has sliding_attention, but use_sliding_window"),
    ({**QWEN2, "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, must be at least 1"),
    ({**QWEN2, "use_sliding_window": 1, "sliding_window": 9}, "use_sliding_window is 1, not bool"),
    ({**MISTRAL, "sliding_window": 64, "layer_types": [SLIDING, FULL]}, "layer_types of mistral that contradict"),
    ({**MISTRAL, "num_key_value_heads": ...}, "num_key_value_heads is 8, which does not divide 4"),
    ({**PHI3, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.1}, "head_dim is 8"),
    ({**PHI3, "rope_scaling": {"type": "su", "short_factor": [1]}}, "short_factor is no list of 4"),
    ({**PHI3, "partial_rotary_factor": 1.5}, "head_dim is 8; the rotary embedding turns 12"),
    ({**PHI3, "auto_map": {"AutoModelForCausalLM": "other.Phi3ForCausalLM"}}, "code lies in its folder"),
    ({**OPT, "activation_function": "tanh"}, "activation 'tanh' .activation_function. is not supported"),
    ({**OPT, "word_embed_proj_dim": 0}, "word_embed_proj_dim is 0"),
    *(
        ({"num_hidden_layers": count}, f"num_hidden_layers is {said}, must be at most 4096")
        for count, said in ((4097, "4097"), (10**6, "1000000"), (10**400, "a number of 401 digits"))
    ),
    *(
        ({name: 10**400}, f"{name} is a number of 401 digits, must be at most 2147483647")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    ),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*, not float"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, must be finite"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, must be finite"),
    ({"rms_norm_eps": -0.0}, "rms_norm_eps is -0.0, must be above 0"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400] * 4}}, "short_factor is no list"),
    ({**PHI3, "partial_rotary_factor": 1e308}, "the rotary embedding turns"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast is -1.0, must not be negative"),
    ({"architectures": ["x" * 10**6], "model_type": ...}, "architecture xxx"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as refused:
        read(tmp_path, **changes)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 64}, (None, None)),
        ({**MISTRAL, "sliding_window": 64}, (64, 64)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "max_position_embeddings": 8192}, (4096, 4096)),
        ({**MISTRAL, "sliding_window": 64, "layer_types": [SLIDING] * 2}, (64, 64)),
        ({**MISTRAL, "sliding_window": 127}, (127, 127)),
        ({**MISTRAL, "sliding_window": 128}, (None, None)),
        ({**PHI3, "sliding_window": 64}, (64, 64)),
        (PHI3, (None, None)),
        ({**QWEN2, "sliding_window": 64}, (None, None, None)),
        ({**QWEN2, "sliding_window": 64, "use_sliding_window": False}, (None, None, None)),
        ({**QWEN2, "sliding_window": 64, "use_sliding_window": True}, (None, None, None)),
        ({**QWEN2, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (None, 64, 64)),
        (
            {**QWEN2, "sliding_window": 64, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
            (64, None, 64),
        ),
        ({**QWEN2, "sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
    ],
)
def test_windows_of_each_layer(tmp_path: Path, changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    """Absent fields as in transformers: a Mistral without `sliding_window` has one of 4 096, a Qwen2 with a window has
    it from layer 28 on. A window as long as the context is none."""
    assert read(tmp_path, **changes).windows == expected


def test_opt_has_learned_positions_layer_norms_and_a_plain_mlp(tmp_path: Path) -> None:
    spec = read(tmp_path, **OPT)
    assert (spec.position_kind, spec.rotary_dim, spec.position_offset) == ("learned", 0, 2)
    assert (spec.norm_kind, spec.norm_bias, spec.norm_eps) == ("layer", True, 1e-5)
    assert (spec.norm_first, spec.final_norm) == (True, True)
    assert (spec.activation, spec.gated_mlp, spec.intermediate_size) == ("relu", False, 48)
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True,) * 4
    assert spec.embedding_size is None
    behind = read(tmp_path, **OPT, do_layer_norm_before=False, word_embed_proj_dim=24)
    assert (behind.norm_first, behind.final_norm, behind.embedding_size) == (False, False, 24)
    assert not read(tmp_path, **OPT, _remove_final_layer_norm=True).final_norm


def test_code_that_became_the_reference_is_not_needed(tmp_path: Path) -> None:
    """The published Phi-3 checkpoints name the files that transformers took over; as there, they are not run."""
    auto_map = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert read(tmp_path, **PHI3, auto_map=auto_map).architecture == "Phi3ForCausalLM"
    with pytest.raises(StartupError, match="code lies in its folder"):
        read(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})


FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [5.0] * 4}


def test_longrope_is_served_as_long_as_its_factors_stay(tmp_path: Path) -> None:
    """Phi-3 with 128 positions after 32: sqrt(1 + ln(4) / ln(32)) = 1.1832."""
    spec = read(tmp_path, **PHI3, rope_scaling={"type": "su", **FACTORS}, original_max_position_embeddings=32)
    assert spec.max_positions == 32
    assert (spec.rope.kind, spec.rope.factors) == ("longrope", (1.0, 1.5, 2.0, 3.0))
    assert spec.rope.attention_factor == pytest.approx(1.1832, rel=1e-4)
    check_context(spec, 32)
    check_context(spec, None)
    with pytest.raises(StartupError, match="longer than the model's 32 positions: beyond them longrope"):
        check_context(spec, 33)
    with pytest.raises(StartupError, match=r"longer than the model's 128 positions\. Ask for at most 128"):
        check_context(read(tmp_path), 129)


def test_yarn_lengthens_the_context_that_it_names(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(tmp_path, rope_scaling=yarn).max_positions == 512
    assert read(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0}).max_positions == 128


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


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
        LLAMA3,
        YARN,
        {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
        {**YARN, "attention_factor": 0.9},
        {**YARN, "original_max_position_embeddings": 4},
        {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0 + 0.1 * i for i in range(32)],
            "long_factor": [8.0] * 32,
            "original_max_position_embeddings": 512,
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
    cos, sin = reference(torch.zeros(1), torch.arange(100).unsqueeze(0))
    table = RopeTable(spec.rope, 64, 100, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(table.cos, cos[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(table.sin[:, 32:], sin[0, :, 32:], rtol=0, atol=2e-5)


def test_every_family_is_named_after_its_architecture_and_has_defaults() -> None:
    assert all(name.lower().startswith(family.model_type) for name, family in FAMILIES.items())
    assert sorted(DEFAULTS) == sorted(family.model_type for family in FAMILIES.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_fields_are_those_of_the_references_configuration(tmp_path: Path, name: str) -> None:
    """config.json says its `model_type` and nothing else; beside it, the same with every field written out. A
    dispatcher, which lets ids pass, knows the same size of the vocabulary as a worker, which has an embedding."""
    model_type = FAMILIES[name].model_type
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    absent, by_dispatcher = read_spec(tmp_path), read_model_folder(tmp_path)
    written = AutoConfig.for_model(model_type).to_dict()
    assert by_dispatcher.vocab_size == absent.vocab_size == written["vocab_size"]
    assert by_dispatcher.max_model_len == written["max_position_embeddings"]
    for nameless in ({"architectures": [name]}, {"architectures": name}):
        (tmp_path / "config.json").write_text(json.dumps(nameless))
        assert read_spec(tmp_path) == absent
        assert read_model_folder(tmp_path) == by_dispatcher
    (tmp_path / "config.json").write_text(json.dumps({**written, "eos_token_id": None}))
    assert read_spec(tmp_path) == absent


@pytest.mark.parametrize(
    "named",
    [
        *(..., None, [], "", "LlamaForCausalLM", ["LlamaModel"], ["LlamaForCausalLM", "LlamaForTokenClassification"]),
        *(["LLaMAForCausalLM"], ["YiForCausalLM"], ["MistralForCausalLM"], ["LlamaForCausalLMWithValueHead"]),
    ],
)
def test_the_family_is_that_of_the_model_type(tmp_path: Path, named: Any) -> None:
    """Oracle: transformers' classes, whose models have the same parameters whatever `architectures` names."""
    assert read(tmp_path, architectures=named) == read(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "llama"
    assert read(tmp_path, model_type=...) == read(tmp_path)
