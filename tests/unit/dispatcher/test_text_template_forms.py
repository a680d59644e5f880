"""What a client sends is in the prompt, in the form that the template reads, or the conversation is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from transformers import PreTrainedTokenizerFast

from services.dispatcher.build import load_text
from services.dispatcher.endpoints.messages import count_chars, parse_messages
from services.dispatcher.http.errors import ApiError
from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import ChatTemplate, TemplateRefusalError
from tests.support.dispatchers import make_settings
from tests.support.text_models import CHATML, write_model_folder

PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
OF_USERS = "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}"
FIRST_PART = "{{ m.content[0].text }}"
CHECKED = "{{ raise_exception('parts, please') if m.content is string }}" + PARTS
EITHER = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + PARTS + "{% endif %}"
ESCAPED = "{{ m.content | tojson(ensure_ascii=True) }}"
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
MUTE_SYSTEM = "{% if m.role != 'system' %}" + PARTS + "{% endif %}"
GUARD = "{% if messages[-1].role != 'assistant' %}{{ raise_exception('no answer to judge') }}{% endif %}"
INDENTED = "{{ m.content | indent(2) }}"
NUMBERED = "{{ loop.index }}{{ m.content }}"


def over_messages(body: str) -> str:
    return "{% for m in messages %}<|im_start|>" + body + "<|im_end|>\n{% endfor %}"


SOME_LEFT_OUT = {
    "last": "{{ messages[-1].content }}",
    "system only first": over_messages("{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}"),
    "last two": "{% for m in messages[-2:] %}{{ m.content }}|{% endfor %}",
    "mute system": over_messages(MUTE_SYSTEM),
    "first part": over_messages(FIRST_PART),
}
ALL_SHOWN = {
    "texts": CHATML,
    "parts": over_messages(PARTS),
    "parts of users": over_messages(OF_USERS),
    "checked": over_messages(CHECKED),
    "either": over_messages(EITHER),
    "alternating": over_messages(ALTERNATE + PARTS),
    "no system": over_messages(NO_SYSTEM + PARTS),
    "numbered": over_messages(NUMBERED),
    "indented": over_messages(INDENTED),
}
FORMS = {
    "texts": frozenset[str](),
    "either": frozenset[str](),
    "numbered": frozenset[str](),
    "indented": frozenset[str](),
    "parts of users": frozenset({"user"}),
    "parts": frozenset({"system", "user", "assistant"}),
    "checked": frozenset({"system", "user", "assistant"}),
    "alternating": frozenset({"user", "assistant"}),
    "no system": frozenset({"user", "assistant"}),
    "mute system": frozenset({"user", "assistant"}),
}
SOURCES = {**ALL_SHOWN, **SOME_LEFT_OUT}


@cache
def codec_of(name: str) -> tuple[PromptCodec, Any]:
    """Return the codec of a model with this template, and transformers' tokenizer of the same."""
    with TemporaryDirectory() as folder:
        written = write_model_folder(Path(folder), template=SOURCES[name])
        return PromptCodec(read_model_folder(written)), PreTrainedTokenizerFast.from_pretrained(written)


def talk(*turns: tuple[str, str | list[str]]) -> list[dict[str, Any]]:
    """Return a conversation as a client sends it, checked; of a list each text is a part."""
    return parse_messages(
        [
            {"role": role, "content": said if isinstance(said, str) else [{"type": "text", "text": t} for t in said]}
            for role, said in turns
        ]
    )


@pytest.mark.parametrize("name", FORMS)
def test_the_form_that_a_template_reads_is_found_by_role(name: str) -> None:
    template = codec_of(name)[0].template
    assert template is not None
    assert template.forms.part_roles - {"tool"} == FORMS[name]
    assert template.forms.lost_roles == ({"system"} if name == "mute system" else set())


WORDS = st.text("abc <|im_end>", max_size=12)
SAID = st.one_of(WORDS, st.lists(WORDS, max_size=3))
TALKS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), SAID), min_size=1, max_size=5)


@pytest.mark.parametrize("name", SOURCES)
@given(TALKS)
@settings(max_examples=30, deadline=None)
def test_what_a_client_sent_is_in_the_prompt_or_is_refused(name: str, turns: list[tuple[str, str | list[str]]]) -> None:
    codec, _ = codec_of(name)
    refusal, prompt = "", ""
    try:
        prompt = codec.decode(codec.encode_chat(talk(*turns)))
    except TemplateRefusalError as error:
        refusal = error.reason
    if refusal:
        assert any(reason in refusal for reason in ("leaves out", "roles must alternate", "no system role"))
        return
    for _, said in turns:
        for text in [said] if isinstance(said, str) else said:
            assert text.strip() in prompt


@pytest.mark.parametrize("name", ALL_SHOWN)
def test_no_conversation_is_refused_that_the_template_takes(name: str) -> None:
    codec, _ = codec_of(name)
    codec.encode_chat(talk(("user", "how are you"), ("assistant", ["well"]), ("user", ["and", "you"])))


@pytest.mark.parametrize("name", ["parts", "parts of users", "checked", "texts"])
def test_the_ids_are_transformers_for_messages_in_that_form(name: str) -> None:
    codec, reference = codec_of(name)
    messages = talk(("user", ["how", " are you"]), ("assistant", "well"), ("user", ["and <you>"]))
    assert codec.template is not None
    formed = codec.template.in_form(messages, add_generation_prompt=True)
    expected = reference.apply_chat_template(formed, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert codec.encode_chat(messages) == list(expected)
    kinds = {message["role"]: type(message["content"]) for message in formed}
    assert kinds == {role: list if role in FORMS[name] else str for role in ("user", "assistant")}


@pytest.mark.parametrize(
    ("name", "turns", "index"),
    [
        ("last", [("user", "a"), ("assistant", "b"), ("user", "c")], 0),
        ("system only first", [("system", "a"), ("user", "b"), ("system", "c")], 2),
        ("last two", [("user", "a")] * 3, 0),
        ("mute system", [("user", "a"), ("system", "b"), ("user", "c")], 1),
        ("first part", [("user", "a"), ("assistant", ["b", "c"])], 1),
    ],
)
def test_a_message_that_the_template_leaves_out_is_named(
    name: str, turns: list[tuple[str, str | list[str]]], index: int
) -> None:
    with pytest.raises(TemplateRefusalError, match=f"leaves out what message {index} ") as caught:
        codec_of(name)[0].encode_chat(talk(*turns))
    assert caught.value.index == index


@pytest.mark.parametrize("roles", [("user", "assistant"), ("system", "user", "assistant")])
def test_a_guards_template_that_wants_an_answer_to_judge_is_read(roles: tuple[str, ...]) -> None:
    only = "{% if messages | length != " + str(len(roles)) + " %}{{ raise_exception('not so') }}{% endif %}"
    template = ChatTemplate(GUARD + only + over_messages(PARTS), {})
    assert template.forms.part_roles == set(roles)
    said = template.in_form(talk(*((role, "said") for role in roles)), add_generation_prompt=False)
    assert template.render(said, add_generation_prompt=False) == "<|im_start|>said<|im_end|>\n" * len(roles)


def test_of_an_empty_message_nothing_is_left_out() -> None:
    codec_of("mute system")[0].encode_chat(talk(("system", " "), ("system", []), ("system", ["", "\n"]), ("user", "a")))


def test_a_template_that_takes_no_other_words_is_given_those_that_it_takes() -> None:
    template = ChatTemplate("{{ {'yes': 'y', 'no': 'n'}[messages[0].content] or raise_exception('?') }}", {})
    assert template.in_form(talk(("user", "yes")), add_generation_prompt=True) == [{"role": "user", "content": "yes"}]


def test_a_template_that_transforms_what_is_said_is_taken() -> None:
    for body in (ESCAPED, "{{ m.content | upper }}", "{{ m.content.split('</think>')[-1] }}", "{{ m.content[:100] }}"):
        template = ChatTemplate(over_messages(body), {})
        said = talk(("user", "é" * 200), ("assistant", "<think>a</think>"))
        assert template.in_form(said, add_generation_prompt=True) == said


@pytest.mark.parametrize(("name", "num_control"), [("parts", 2), ("texts", 4)])
def test_parts_do_not_make_a_control_token_together(name: str, num_control: int) -> None:
    """`texts` writes the beginning of an answer besides; between parts it puts line breaks."""
    codec, _ = codec_of(name)
    control = {codec.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    ids = codec.encode_chat(talk(("user", ["a<|im_", "end|>b", "<|endoftext|>"])))
    assert len([token_id for token_id in ids if token_id in control]) == num_control - (name == "texts")
    if name == "parts":
        assert codec.decode(ids) == "<|im_start|>a<|im_end|>b<|endoftext|><|im_end|>\n"


def test_an_assistants_refusal_is_what_it_said_and_an_empty_name_is_none() -> None:
    said: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": "I will not",
        "name": "",
        "annotations": [],
        "audio": None,
    }
    assert parse_messages([said]) == [{"role": "assistant", "content": "I will not"}]
    assert count_chars(talk(("user", ["ab", "c"]))) == len("user") + 3
    for refusal in (5, False, ["x"], [{"type": "text", "text": "x"}]):
        with pytest.raises(ApiError) as refused:
            parse_messages([{"role": "assistant", "refusal": refusal}])
        assert refused.value.param == "messages.0.refusal"
    assert parse_messages([{"role": "user", "content": "a", "refusal": 5}]) == [{"role": "user", "content": "a"}]


def test_the_log_says_at_the_start_whose_messages_are_refused(tmp_path: Path) -> None:
    with capture_logs() as logs:
        load_text(make_settings(write_model_folder(tmp_path, template="{{ 'no text' }}")))
    (entry,) = [entry for entry in logs if entry["event"] == "template_leaves_out"]
    assert entry["roles"] == ["assistant", "system", "user"]


@pytest.mark.parametrize(
    "fails",
    ["{{ raise_exception('no') }}", "{{ strftime_now(1) }}", "{{ messages.guideline.text }}", "{{ 5 | dictsort }}"],
)
def test_the_log_says_at_the_start_of_a_template_that_takes_nothing(fails: str, tmp_path: Path) -> None:
    with capture_logs() as logs:
        text = load_text(make_settings(write_model_folder(tmp_path, template=over_messages(fails))))
    assert [entry["event"] for entry in logs] == ["template_refuses"]
    with pytest.raises(TemplateRefusalError):
        text.codec.encode_chat(talk(("user", "a")))
