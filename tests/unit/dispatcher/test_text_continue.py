"""A last message that is continued: transformers' ids, no control token of a user's, and the thinking that it is in."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import TemplateRefusalError
from services.dispatcher.text.thinking import ThinkSplitter, ThinkStage, ThinkTags, find_think_tags
from tests.support.text_models import CHATML, OPENER, THINKER, thinking_json, write_model_folder

PARTS: Final = "{% for part in message.content %}{{ part.text }}{% endfor %}"
SHORTENED: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% set said = message.content %}"
    "{% if '</think>' in said %}{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ said }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves thoughts out, as those of Qwen3 and DeepSeek do."""
TEMPLATES: Final = {
    "trimmed": CHATML,
    "as it is": CHATML.replace(" | trim", ""),
    "thinker": THINKER,
    "opener": OPENER,
    "shortened": SHORTENED,
    "parts": "{% for message in messages %}<|im_start|>" + PARTS + "<|im_end|>\n{% endfor %}",
    "quoted": "{% for message in messages %}{{ message.content | tojson }}<|im_end|>{% endfor %}",
}
SAID: Final = st.text(" \nab<é", max_size=12) | st.lists(
    st.sampled_from(["<think>", "</think>", "\n", " ", "a", "fox"]), max_size=6
).map("".join)
ROLES: Final = st.sampled_from(["system", "user", "assistant"])
TALKS: Final = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(" \nabé", max_size=9)}), max_size=3)


@cache
def codec_of(name: str) -> tuple[PromptCodec, Any]:
    """Return the codec of a model with this template, and transformers' tokenizer of the same."""
    with TemporaryDirectory() as folder:
        written = write_model_folder(Path(folder), thinking_json(), template=TEMPLATES[name])
        return PromptCodec(read_model_folder(written)), PreTrainedTokenizerFast.from_pretrained(written)


def continued(name: str, *messages: dict[str, Any]) -> list[int]:
    return codec_of(name)[0].encode_chat(messages, add_generation_prompt=False, continues_last=True)


def reference(name: str, *messages: dict[str, Any]) -> list[int]:
    codec, tokenizer = codec_of(name)
    assert codec.template is not None
    formed = codec.template.in_form(messages, add_generation_prompt=False)
    encoded = tokenizer.apply_chat_template(formed, continue_final_message=True, return_dict=True)
    return list(encoded["input_ids"])


@pytest.mark.parametrize("name", TEMPLATES)
@given(TALKS, SAID)
@settings(max_examples=60, deadline=None)
def test_the_ids_are_transformers_or_both_refuse(name: str, talk: list[dict[str, Any]], said: str) -> None:
    messages = [*talk, {"role": "assistant", "content": said}]
    try:
        expected = reference(name, *messages)
    except (ValueError, TemplateRefusalError):
        with pytest.raises(TemplateRefusalError):
            continued(name, *messages)
        return
    assert continued(name, *messages) == expected


def test_a_message_in_parts_ends_with_its_last_one() -> None:
    parts = [{"type": "text", "text": text} for text in ("one ", "two ")]
    message = {"role": "assistant", "content": parts}
    for name in ("trimmed", "as it is", "parts"):
        assert continued(name, message) == reference(name, message)


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "fox", " ", "\n"]), max_size=6).map("".join))
@settings(max_examples=60, deadline=None)
def test_what_was_written_never_becomes_a_control_token(said: str) -> None:
    """The only control tokens are those around the messages before, and the one that opens the last."""
    codec, _ = codec_of("as it is")
    ids = continued("as it is", {"role": "user", "content": said}, {"role": "assistant", "content": said})
    names = codec.tokens_of(ids)
    assert [name for name in names if name.startswith("<|im_")] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert codec.decode(ids) == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n{said}"


def test_a_message_that_the_template_changes_is_refused() -> None:
    message = {"role": "assistant", "content": "<think>a</think>b"}
    with pytest.raises(TemplateRefusalError, match="changes what the last message says"):
        continued("shortened", message)
    assert codec_of("trimmed")[0].decode(continued("trimmed", message)).endswith("<think>a</think>b")


def tags(at_start: ThinkStage = ThinkStage.UNDECIDED) -> ThinkTags:
    return ThinkTags(None, None, at_start, lambda token_id: bytes([token_id]))


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("The fox", ThinkStage.SPEAKING),
        ("<thi", ThinkStage.SPEAKING),
        ("say <think>", ThinkStage.SPEAKING),
        ("<think>", ThinkStage.BEGUN),
        ("\n<think>\n", ThinkStage.BEGUN),
        ("<think>\nHm", ThinkStage.THINKING),
        ("<think>\nHm</think>\n", ThinkStage.CLOSED),
        ("<think>\nHm</think>\n\nThe", ThinkStage.SPEAKING),
    ],
)
@pytest.mark.parametrize("at_start", [ThinkStage.UNDECIDED, ThinkStage.OPENED])
def test_an_answer_goes_on_in_the_part_in_which_its_message_ends(
    text: str, stage: ThinkStage, at_start: ThinkStage
) -> None:
    assert tags(at_start).stage_within(text, b"") is stage


@pytest.mark.parametrize("at_start", [ThinkStage.UNDECIDED, ThinkStage.OPENED])
def test_where_nothing_was_said_yet_the_prompt_s_end_counts(at_start: ThinkStage) -> None:
    for end, stage in ((b"x", at_start), (b"x<think>\n", ThinkStage.OPENED), (b"</think>\n", ThinkStage.SPEAKING)):
        assert tags(at_start).stage_within(" \n", end) is stage


@given(SAID.filter(str.strip), st.lists(st.sampled_from(["</think>", "\n", " ", "a", "fox"]), max_size=5).map("".join))
@settings(max_examples=200)
def test_message_and_answer_together_have_the_parts_of_both(said: str, answer: str) -> None:
    whole, before, after = (ThinkSplitter(tags(), ThinkStage.UNDECIDED) for _ in range(3))
    after = ThinkSplitter(tags(), tags().stage_within(said, b""))
    parts = []
    for splitter, text in ((whole, said + answer), (before, said), (after, answer)):
        (thought, spoken), (more, rest) = splitter.push(text), splitter.flush()
        parts.append(((thought + more).split(), (spoken + rest).split()))
    for part in (0, 1):
        assert "".join(parts[0][part]) == "".join(parts[1][part] + parts[2][part])


@pytest.mark.parametrize(
    ("said", "is_open"), [("<think>a", True), ("<think>", True), ("a", None), ("<think>a</think>", None), ("", False)]
)
def test_a_worker_is_told_where_an_answer_goes_on(said: str, is_open: bool | None) -> None:
    codec, _ = codec_of("thinker")
    found = find_think_tags("qwen3", codec)
    assert found is not None
    ids = continued("thinker", {"role": "assistant", "content": said})
    told = found.thinking(found.stage_within(said, ids), None)
    assert (told.is_open if told is not None else None) is is_open
