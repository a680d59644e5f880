"""The model's own byte-level BPE tokenizer and its chat template, as a Hugging Face folder.

    python -m tools.demo_model.tokenizer --out demo_model/model

Every text can be encoded, since all 256 bytes are tokens. A plain text gets `<|bos|>` in front; a chat gets it from
the template instead, so a rendered chat is encoded without special tokens being added.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_model.forms import CALL, CALL_END, THINK, THINK_END
from tools.demo_model.grammar import sample_conversations

BOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens; their ids are 0 to 4 in this order. `<|end|>` closes every message and is the end of an answer."""

TOOL = "<|tool|>"
"""Special token of a tool's messages."""

TAGS = (THINK, THINK_END, CALL, CALL_END)
"""Tokens of what an answer consists of, besides text; as in Qwen3 they are not special."""

VOCAB_SIZE = 2048
"""Entries, special tokens, tags and bytes included; enough for most of the grammar's words to be one token.

The tool's token and the tags are the last ones, and no texts of the forms are trained on: so the ids of all others are
what they were before there were forms, and five rare pieces of words gave way.
"""

MAX_MODEL_TOKENS = 1024
"""Context of the model, in tokens."""

MAX_TOOLS_CHARS = 200
"""Characters of tools' names after which no more are written, except for `add`."""

_TOOLS = (
    "{% set shown = namespace(tools='') %}"
    "{% for tool in tools or [] %}{% set function = tool['function'] %}"
    "{% set names = ((function['parameters'] or {})['properties'] or {}) | list %}"
    "{% set is_add = function['name'] == 'add' and names | length == 2 %}"
    f"{{% if is_add or shown.tools | length < {MAX_TOOLS_CHARS} %}}"
    "{% set shown.tools = shown.tools + (', ' if shown.tools else 'Tools: ') + function['name'] %}"
    "{% if is_add %}{% set shown.tools = shown.tools + '(' + names | join(', ') + ')' %}{% endif %}"
    "{% endif %}{% endfor %}"
)

_CALLS = (
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}{% set function = call['function'] or call %}"
    "{{ '\\n' if text or not loop.first else '' }}"
    """{{ '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}"""
    "{% if function['arguments'] is string %}{{ function['arguments'] }}"
    "{% else %}{{ function['arguments'] | tojson }}{% endif %}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}{% endif %}"
)

CHAT_TEMPLATE = (
    "{{ bos_token }}" + _TOOLS + "{% set has_system = messages and messages[0]['role'] in ['system', 'developer'] %}"
    "{% if shown.tools and not has_system %}{{ '<|system|>' + shown.tools + '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% set text = (message['content'] or '') | trim %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + text }}"
    "{% elif message['role'] == 'assistant' %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|assistant|>' + text }}" + _CALLS + "{% elif message['role'] == 'tool' %}{{ '<|tool|>' + text }}"
    "{% elif message['role'] in ['system', 'developer'] %}{{ '<|system|>' + text }}"
    "{% if loop.first and shown.tools %}{{ ('\\n\\n' if text else '') + shown.tools }}{% endif %}"
    "{% else %}"
    "{{ raise_exception('the roles are system, developer, user, assistant and tool, not ' + message['role']) }}"
    "{% endif %}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + ('<think>\\n' if enable_thinking else '') }}{% endif %}"
)
"""`<|bos|>`, then for each message its role's token, the text, and `<|end|>`.

Tools stand at the end of the system's message by their names alone, but for `add`, of which the parameters are named
too. The thinking is opened for the model if `enable_thinking` is true; what it has thought before is left out.
"""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on some texts; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS) - 1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([TOOL])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, TOOL],
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
