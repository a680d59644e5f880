"""Families of models: of which one a config.json is, and what it means where it is silent.

All who read a model's folder read this, so that the ids that a dispatcher lets pass are those that a worker has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


def _sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }


_QWEN: Final = {
    **_sizes(151_936, 4096, 22_016, 32, 32, 32_768),
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _sizes(32_000, 4096, 11_008, 32, 32, 2048),
    "mistral": {
        **_sizes(32_000, 4096, 14_336, 32, 32, 131_072),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "phi3": {
        **_sizes(32_064, 3072, 8192, 32, 32, 4096),
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
    },
    "opt": {
        "vocab_size": 50_272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
}
"""By `model_type`: fields that config.json may leave out, with the values of the family's configuration class in
transformers."""


def family_of(config: Mapping[str, Any]) -> str | None:
    """Return the family of a config.json: its `model_type`, as in transformers; without one, by `architectures`.

    Returns:
        A name in `DEFAULTS`; None for models of another kind.
    """
    model_type = config.get("model_type")
    if model_type is not None:
        return model_type if isinstance(model_type, str) and model_type in DEFAULTS else None
    named = (name for name in architectures_of(config) if isinstance(name, str))
    found = (name.removesuffix("ForCausalLM").removesuffix("Model").lower() for name in named)
    return next((name for name in found if name in DEFAULTS), None)


def architectures_of(config: Mapping[str, Any]) -> list[Any]:
    """Return what `architectures` of config.json names: a list, or one by itself."""
    named = config.get("architectures") or []
    return named if isinstance(named, list) else [named]
