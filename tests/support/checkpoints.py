"""Small random checkpoints in Hugging Face format, made by the reference implementation itself."""

from __future__ import annotations

import atexit
import string
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

BOS, EOS, PAD = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
}


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """A random checkpoint. Weights are drawn wide enough for logits whose two best are clearly apart."""

    family: str = "llama"
    vocab_size: int = 384
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_positions: int = 512
    tied: bool = False
    seed: int = 0
    weight_std: float = 0.15
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the configuration."""

    def config(self) -> Any:
        """Return the reference's configuration. OPT has no key heads or head width of its own."""
        heads = {"num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim}
        fields = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "ffn_dim" if self.family == "opt" else "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            **({} if self.family == "opt" else heads),
            **({"sliding_window": None} if self.family == "mistral" else {}),
        }
        return FAMILIES[self.family][0](**{**fields, **self.extra})


def build_model(shape: CheckpointShape) -> PreTrainedModel:
    """Return the reference model in float32: all matrices normal, all biases and norms away from their defaults."""
    model = FAMILIES[shape.family][1](shape.config()).float().eval()
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * shape.weight_std
            if name.endswith("norm.weight") or "layernorm" in name:
                parameter.copy_(1 + noise)
            elif name.endswith("embed_tokens.weight"):
                parameter.copy_(2 * noise)  # small beside what the layers add: else a tied model repeats its input
            else:
                parameter.copy_(noise)
    return model


_STORED: dict[str, tuple[Path, PreTrainedModel]] = {}


def stored_checkpoint(shape: CheckpointShape) -> tuple[Path, PreTrainedModel]:
    """Return a checkpoint's folder, written once per process, and the reference model. Read only."""
    key = repr(shape)
    if key not in _STORED:
        folder = tempfile.TemporaryDirectory(prefix="checkpoint-")
        atexit.register(folder.cleanup)
        _STORED[key] = Path(folder.name), save_checkpoint(Path(folder.name), shape)
    return _STORED[key]


def save_checkpoint(folder: Path, shape: CheckpointShape, *, max_shard_size: str = "5GB") -> PreTrainedModel:
    """Write a checkpoint with its tokenizer and chat template into the folder; return the reference model.

    The vocabulary needs 256 bytes and 3 special tokens at least.
    """
    model = build_model(shape)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    build_tokenizer(shape.vocab_size).save_pretrained(folder)
    return model


def greedy_text(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens by the reference's own `generate`."""
    tokens = reference.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return [int(token) for token in tokens[0, len(prompt) :]]


def difference_from(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return by how much numbers differ at most, in relation to the largest."""
    return float((found - expected).abs().amax() / expected.abs().amax())


def build_tokenizer(vocab_size: int) -> Any:
    """Return a byte-level BPE of exactly `vocab_size` tokens; those above the bytes are pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(("<s>", "</s>", "<pad>", *alphabet))}
    pairs = [(a, b) for a in string.ascii_letters for b in string.ascii_letters]
    merges = pairs[: vocab_size - len(vocab)]
    assert len(vocab) + len(merges) == vocab_size, f"a vocabulary of {vocab_size} is too small or too large"
    vocab.update({a + b: len(vocab) + i for i, (a, b) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
