"""Tokenizers that know more than the model: what they make of a text has ids of the model, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from services.dispatcher.build import load_text
from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec, UntokenizableError
from shared.errors import StartupError
from tests.support.dispatchers import make_settings
from tests.support.text_models import CHATML, byte_level_json, sentencepiece_json, write_model_folder

FAR = ("<extra>", "<|pad|>", "<tool_far>")
TEXTS = st.lists(st.sampled_from([*FAR, "<|im_end|>", "<tool>", "</s>", "<", ">", " ", "é", "好", "fox"]), max_size=8)
KINDS: dict[str, Callable[[], str]] = {"byte level": byte_level_json, "sentencepiece": sentencepiece_json}


def with_far_tokens(source: str) -> tuple[str, int]:
    """Return the tokenizer with three more tokens, one of them special, and the ids of the model: those before."""
    tokenizer = Tokenizer.from_str(source)
    num_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_tokens([AddedToken(FAR[0], special=False), AddedToken(FAR[2], special=False, normalized=False)])
    tokenizer.add_special_tokens([FAR[1]])
    return str(tokenizer.to_str()), num_ids


def codec_of(folder: Path, source: str, num_ids: int, template: str | None = CHATML) -> PromptCodec:
    return PromptCodec(
        read_model_folder(write_model_folder(folder, source, template=template, config={"vocab_size": num_ids}))
    )


@pytest.fixture(scope="module", params=list(KINDS))
def codecs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PromptCodec, PromptCodec]:
    """One whose tokenizer has tokens beyond the model, and the same without them."""
    plain = KINDS[request.param]()
    source, num_ids = with_far_tokens(plain)
    far, near = tmp_path_factory.mktemp("far"), tmp_path_factory.mktemp("near")
    return codec_of(far, source, num_ids), codec_of(near, plain, num_ids)


@given(TEXTS.map("".join), st.sampled_from(["user", "assistant", "system"]))
@settings(max_examples=150, deadline=None)
def test_added_tokens_beyond_the_model_are_plain_text(
    codecs: tuple[PromptCodec, PromptCodec], text: str, role: str
) -> None:
    """Oracle: the same tokenizer to which they were never added."""
    codec, plain = codecs
    messages = [{"role": role, "content": text}]
    assert codec.encode_text(text) == plain.encode_text(text)
    assert codec.encode_chat(messages) == plain.encode_chat(messages)
    assert max(codec.encode_text(text + "a")) < codec.vocab_size


def test_the_start_says_which_tokens_are_plain_text(tmp_path: Path) -> None:
    source, num_ids = with_far_tokens(byte_level_json())
    folder = write_model_folder(tmp_path, source, config={"vocab_size": num_ids})
    with capture_logs() as logs:
        text = load_text(make_settings(folder))
    assert text.codec.unknown_tokens == set(FAR)
    (said,) = [entry for entry in logs if entry["event"] == "tokens_without_ids"]
    assert (said["log_level"], said["count"], said["first"], said["num_ids"]) == ("warning", 3, "<extra>", num_ids)
    write_model_folder(tmp_path, source, config={"vocab_size": num_ids + 3})
    with capture_logs() as logs:
        load_text(make_settings(folder))
    assert logs == []
    write_model_folder(tmp_path, source, config={"vocab_size": 300})
    with capture_logs() as logs:
        load_text(make_settings(folder))
    assert [entry["event"] for entry in logs] == ["tokens_without_ids", "vocabulary_beyond_the_model"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}<|pad|>",
        "{{ bos_token }}{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|pad|>{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}<|pad|>{% endif %}{{ messages[0].content }}",
        "{% if not add_generation_prompt %}<|pad|>{% endif %}{{ messages[0].content }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}<|pad|>",
    ],
)
def test_a_template_that_writes_one_is_refused_at_the_start(tmp_path: Path, template: str) -> None:
    source, num_ids = with_far_tokens(byte_level_json())
    folder = write_model_folder(tmp_path, source, template=template, config={"vocab_size": num_ids})
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "bos_token": "<|pad|>"}))
    with pytest.raises(StartupError, match=r"template writes '<\|pad\|>', whose id the model does not have \(0 to"):
        PromptCodec(read_model_folder(folder))


def test_a_template_that_could_write_one_of_which_it_is_never_asked_is_taken(tmp_path: Path) -> None:
    source, num_ids = with_far_tokens(byte_level_json())
    codec = codec_of(tmp_path, source, num_ids, "{{ messages[0].content }}{% if tools %}<tool_far>{% endif %}")
    assert codec.decode(codec.encode_chat([{"role": "user", "content": "<tool_far>"}])) == "<tool_far>"


def test_a_tokenizer_that_puts_one_before_every_prompt_is_refused_at_the_start(tmp_path: Path) -> None:
    content = json.loads(sentencepiece_json())
    content["post_processor"]["special_tokens"]["<s>"]["ids"] = [5000]
    with pytest.raises(StartupError, match="puts id 5000 around every prompt, and the model has 0 to"):
        codec_of(tmp_path, json.dumps(content), 300)


def test_a_piece_of_the_vocabulary_beyond_the_model_is_refused_with_its_text(tmp_path: Path) -> None:
    source = byte_level_json()
    largest = int(Tokenizer.from_str(source).token_to_id("Ġfox") or 0)
    codec = codec_of(tmp_path, source, largest, None)
    assert max(codec.encode_text("xyz")) < largest
    with pytest.raises(UntokenizableError, match=rf"'\S+' in it has id \d+, and the model 0 to {largest - 1}"):
        codec.encode_text("a fox")


def test_a_text_on_which_the_tokenizer_fails_is_refused(tmp_path: Path) -> None:
    """A vocabulary without a token for an unknown character, though it names one."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    for first in "ac":  # no text of ours is one of the tokenizer's
        content["model"]["vocab"] = {first: 0, "b": 1}
        codec = codec_of(tmp_path, json.dumps(content), 2, None)
        assert codec.encode_text(f"{first}b") == [0, 1]
        with pytest.raises(UntokenizableError, match="the tokenizer fails on it"):
            codec.encode_text("abc")
    content["model"]["vocab"] = {}
    with pytest.raises(StartupError, match="the tokenizer's vocabulary is empty"):
        codec_of(tmp_path, json.dumps(content), 2, None)
