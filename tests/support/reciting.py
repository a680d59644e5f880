"""A checkpoint that recites: each of its tokens is followed by one that was chosen, whatever came before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.text_models import byte_level_json
from tests.support.tool_templates import HERMES

ANSWERED: Final = "<|answered|>"
"""What the template of `save_caller` writes in front of an answer behind a result."""


def save_caller(folder: Path) -> Path:
    """Write a model that calls `add` with 1 and 2 at once, and says so once it has the result."""
    call = (
        "<tool_call>",
        '\n{"name": "add", ',
        '"arguments": {"a": 1',
        ', "b": 2}',
        "}\n",
        "</tool_call>",
        "<|im_end|>",
    )
    said = (ANSWERED, "It is ", "three.", "<|im_end|>")
    end = "{% if messages[-1].role == 'tool' %}" + ANSWERED + "{% endif %}"
    return save_reciting(folder, {"\n": call, ANSWERED: said[1:]}, template=HERMES + end)


def save_reciting(folder: Path, answers: Mapping[str, tuple[str, ...]], *, template: str) -> Path:
    """Write a model with a token for each piece of the answers.

    Args:
        folder: where it lies.
        answers: by the last token of the prompt.
        template: its chat template.
    """
    tokenizer = Tokenizer.from_str(byte_level_json())
    pieces = dict.fromkeys([ANSWERED, *(piece for answer in answers.values() for piece in answer)])
    known = tokenizer.get_vocab()
    added = [AddedToken(piece, special=piece == ANSWERED, normalized=False) for piece in pieces if piece not in known]
    tokenizer.add_tokens(added)
    size = tokenizer.get_vocab_size()
    width = -(-size // 64) * 64
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64, "head_dim": 64}
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        **heads,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if "norm" in name else torch.zeros_like(parameter))
        model.get_input_embeddings().weight.copy_(torch.eye(size, width))
        for first, answer in answers.items():
            before = tokenizer.encode(first, add_special_tokens=False).ids[-1]
            for piece in answer:
                token = tokenizer.encode(piece, add_special_tokens=False).ids[-1]
                model.get_output_embeddings().weight[token, before] = 1.0
                before = token
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
