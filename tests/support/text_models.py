"""Small tokenizers of each supported kind, and a model folder made of them; trained in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKER = (
    CHATML.removesuffix("{% endif %}") + "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Has thinking switched off by an empty thought."""
OPENER = (
    CHATML.removesuffix("{% endif %}")
    + "{% if thinking %}{{ '<think>\n' }}{% else %}{{ '</think>' }}{% endif %}{% endif %}"
)
"""Begins the thought in the prompt, or says that there is none."""
SILENT_OPENER = OPENER.replace("{{ '</think>' }}", "{# </think> #}")
"""Begins the thought in the prompt, or says nothing of it."""
CORPUS = [
    "Once upon a time a little fox lived in the woods, and every day the fox went down to the river.",
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "system user assistant: Hello, world! How are you today?",
    "Zażółć gęślą jaźń; naïve café; 你好，世界; привет",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_json() -> str:
    """A byte-level BPE with special tokens, one non-special added token, and ids for all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return str(tokenizer.to_str())


def thinking_json(*, special: bool = False) -> str:
    """The same tokenizer with a token for each think tag."""
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")])
    return str(tokenizer.to_str())


SPACES = ("legacy", "first", "always", "never", "none")
"""How sentencepiece-like tokenizers put a space before a text: Llama 2's files, Metaspace's three schemes, Gemma's."""


def sentencepiece_json(spaces: str = "legacy", added: Sequence[AddedToken | str] = ("<unk>", "<s>", "</s>")) -> str:
    """A BPE in the manner of Llama 2: `▁` for spaces, byte fallback, a BOS in front of every prompt.

    Args:
        spaces: one of `SPACES`.
        added: its added tokens; a text is a special one.
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    words = ["▁", "▁the", "▁fox", *"thefox", "th", "the", "fo", "fox", *"é好你as/"]
    vocab = {token: i for i, token in enumerate([*tokens, *words])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    strip = [decoders.Strip(" ", 1, 0)]
    if spaces == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif spaces == "none":
        tokenizer.normalizer, strip = normalizers.Replace(" ", "▁"), []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
        strip = [] if spaces == "never" else strip
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for token in added:
        tokenizer.add_tokens([token if isinstance(token, AddedToken) else AddedToken(token, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return str(tokenizer.to_str())


@cache
def metaspace_json() -> str:
    """A unigram model with the Metaspace decoder, whose vocabulary holds the special tokens as pieces."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "▁fox", "t", "h", "e", "f", "o", "x", "é", "<", "/", "s", ">", "好"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(tokenizer.to_str())


def write_model_folder(
    folder: Path,
    tokenizer_json: str | None = None,
    *,
    template: str | None = CHATML,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write what the dispatcher reads of a model (no weights) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    source = tokenizer_json or byte_level_json()
    (folder / "tokenizer.json").write_text(source, encoding="utf-8")
    size = Tokenizer.from_str(source).get_vocab_size(with_added_tokens=True)
    facts = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": size, **(config or {})}
    (folder / "config.json").write_text(json.dumps(facts))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
