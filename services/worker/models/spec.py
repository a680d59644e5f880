"""config.json to a frozen `ModelSpec`. What the decoder cannot run is refused here, by name, before memory is taken.

Reads JSON only: no tensors, no code from the checkpoint's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.worker.models.config_json import Config, ConfigReader
from services.worker.models.end_tokens import EndTokens, read_end_tokens
from services.worker.models.families import FAMILIES, BiasRule, Family
from services.worker.models.refusals import SUPPORTED, refuse_adapter, refuse_features, refuse_tasks
from services.worker.models.rope_spec import RopeSpec, Rotation, read_rotation
from services.worker.models.windows import read_windows
from shared.errors import StartupError
from shared.model_families import DEFAULTS, architectures_of, family_of
from shared.model_files import read_object
from shared.reading import is_file, is_folder

__all__ = ["Activation", "ModelSpec", "RopeSpec", "check_context", "read_spec"]

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
"""Names in config.json, several of which mean the same function."""
MAX_LAYERS = 4096
"""Thirty times as many as the deepest that is published has."""
LAYER_NORM_EPS = 1e-5
"""torch's own, which the OPT family does not state."""
MIN_CONTEXT = 2
TOO_SHORT = "and a request has a token of prompt and one of output at least"


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
    """num_heads * head_dim need not be hidden_size."""
    max_positions: int
    """Longest context that is served exactly, in tokens."""
    norm_kind: Literal["rms", "layer"]
    norm_bias: bool
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    """The MLP multiplies the activation of one projection by another; else it has one projection."""
    position_kind: Literal["rope", "learned"]
    rope: RopeSpec
    rotary_dim: int
    """First dimensions of each head that the rotary embedding turns; even, 0 for learned positions."""
    windows: tuple[int | None, ...]
    """By layer: keys that a query sees, itself included; None: all."""
    tied_embeddings: bool
    """The head's matrix is the embedding."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    """RMS norm over each query and key head, before the rotary embedding."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, see `end_tokens.py`."""
    position_offset: int = 0
    """Learned positions: row of position 0 in their table."""
    norm_weight: bool = True
    """Norms have a weight for each dimension."""
    norm_first: bool = True
    """Norms stand before attention and MLP; else behind the sums that follow them."""
    final_norm: bool = True
    """A norm stands before the head."""
    embedding_size: int | None = None
    """Width of the embedding and of the head's matrix, if two projections join them to hidden_size."""
    left_out: tuple[str, ...] = ()
    """What of the folder's files is not used though it was meant, a sentence each."""

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
    if not is_folder(model_dir):
        raise StartupError(f"no folder {model_dir}", "Give the folder of a checkpoint in Hugging Face format")
    refuse_adapter(model_dir)
    if not is_file(model_dir / "config.json"):
        raise StartupError(f"{model_dir} has no config.json", "Give the folder of a checkpoint in Hugging Face format")
    config = read_object(model_dir / "config.json")
    architecture, family = _family(config)
    refuse_features(config, family, architecture)
    reader = ConfigReader(config, DEFAULTS[family.model_type])
    spec = _build(reader, architecture, family, read_end_tokens(model_dir, config, reader.positive("vocab_size")))
    if spec.max_positions < MIN_CONTEXT:
        raise reader.error("max_position_embeddings", f"gives a context of {spec.max_positions}, {TOO_SHORT}")
    return spec


def check_context(spec: ModelSpec, max_model_len: int | None) -> None:
    """Check that the model serves so long a context.

    Raises:
        StartupError: it does not.
    """
    if max_model_len is None or max_model_len <= spec.max_positions:
        return
    why = ""
    if spec.rope.kind == "longrope":
        why = ": beyond them longrope computes a sequence's earlier keys anew, which is not supported"
    raise StartupError(
        f"max_model_len {max_model_len} is longer than the model's {spec.max_positions} positions{why}",
        f"Ask for at most {spec.max_positions}",
        "context_too_long",
    )


def _family(config: Config) -> tuple[str, Family]:
    """Return the family, and the name of its architecture."""
    refuse_tasks(config)
    found = family_of(config)
    for name, family in FAMILIES.items():
        if found == family.model_type:
            return name, family
    model_type, named = config.get("model_type"), architectures_of(config)
    if model_type is None and not named:
        raise StartupError(
            "config.json has neither model_type nor architectures", f"Supported are {SUPPORTED}", "unsupported_model"
        )
    what = f"model_type {model_type!r}" if model_type is not None else f"architecture {named[0]}"
    raise StartupError(f"{what} is not supported", f"Supported are {SUPPORTED}", "unsupported_model")


def _build(reader: ConfigReader, architecture: str, family: Family, ends: EndTokens) -> ModelSpec:
    hidden_size, num_layers = reader.positive("hidden_size"), reader.positive("num_hidden_layers", most=MAX_LAYERS)
    num_heads, num_kv_heads = _heads(reader)
    head_dim = reader.positive("head_dim", max(hidden_size // num_heads, 1))
    rotation = _rotation(reader, family, head_dim)
    is_layer_norm = family.norm_kind == "layer"
    affine = reader.get("layer_norm_elementwise_affine", bool, default=True) if is_layer_norm else True
    norm_first = reader.get("do_layer_norm_before", bool, default=True) if is_layer_norm else True
    no_final_norm = is_layer_norm and reader.get("_remove_final_layer_norm", bool, default=False)
    return ModelSpec(
        architecture=architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive(family.inner_field),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=rotation.max_positions,
        norm_kind=family.norm_kind,
        norm_bias=is_layer_norm and affine,
        norm_eps=LAYER_NORM_EPS if is_layer_norm else reader.above_zero("rms_norm_eps", 1e-6),
        activation=_activation(reader, family),
        gated_mlp=family.gated_mlp,
        position_kind="rope" if family.learned_positions is None else "learned",
        rope=rotation.rope,
        rotary_dim=rotation.rotary_dim,
        windows=read_windows(reader, family, num_layers, rotation.max_positions),
        tied_embeddings=reader.get("tie_word_embeddings", bool, default=False),
        qkv_bias=_bias(reader, family.qkv_bias),
        output_bias=_bias(reader, family.output_bias),
        mlp_bias=_bias(reader, family.mlp_bias),
        head_norm=family.head_norm,
        eos_token_ids=ends.ids,
        position_offset=family.learned_positions or 0,
        norm_weight=affine,
        norm_first=norm_first,
        final_norm=norm_first and not no_final_norm,
        embedding_size=_embedding_size(reader, family, hidden_size),
        left_out=ends.left_out,
    )


def _heads(reader: ConfigReader) -> tuple[int, int]:
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    return num_heads, num_kv_heads


def _rotation(reader: ConfigReader, family: Family, head_dim: int) -> Rotation:
    max_positions = reader.positive("max_position_embeddings")
    if family.learned_positions is not None:
        return Rotation(RopeSpec(), 0, max_positions)
    return read_rotation(reader, family, head_dim, max_positions)


def _activation(reader: ConfigReader, family: Family) -> Activation:
    name = reader.get(family.activation_field, str, "silu")
    if name not in ACTIVATIONS:
        raise StartupError(
            f"activation {name!r} ({family.activation_field}) is not supported", f"Supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _bias(reader: ConfigReader, rule: BiasRule) -> bool:
    return rule if isinstance(rule, bool) else reader.get(rule, bool, default=False)


def _embedding_size(reader: ConfigReader, family: Family, hidden_size: int) -> int | None:
    if not family.names.project_in:
        return None
    size = reader.positive("word_embed_proj_dim", hidden_size)
    return None if size == hidden_size else size
