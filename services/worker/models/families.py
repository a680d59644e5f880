"""What differs between decoders of one family and the next, as data: the decoder itself is written once.

A family that is not here is refused by name. Adding one means adding an entry and an oracle test against its reference.
Defaults of absent fields: `shared/model_families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BiasRule = bool | str
"""True or False, or the field of config.json that says so."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a checkpoint's tensors, without `.weight` and `.bias`; those of a layer follow `layers` and its number.

    Several names for one part: the decoder stacks them by rows. One name where others have several: the checkpoint
    holds them stacked in the same order.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    """Table of learned positions."""
    project_in: str = ""
    """From the embedding's width to the hidden states'."""
    project_out: str = ""
    """Back, before the head."""
    last_norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: where its configuration departs from plain Llama."""

    model_type: str
    """`model_type` of config.json."""
    qkv_bias: BiasRule
    """Bias of the query, key and value projections."""
    output_bias: BiasRule
    """Bias of the attention's output projection."""
    mlp_bias: BiasRule
    """Bias of the MLP's projections."""
    head_norm: bool = False
    """RMS norm over each query and key head before the rotary embedding."""
    window: Literal["none", "all", "switched"] = "none"
    """`sliding_window`: not looked at, of all layers, or of some if `use_sliding_window` says so."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` counts; else anything but 1 is refused."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """Names that this family gave to kinds of rotary embedding that have another one now."""
    published_with_code: bool = False
    """Its published checkpoints name Python files (`auto_map`) that are the same as the reference's; not read here."""
    norm_kind: Literal["rms", "layer"] = "rms"
    gated_mlp: bool = True
    learned_positions: int | None = None
    """Rows of the table of learned positions before that of position 0; None: rotary embedding."""
    inner_field: str = "intermediate_size"
    """Field with the MLP's width."""
    activation_field: str = "hidden_act"
    names: TensorNames = field(default_factory=TensorNames)


_OPT_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    last_norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        window="all",
    ),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, output_bias=False, mlp_bias=False, window="switched"),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "attention_bias",
        "attention_bias",
        mlp_bias=False,
        head_norm=True,
        window="switched",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        window="all",
        partial_rotary=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        published_with_code=True,
        names=TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    ),
    "OPTForCausalLM": Family(
        "opt",
        "enable_bias",
        "enable_bias",
        "enable_bias",
        norm_kind="layer",
        gated_mlp=False,
        learned_positions=2,
        inner_field="ffn_dim",
        activation_field="activation_function",
        names=_OPT_NAMES,
    ),
}
