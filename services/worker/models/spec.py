"""config.json to a frozen `ModelSpec`. What the decoder cannot run is refused here, by name, before memory is taken.

Reads JSON only: no tensors, no code from the checkpoint's folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from services.worker.models.families import FAMILIES, BiasRule, Family
from shared.errors import StartupError

Config = dict[str, Any]
T = TypeVar("T", int, float, bool, str)

RopeKind = Literal["default", "linear", "llama3"]

_SUPPORTED = ", ".join(sorted(FAMILIES))
_UNSUPPORTED_FEATURES = {
    "quantization_config": "a quantized checkpoint",
    "compression_config": "a compressed checkpoint",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "vision_config": "a model with a vision tower",
    "audio_config": "a model with an audio tower",
    "auto_map": "a model whose code lies in its folder",
    "kv_lora_rank": "multi-head latent attention",
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base and how its frequencies are scaled for a longer context."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """Scale of a longer context; `linear` and `llama3`."""
    low_freq_factor: float = 1.0
    """`llama3`: waves longer than original_max_positions / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: waves shorter than original_max_positions / this stay."""
    original_max_positions: int = 0
    """`llama3`: context of the first training."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that the decoder, the loader and the memory budget need to know about a model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Divides `num_heads`."""
    head_dim: int
    """Even; num_heads * head_dim need not be hidden_size."""
    max_positions: int
    """Longest context that the model was made for, in tokens."""
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    """The head's matrix is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    """RMS norm over each query and key head, before the rotary embedding."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text: of generation_config.json, else of config.json."""

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads


def read_spec(model_dir: Path) -> ModelSpec:
    """Read what model the folder holds.

    Raises:
        StartupError: the folder or config.json is missing or broken, or the model has a feature that is not supported.
    """
    if not model_dir.is_dir():
        raise StartupError(f"no folder {model_dir}", "Give the folder of a checkpoint in Hugging Face format")
    if not (model_dir / "config.json").is_file():
        if (model_dir / "adapter_config.json").is_file():
            raise StartupError(f"{model_dir} holds a LoRA adapter", "Merge it into its base model and save the result")
        raise StartupError(f"{model_dir} has no config.json", "Give the folder of a checkpoint in Hugging Face format")
    config = read_json(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    _refuse_adapter(model_dir)
    architecture, family = _family(config)
    _refuse_features(config, family)
    return _build(_Reader(config), architecture, family, generation)


def read_json(path: Path) -> Config:
    """Return the JSON object in a small file of the checkpoint.

    Raises:
        StartupError: it cannot be read, or holds no object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}", "Copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object", "Copy the checkpoint again")
    return value


class _Reader:
    """Typed access to config.json: a wrong type or range is a `StartupError` that names the field."""

    def __init__(self, config: Config, prefix: str = "") -> None:
        self.config = config
        self._prefix = prefix

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"is {value!r}, not {kind.__name__}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.get(name, int, default)
        if value < 1:
            raise self.error(name, f"is {value}, must be at least 1")
        return value

    def error(self, name: str, what: str) -> StartupError:
        return StartupError(f"config.json: {self._prefix}{name} {what}", "Copy the checkpoint again")


def _refuse_adapter(model_dir: Path) -> None:
    if (model_dir / "adapter_config.json").is_file():
        raise StartupError(
            f"{model_dir} holds a LoRA adapter, which is not supported",
            "Merge it into its base model and save the result",
        )


def _family(config: Config) -> tuple[str, Family]:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise StartupError("config.json names no single architecture", f"Supported are {_SUPPORTED}")
    name: str = architectures[0]
    family = FAMILIES.get(name)
    if family is None:
        raise StartupError(f"architecture {name} is not supported", f"Supported are {_SUPPORTED}")
    model_type = config.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise StartupError(f"config.json: model_type {model_type!r} does not fit {name}", "Copy the checkpoint again")
    return name, family


def _refuse_features(config: Config, family: Family) -> None:
    for name, what in _UNSUPPORTED_FEATURES.items():
        if config.get(name):
            raise StartupError(f"{what} ({name} in config.json) is not supported", "Choose a plain dense checkpoint")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise StartupError(f"activation {activation!r} (hidden_act) is not supported", "Supported is silu")
    window_counts = family.window_switch is None or bool(config.get(family.window_switch))
    if config.get("sliding_window") is not None and window_counts:
        raise StartupError(
            "sliding-window attention (sliding_window in config.json) is not supported",
            "Choose a checkpoint with full attention",
        )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise StartupError("sliding-window layers (layer_types) are not supported", "Choose one with full attention")


def _build(reader: _Reader, architecture: str, family: Family, generation: Config) -> ModelSpec:
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    head_dim = reader.positive("head_dim", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    if head_dim % 2:
        raise reader.error("head_dim", f"is {head_dim}; the rotary embedding needs an even one")
    vocab_size = reader.positive("vocab_size")
    max_positions = reader.positive("max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=reader.get("rms_norm_eps", float, 1e-6),
        rope=_rope(reader, max_positions),
        tied_embeddings=reader.get("tie_word_embeddings", bool, default=False),
        qkv_bias=_bias(reader, family.qkv_bias),
        output_bias=_bias(reader, family.output_bias),
        mlp_bias=reader.get("mlp_bias", bool, default=False) if family.reads_mlp_bias else False,
        head_norm=family.head_norm,
        eos_token_ids=_eos_ids(reader, generation, vocab_size),
    )


def _bias(reader: _Reader, rule: BiasRule) -> bool:
    return rule if isinstance(rule, bool) else reader.get(rule, bool, default=False)


def _rope(reader: _Reader, max_positions: int) -> RopeSpec:
    """Read the rotary embedding: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    new = reader.config.get("rope_parameters")
    values = new or reader.config.get("rope_scaling") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise reader.error("rope_parameters", "differ from layer to layer, which is not supported")
    rope = _Reader({**values}, "rope parameter ")
    theta = rope.get("rope_theta", float, reader.get("rope_theta", float, 10_000.0))
    partial = rope.get("partial_rotary_factor", float, reader.get("partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise StartupError("partial rotary embedding (partial_rotary_factor) is not supported", "Choose another model")
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, rope.get("factor", float))
    if kind != "llama3":
        raise StartupError(f"rotary embedding of type {kind!r} is not supported", "Supported: default, linear, llama3")
    return RopeSpec(
        "llama3",
        theta,
        rope.get("factor", float),
        rope.get("low_freq_factor", float),
        rope.get("high_freq_factor", float),
        rope.positive("original_max_position_embeddings", max_positions),
    )


def _eos_ids(reader: _Reader, generation: Config, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text; generation_config.json goes before config.json."""
    value = generation.get("eos_token_id")
    if value is None:
        value = reader.config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise reader.error("eos_token_id", f"holds {token!r}, which is no id of the vocabulary")
    return tuple(sorted(set(ids)))
