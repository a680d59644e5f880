"""Configurations as checkpoints on the hub have them, most from before transformers 5: what is read from them.

Tensors and their shapes are compared with the reference's, built without memory; whole models by their known size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.models.spec import ModelSpec, read_spec
from services.worker.models.weights import all_parts, num_parameters

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
"""With the lines that its model card asks to add for long texts."""
QWEN3_06B: dict[str, Any] = {
    **QWEN25_7B,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "attention_bias": False,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI3_MINI_128K: dict[str, Any] = {
    **PHI3_MINI_4K,
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [8.0] * 48},
    "sliding_window": 262144,
}
PHI4_MINI: dict[str, Any] = {
    **PHI3_MINI_128K,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
OPT_125M: dict[str, Any] = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M: dict[str, Any] = {
    **OPT_125M,
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}

SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (LLAMA_31_8B, 8_030_261_248),
    "Mistral 7B v0.1": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5 7B": (QWEN25_7B, 7_615_616_512),
    "Qwen3 0.6B": (QWEN3_06B, 596_049_920),
    "Phi-3 mini 4k": (PHI3_MINI_4K, 3_821_079_552),
    "Phi-3 mini 128k": (PHI3_MINI_128K, 3_821_079_552),
    "Phi-4 mini": (PHI4_MINI, 3_836_021_760),
    "OPT 125M": (OPT_125M, 125_239_296),
    "OPT 350M": (OPT_350M, 331_196_416),
}


def spec_of(folder: Path, config: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_model_has_its_known_size_and_the_references_tensors(tmp_path: Path, name: str) -> None:
    published, size = SIZES[name]
    assert num_parameters(spec_of(tmp_path, published)) == size
    config = {key: value for key, value in published.items() if key != "auto_map"}
    spec = spec_of(tmp_path, {**config, "num_hidden_layers": 2})
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {key: tuple(tensor.shape) for key, tensor in reference.state_dict().items()}
    if spec.tied_embeddings:
        del expected["lm_head.weight"]
    assert {source.name: source.shape for part in all_parts(spec) for source in part.sources} == expected


def test_contexts_windows_and_rotations_are_read_from_published_models(tmp_path: Path) -> None:
    specs = {name: spec_of(tmp_path, config) for name, (config, _) in SIZES.items()}
    assert {name: (spec.max_positions, spec.windows[-1], spec.rotary_dim) for name, spec in specs.items()} == {
        "Llama 3.1 8B": (131_072, None, 128),
        "Mistral 7B v0.1": (32_768, 4096, 128),
        "Qwen2.5 7B": (131_072, None, 128),
        "Qwen3 0.6B": (40_960, None, 128),
        "Phi-3 mini 4k": (4096, 2047, 96),
        "Phi-3 mini 128k": (4096, None, 96),
        "Phi-4 mini": (4096, None, 96),
        "OPT 125M": (2048, None, 0),
        "OPT 350M": (2048, None, 0),
    }
