"""The model's own byte-level BPE tokenizer and its chat template, as a Hugging Face folder.

    python -m tools.demo_model.tokenizer --out demo_model/model

Every text can be encoded, since all 256 bytes are tokens. A plain text gets `<|bos|>` in front; a chat gets it from
the template instead, so a rendered chat is encoded without special tokens being added.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.grammar import sample_conversations

BOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens; their ids are 0 to 4 in this order. `<|end|>` closes every message and is the end of an answer."""

VOCAB_SIZE = 2048
"""Entries, special tokens and bytes included; enough for most of the grammar's words to be one token."""

MAX_MODEL_TOKENS = 1024
"""Context of the model, in tokens."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% elif message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% else %}{{ raise_exception('the roles are system, developer, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""`<|bos|>`, then for each message its role's token, the text, and `<|end|>`."""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on some texts; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=MAX_MODEL_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def train_on_grammar(count: int = 6000) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on conversations of the grammar."""
    conversations = sample_conversations(seed=0, count=count)
    return train_tokenizer([message["content"] for chat in conversations for message in chat.messages])


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    # the class has this name in every release of transformers; the newest writes an alias that older ones lack
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train the tokenizer and write it."""
    parser = argparse.ArgumentParser(description="train the demo model's tokenizer")
    parser.add_argument("--out", type=Path, default=Path("demo_model/model"))
    save(train_on_grammar(), parser.parse_args().out)


if __name__ == "__main__":
    main()
