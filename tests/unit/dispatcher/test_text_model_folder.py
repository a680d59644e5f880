"""Which file of a model's folder says what, where several do; the oracle is transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from shared.errors import StartupError
from tests.support.text_models import byte_level_json, write_model_folder

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{{ eos_token }}{% endfor %}"
TURN, CALL = 421, 422
"""Ids after those of the tokenizer: a control token, and one that is not special."""


def flags(token: str, *, special: bool, **others: bool) -> dict[str, Any]:
    return {"content": token, "special": special, "normalized": False, **others}


DECODER = {str(TURN): flags("<|turn|>", special=True), str(CALL): flags("<call>", special=False, lstrip=True)}
PLAIN = byte_level_json()
NOT_SPECIAL = PLAIN.replace('"special":true', '"special":false')
assert NOT_SPECIAL != PLAIN


def write(folder: Path, source: str = PLAIN, **files: Any) -> Path:
    """Write a model's folder; `files` are contents by name without `.json`."""
    files.setdefault("tokenizer_config", {"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    write_model_folder(folder, source, config={"vocab_size": 500})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def with_turn(**flag: bool) -> str:
    tokenizer = Tokenizer.from_str(PLAIN)
    tokenizer.add_tokens([AddedToken("<|turn|>", **{"special": False, "normalized": False, **flag})])
    return str(tokenizer.to_str())


CONFIG = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "only in added_tokens_decoder": (PLAIN, {"tokenizer_config": {**CONFIG, "added_tokens_decoder": DECODER}}),
    "only in added_tokens.json": (PLAIN, {"added_tokens": {"<call>": CALL, "<|turn|>": TURN}}),
    "special by extra_special_tokens": (
        PLAIN,
        {"added_tokens": {"<|turn|>": TURN}, "tokenizer_config": {**CONFIG, "extra_special_tokens": ["<|turn|>"]}},
    ),
    "special by an object": (
        PLAIN,
        {
            "added_tokens": {"<|turn|>": TURN},
            "tokenizer_config": {**CONFIG, "extra_special_tokens": {"turn_token": "<|turn|>"}},
        },
    ),
    "special by additional_special_tokens": (
        PLAIN,
        {"added_tokens": {"<|turn|>": TURN}, "tokenizer_config": {**CONFIG, "additional_special_tokens": ["<|turn|>"]}},
    ),
    "special in the decoder only": (
        with_turn(),
        {"tokenizer_config": {**CONFIG, "added_tokens_decoder": {str(TURN): flags("<|turn|>", special=True)}}},
    ),
    "other flags in the decoder": (
        with_turn(special=True),
        {"tokenizer_config": {**CONFIG, "added_tokens_decoder": {str(TURN): {**DECODER[str(TURN)], "lstrip": True}}}},
    ),
    "flags of tokenizer.json beside added_tokens.json": (
        with_turn(special=True, lstrip=True),
        {"added_tokens": {"<|turn|>": TURN}},
    ),
    "none special in tokenizer.json": (
        NOT_SPECIAL,
        {
            "tokenizer_config": {
                **CONFIG,
                "added_tokens_decoder": {
                    "1": flags("<|im_start|>", special=True),
                    "2": flags("<|im_end|>", special=True),
                },
            }
        },
    ),
    "a map beside": (PLAIN, {"special_tokens_map": {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}}),
    "a map beside a decoder": (
        PLAIN,
        {
            "special_tokens_map": {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"},
            "tokenizer_config": {**CONFIG, "added_tokens_decoder": {}},
        },
    ),
    "templates as an object": (
        PLAIN,
        {"tokenizer_config": {**CONFIG, "chat_template": {"tool_use": "x", "default": TEMPLATE + "!"}}},
    ),
    "templates as a list": (
        PLAIN,
        {"tokenizer_config": {**CONFIG, "chat_template": [{"name": "default", "template": TEMPLATE + "!"}]}},
    ),
}


def check_against_transformers(folder: Path) -> PromptCodec:
    """Compare the ids of a conversation, and which tokens have no text."""
    codec, reference = PromptCodec(read_model_folder(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": "the fox "}, {"role": "assistant", "content": "the  quick fox"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert codec.encode_chat(messages) == list(expected)
    for token_id in range(len(reference)):
        assert codec.decode([token_id], skip_special_tokens=True) == reference.decode(
            [token_id], skip_special_tokens=True
        )
    return codec


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_and_templates_are_those_that_transformers_finds(tmp_path: Path, name: str) -> None:
    source, files = FOLDERS[name]
    codec = check_against_transformers(write(tmp_path, source, **files))
    control = {token_id for token_id, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    for text in ("<|turn|>", "<|im_end|>", "<|im_start|>" if source is NOT_SPECIAL else ""):
        assert control.isdisjoint(codec.encode_text(f"a {text} b"))
        assert TURN not in codec.encode_text(f"a{text}b")


@pytest.mark.parametrize("beside", [False, True])
def test_a_template_of_its_own_folder_is_found_as_transformers_finds_it(tmp_path: Path, beside: bool) -> None:
    folder = write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text(TEMPLATE + "1")
    (folder / "additional_chat_templates" / "other.jinja").write_text("other")
    if beside:
        (folder / "chat_template.jinja").write_text(TEMPLATE + "2")
    check_against_transformers(folder)
    found = read_model_folder(folder)
    assert (found.template, found.template_path) == (
        TEMPLATE + "1",
        folder / "additional_chat_templates" / "default.jinja",
    )


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"<|turn|>": 450}},
        {"added_tokens": {"<tool>": 421}},
        {"tokenizer_config": {"added_tokens_decoder": {"450": flags("<|turn|>", special=True)}}},
        {"tokenizer_config": {"added_tokens_decoder": {"1": flags("<|im_end|>", special=True)}}},
    ],
)
def test_ids_that_disagree_with_tokenizer_json_are_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"the added token '<\S+>' would have id \d+ by tokenizer.json, and \d+ by"):
        PromptCodec(read_model_folder(write(tmp_path, **files)))


@pytest.mark.parametrize("decoder", [None, [], {"x": flags("<a>", special=True)}, {"5": "<a>"}, {"5": {"content": 5}}])
def test_added_tokens_that_are_none_are_refused(tmp_path: Path, decoder: object) -> None:
    folder = write(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(StartupError, match=r"the added tokens in .*tokenizer_config\.json cannot be read"):
        read_model_folder(folder)


def test_added_tokens_beside_tokenizer_json_that_the_model_has_not_are_plain_text(tmp_path: Path) -> None:
    facts = {"vocab_size": TURN}
    folder = write(tmp_path, added_tokens={"<|turn|>": TURN}, config=facts, tokenizer_config={})
    codec = PromptCodec(read_model_folder(folder))
    assert codec.unknown_tokens == {"<|turn|>"}
    assert max(codec.encode_text("<|turn|>")) < TURN
