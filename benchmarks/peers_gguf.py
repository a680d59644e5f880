"""Converts a checkpoint of `benchmarks.peers_model` for llama.cpp; a script by itself that needs gguf and safetensors.

python benchmarks/peers_gguf.py CHECKPOINT float32|bfloat16 OUT.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def target_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{LAYER['.'.join(middle)]}.{kind}"


def interleave(tensor: Any, num_heads: int) -> Any:
    """Return q or k rows in llama.cpp's order for Llama: the two halves of each head's angles alternate."""
    rows = tensor.shape[0]
    return tensor.reshape(num_heads, 2, rows // num_heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_shape(writer: Any, config: dict[str, Any]) -> None:
    """Write what describes the model."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])


def write_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the vocabulary, filled up to the model's size."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    tokens += [f"<unused{i}>" for i in range(len(tokens), vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i < 3 else normal for i in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def main(folder: Path, dtype: str, out: Path) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_llama = config["model_type"] == "llama"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(out, config["model_type"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bfloat16" else gguf.LlamaFileType.ALL_F32)
    write_shape(writer, config)
    write_tokenizer(writer, folder, config["vocab_size"])
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for name, tensor in load_file(folder / "model.safetensors").items():
        projection = name.split(".")[-2]
        if is_llama and projection in heads:
            tensor = interleave(tensor, heads[projection])
        tensor = np.ascontiguousarray(tensor, dtype=np.float32)
        if dtype == "bfloat16" and tensor.ndim == 2:
            writer.add_tensor(target_name(name), gguf.quants.quantize(tensor, bfloat16), raw_dtype=bfloat16)
        else:
            writer.add_tensor(target_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
