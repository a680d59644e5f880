"""Mirrors of the structures in `src/model.h`, field by field. Their layout is part of the library's ABI number."""

from __future__ import annotations

import ctypes

ABI = 6
"""`kAbi` of src/model.h."""

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class LayerArgs(ctypes.Structure):
    """One layer's parameters and pools."""

    _fields_ = [
        ("attention_norm", _PTR),
        ("attention_norm_bias", _PTR),
        ("qkv", _PTR),
        ("qkv_bias", _PTR),
        ("q_norm", _PTR),
        ("k_norm", _PTR),
        ("output", _PTR),
        ("output_bias", _PTR),
        ("mlp_norm", _PTR),
        ("mlp_norm_bias", _PTR),
        ("up", _PTR),
        ("up_bias", _PTR),
        ("down", _PTR),
        ("down_bias", _PTR),
        ("keys", _PTR),
        ("values", _PTR),
        ("window", _I64),
    ]


class ModelArgs(ctypes.Structure):
    """A model: sizes, parameters outside the layers, and its layers."""

    _fields_ = [
        ("is_bf16", _I32),
        ("layer_norm", _I32),
        ("activation", _I32),
        ("gated", _I32),
        ("hidden", _I64),
        ("inner", _I64),
        ("vocab", _I64),
        ("num_layers", _I64),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("rotary_dim", _I64),
        ("block_size", _I64),
        ("num_blocks", _I64),
        ("num_positions", _I64),
        ("norm_eps", _F32),
        ("scale", _F32),
        ("embedding", _PTR),
        ("position_embedding", _PTR),
        ("norm", _PTR),
        ("norm_bias", _PTR),
        ("head", _PTR),
        ("head_bias", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("layers", ctypes.POINTER(LayerArgs)),
    ]


class RowsArgs(ctypes.Structure):
    """The rows of one step."""

    _fields_ = [
        ("num_rows", _I64),
        ("num_tokens", _I64),
        ("row_tokens", _PTR),
        ("row_start", _PTR),
        ("row_table", _PTR),
        ("tables", _PTR),
        ("table_stride", _I64),
    ]


PARTS = ("embed", "norms", "qkv", "rotate, store", "attention", "output", "mlp up", "mlp down", "gather", "head")
"""Names of `enum Part`."""


FAR_CALL = ctypes.CFUNCTYPE(_I32, _I64)
"""Called with a layer, by the thread that called the library; 0: it went well."""


class FarArgs(ctypes.Structure):
    """Rows some of whose keys lie elsewhere."""

    _fields_ = [
        ("row_state", _PTR),
        ("row_first", _PTR),
        ("row_end", _PTR),
        ("states", _PTR),
        ("ask", FAR_CALL),
        ("take", FAR_CALL),
    ]


class StepArgs(ctypes.Structure):
    """One step through some layers."""

    _fields_ = [
        ("rows", RowsArgs),
        ("num_threads", _I32),
        ("embed", _I32),
        ("first_layer", _I64),
        ("last_layer", _I64),
        ("tokens", _PTR),
        ("hidden", _PTR),
        ("normed", _PTR),
        ("heads", _PTR),
        ("attended", _PTR),
        ("inner", _PTR),
        ("finite", _PTR),
        ("num_sampled", _I64),
        ("sampled", _PTR),
        ("logits", _PTR),
        ("largest", _PTR),
        ("seconds", _PTR),
        ("far", ctypes.POINTER(FarArgs)),
    ]


class AttendArgs(ctypes.Structure):
    """Attention by itself."""

    _fields_ = [
        ("rows", RowsArgs),
        ("num_threads", _I32),
        ("is_bf16", _I32),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("head_dim", _I64),
        ("block_size", _I64),
        ("window", _I64),
        ("scale", _F32),
        ("any_head_dim", _I32),
        ("keys", _PTR),
        ("values", _PTR),
        ("queries", _PTR),
        ("query_stride", _I64),
        ("out", _PTR),
        ("row_first", _PTR),
        ("row_end", _PTR),
        ("row_state", _PTR),
        ("states", _PTR),
    ]
