"""Features of other models that may stand in a supported architecture's config.json: refused by name.

The reference ignores most of these fields, so a checkpoint that needs one would run there too, and be wrong.
"""

from __future__ import annotations

from pathlib import Path

from services.worker.models.config_json import Config
from services.worker.models.families import FAMILIES, Family
from shared.errors import StartupError
from shared.model_families import architectures_of
from shared.reading import is_file

SUPPORTED = ", ".join(sorted(FAMILIES))

_FEATURES = {
    "quantization_config": "a quantized checkpoint",
    "compression_config": "a compressed checkpoint",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "vision_config": "a model with a vision tower",
    "audio_config": "a model with an audio tower",
    "kv_lora_rank": "multi-head latent attention",
    "alibi": "attention with linear biases (ALiBi)",
    "use_alibi": "attention with linear biases (ALiBi)",
    "attn_logit_softcapping": "a soft cap on attention scores",
    "final_logit_softcapping": "a soft cap on logits",
    "attention_chunk_size": "attention in chunks",
    "attention_multiplier": "a scale of attention scores of its own",
    "clip_qkv": "clipped queries, keys and values",
    "no_rope_layers": "layers without positions",
    "lm_head_bias": "a bias of the head",
    "use_qk_norm": "a norm over queries and keys by a switch",
    "qk_layernorm": "a norm over queries and keys by a switch",
    "parallel_attn": "attention and MLP side by side",
    "use_parallel_residual": "attention and MLP side by side",
    "is_encoder_decoder": "an encoder with a decoder",
    "add_cross_attention": "cross-attention",
}
"""Field of config.json: what it means if it is set."""
_SCALES = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb", "scale_depth")
"""Fields that do nothing if they are 1."""
_TASKS = ("Classification", "Regression", "Reward", "Embedding", "QuestionAnswering", "MultipleChoice", "Bidirectional")
"""In names of architectures: what is computed from a decoder instead of text."""


def refuse_tasks(config: Config) -> None:
    """Check that config.json names no model that does something else than writing text, or one that does beside it.

    Raises:
        StartupError: it does, or `architectures` holds no names.
    """
    named = architectures_of(config)
    if not all(isinstance(name, str) for name in named):
        raise StartupError(
            "config.json: architectures is no list of names", f"Supported are {SUPPORTED}", "unsupported_model"
        )
    others = [name for name in named if any(task in name for task in _TASKS)]
    if others and not any("CausalLM" in name for name in named):
        raise StartupError(
            f"architecture {others[0]} writes no text, it is not supported",
            f"Supported are {SUPPORTED}",
            "unsupported_model",
        )


def refuse_features(config: Config, family: Family, architecture: str) -> None:
    """Check that config.json asks for nothing that the decoder does not compute.

    Raises:
        StartupError: it does; names the field.
    """
    for name, what in _FEATURES.items():
        if config.get(name):
            raise _refused(name, what)
    for name in _SCALES:
        if config.get(name) not in (None, 1):
            raise _refused(name, "a model with scaled activations")
    if config.get("auto_map") and not _is_reference_code(config["auto_map"], family, architecture):
        raise _refused("auto_map", "a model whose code lies in its folder")


def _refused(name: str, what: str) -> StartupError:
    hint = "Choose a plain dense checkpoint"
    return StartupError(f"{what} ({name} in config.json) is not supported", hint, "unsupported_model")


def _is_reference_code(auto_map: object, family: Family, architecture: str) -> bool:
    """Tell whether the code that the folder (or, before `--`, a repository) names is the reference's by now."""
    if not family.published_with_code or not isinstance(auto_map, dict):
        return False
    named = auto_map.get("AutoModelForCausalLM")
    return isinstance(named, str) and named.split("--")[-1] == f"modeling_{family.model_type}.{architecture}"


def refuse_adapter(model_dir: Path) -> None:
    """Check that the folder holds a model, not changes to one.

    Raises:
        StartupError: it holds a LoRA adapter.
    """
    if is_file(model_dir / "adapter_config.json"):
        raise StartupError(
            f"{model_dir} holds a LoRA adapter, which is not supported",
            "Merge it into its base model and save the result",
            "unsupported_model",
        )
