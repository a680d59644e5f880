"""Mirrors of the structures in `src/model.h`, field by field. Their layout is part of the library's ABI number."""

from __future__ import annotations

import ctypes

ABI = 6
"""`kAbi` of src/model.h."""

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _all(kind: type, *names: str) -> list[tuple[str, type]]:
    """Return fields that follow each other and are of one type."""
    return [(name, kind) for name in names]


class LayerArgs(ctypes.Structure):
    """One layer's parameters and pools."""

    _fields_ = [
        *_all(_PTR, "attention_norm", "attention_norm_bias", "qkv", "qkv_bias", "q_norm", "k_norm"),
        *_all(_PTR, "output", "output_bias", "mlp_norm", "mlp_norm_bias", "up", "up_bias", "down", "down_bias"),
        *_all(_PTR, "keys", "values"),
        ("window", _I64),
    ]


class ModelArgs(ctypes.Structure):
    """A model: sizes, parameters outside the layers, and its layers."""

    _fields_ = [
        *_all(_I32, "is_bf16", "layer_norm", "activation", "gated"),
        *_all(_I64, "hidden", "inner", "vocab", "num_layers", "heads", "kv_heads", "head_dim", "rotary_dim"),
        *_all(_I64, "block_size", "num_blocks", "num_positions"),
        *_all(_F32, "norm_eps", "scale"),
        *_all(_PTR, "embedding", "position_embedding", "norm", "norm_bias", "head", "head_bias"),
        *_all(_PTR, "cos", "sin"),
        ("layers", ctypes.POINTER(LayerArgs)),
    ]


class RowsArgs(ctypes.Structure):
    """The rows of one step."""

    _fields_ = [
        *_all(_I64, "num_rows", "num_tokens"),
        *_all(_PTR, "row_tokens", "row_start", "row_table", "tables"),
        ("table_stride", _I64),
    ]


PARTS = ("embed", "norms", "qkv", "rotate, store", "attention", "output", "mlp up", "mlp down", "gather", "head")
"""Names of `enum Part`."""


FAR_CALL = ctypes.CFUNCTYPE(_I32, _I64)
"""Called with a layer, by the thread that called the library; 0: it went well."""


class FarArgs(ctypes.Structure):
    """Rows some of whose keys lie elsewhere."""

    _fields_ = [
        *_all(_PTR, "row_state", "row_first", "row_end", "states"),
        *_all(FAR_CALL, "ask", "take"),
    ]


class StepArgs(ctypes.Structure):
    """One step through some layers."""

    _fields_ = [
        ("rows", RowsArgs),
        *_all(_I32, "num_threads", "embed"),
        *_all(_I64, "first_layer", "last_layer"),
        *_all(_PTR, "tokens", "hidden", "normed", "heads", "attended", "inner", "finite"),
        ("num_sampled", _I64),
        *_all(_PTR, "sampled", "logits", "largest", "seconds"),
        ("far", ctypes.POINTER(FarArgs)),
    ]


class AttendArgs(ctypes.Structure):
    """Attention by itself."""

    _fields_ = [
        ("rows", RowsArgs),
        *_all(_I32, "num_threads", "is_bf16"),
        *_all(_I64, "heads", "kv_heads", "head_dim", "block_size", "window"),
        ("scale", _F32),
        ("any_head_dim", _I32),
        *_all(_PTR, "keys", "values", "queries"),
        ("query_stride", _I64),
        *_all(_PTR, "out", "row_first", "row_end", "row_state", "states"),
    ]
