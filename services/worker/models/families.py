"""What differs between decoders of one family and the next, as data: the decoder itself is written once.

A family that is not here is refused by name. Adding one means adding an entry and an oracle test against its reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BiasRule = bool | Literal["attention_bias"]
"""True or False, or the field of config.json that says so."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: where its configuration departs from plain Llama."""

    model_type: str
    """`model_type` of config.json."""
    qkv_bias: BiasRule
    """Bias of the query, key and value projections."""
    output_bias: BiasRule
    """Bias of the attention's output projection."""
    reads_mlp_bias: bool
    """Whether `mlp_bias` of config.json counts; else the MLP has no bias."""
    head_norm: bool = False
    """RMS norm over each query and key head before the rotary embedding."""
    window_switch: str | None = None
    """Field without which a `sliding_window` in config.json has no effect; None: a window always has one."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", "attention_bias", "attention_bias", reads_mlp_bias=True),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, output_bias=False, reads_mlp_bias=False),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, output_bias=False, reads_mlp_bias=False, window_switch="use_sliding_window"
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "attention_bias",
        "attention_bias",
        reads_mlp_bias=False,
        head_norm=True,
        window_switch="use_sliding_window",
    ),
}
