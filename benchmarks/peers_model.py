"""Random checkpoints that every engine can read, made with transformers, seed 0.

    small        Llama, 25.7 M parameters: hidden 512, 8 layers, 8 heads, 4 KV heads, vocabulary 4096, tied
    medium       Llama, 193 M parameters: hidden 1024, 16 layers, 16 heads, 8 KV heads, vocabulary 4096, tied
    qwen2-0.5b   the shape of Qwen2-0.5B, 494 M parameters: hidden 896, 24 layers, 14 heads, 2 KV heads, tied
    llama3-8b    the shape of Llama 3 8B, 8.03 G parameters: hidden 4096, 32 layers, 32 heads, 8 KV heads, bfloat16

The folder holds float32 weights, unless it says otherwise, a byte-level tokenizer and a chat template. The last one is
made on a GPU, if there is one, and takes 16 GB.

    python -m benchmarks.peers_model small|medium|qwen2-0.5b|llama3-8b DIR
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_ID = 3
"""Ids below are control tokens."""
NUM_TOKENS = 4096
"""Tokens that the tokenizer has; prompts are of these, whatever the model's vocabulary is."""
SPACE = "\u0120"
"""How a byte-level vocabulary writes a space."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """What the engines are given for a shape."""

    memory: str
    """Budget of our worker."""
    kv_gib: int
    """KV of vLLM."""


LIMITS = {"small": ShapeLimits("2GiB", 2), "qwen2-0.5b": ShapeLimits("3500MiB", 1)}
SHAPES = (*LIMITS, "medium", "llama3-8b")


def make_checkpoint(shape: str, folder: Path) -> None:
    """Write the checkpoint, unless the folder has one already."""
    if (folder / "config.json").is_file():
        return
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    is_large = shape == "llama3-8b"
    device = "cuda" if is_large and torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if is_large else torch.float32
    config = _config(shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tokenizer = make_tokenizer()
    with torch.no_grad():  # no greedy answer ever has such a token
        head = model.get_output_embeddings().weight
        head[silent_ids(tokenizer.get_vocab())] = 0
        head[NUM_TOKENS:] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_llama(folder: Path, hidden: int, inner: int, num_layers: int) -> None:
    """Write a random Llama of some size, without a tokenizer: heads of 64, half as many key heads, tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def silent_ids(vocab: dict[str, int]) -> list[int]:
    """Return the tokens that may be no text by themselves: control tokens, and those with a part of a character.

    A server holds such text back, so that times would depend on what is said.
    """
    return sorted(
        index
        for token, index in vocab.items()
        if index < FIRST_ID or not all("!" <= char <= "~" or char == SPACE for char in token)
    )


def _config(shape: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": True}
    if shape in ("small", "medium"):
        scale = 1 if shape == "small" else 2
        return LlamaConfig(
            vocab_size=NUM_TOKENS,
            hidden_size=512 * scale,
            intermediate_size=1408 * scale,
            num_hidden_layers=8 * scale,
            num_attention_heads=8 * scale,
            num_key_value_heads=4 * scale,
            head_dim=64,
            max_position_embeddings=2048 * scale,
            **ids,
        )
    if shape == "llama3-8b":
        return LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            max_position_embeddings=8192,
            **{**ids, "tie_word_embeddings": False},
        )
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        **ids,
    )


def make_tokenizer() -> Any:
    """Return a byte-level BPE of `NUM_TOKENS` tokens: bytes, and pairs of them, letters first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(("<s>", "</s>", "<pad>", *alphabet))}
    letters = [char for char in alphabet if char.isascii() and char.isalpha()]
    pairs = [(a, b) for a in letters for b in letters]
    pairs += [(a, b) for a in alphabet for b in alphabet if not (a in letters and b in letters)]
    merges = pairs[: NUM_TOKENS - len(vocab)]
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = TEMPLATE
    return fast


def main() -> None:
    """Make the checkpoint that the command line names."""
    parser = argparse.ArgumentParser(description="Make a random checkpoint for benchmarks.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    make_checkpoint(chosen.shape, chosen.folder)


if __name__ == "__main__":
    main()
