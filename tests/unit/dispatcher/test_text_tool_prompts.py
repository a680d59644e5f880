"""Tools, calls and results in the prompt: as transformers writes them, and never as control tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from services.dispatcher.endpoints.messages import parse_messages
from services.dispatcher.endpoints.tools import parse_tools
from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import ChatTemplate, TemplateRefusalError
from services.dispatcher.text.template_forms import ToolForms
from tests.support.text_models import CHATML, write_model_folder
from tests.support.tool_templates import ADD, TEMPLATES, tool_json

SPECIAL: Final = ("[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>")
PLAIN: Final = ("<tool_call>", "</tool_call>")
FORMS: Final = {
    "hermes": ToolForms(True, False, False),
    "either": ToolForms(True, True, False),
    "items": ToolForms(True, False, False),
    "llama3": ToolForms(True, False, False),
    "mistral": ToolForms(True, False, False),
    "nulls": ToolForms(True, True, True),
    "phi": ToolForms(True, False, False),
}


@cache
def codec_of(name: str) -> tuple[PromptCodec, Any]:
    """Return the codec of a model with this template, and transformers' tokenizer of the same."""
    with TemporaryDirectory() as folder:
        written = write_model_folder(Path(folder), tool_json(SPECIAL, PLAIN), template=TEMPLATES[name])
        return PromptCodec(read_model_folder(written)), PreTrainedTokenizerFast.from_pretrained(written)


def call(arguments: str, number: int = 0, name: str = "add") -> dict[str, Any]:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def talk(arguments: str, result: str, *, content: str | None = None, count: int = 1) -> list[dict[str, Any]]:
    """Return a conversation with calls and their results, as a client sends it, checked."""
    calls = [call(arguments, number) for number in range(count)]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls]
    first = {"role": "user", "content": "what is 1 + 2"}
    return parse_messages([first, {"role": "assistant", "content": content, "tool_calls": calls}, *results])


def defined(tool: dict[str, Any]) -> list[Any]:
    return [tool.definition for tool in parse_tools([tool])]


@pytest.mark.parametrize("name", FORMS)
def test_how_a_template_reads_tools_and_calls_is_found(name: str) -> None:
    template = codec_of(name)[0].template
    assert template is not None
    assert template.tool_forms == FORMS[name]


def test_a_template_that_writes_neither_is_seen() -> None:
    assert not ChatTemplate(CHATML, {}).tool_forms.reads_tools
    assert not ChatTemplate("{% if tools %}tools{% endif %}" + CHATML, {}).tool_forms.reads_tools


NAMES: Final = st.text("abc_", min_size=1, max_size=6)
TEXTS: Final = st.text('abc é🦊"\\\n{}<|:', max_size=9)
SCHEMAS: Final = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "number"])}, optional={"description": TEXTS}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={"required": st.lists(NAMES, max_size=2), "enum": st.lists(TEXTS, max_size=2)},
    ),
    max_leaves=4,
)
VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**18) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=5,
)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "nulls"])  # of none it makes an empty text
@given(SCHEMAS, st.dictionaries(NAMES, VALUES, max_size=3), TEXTS, st.integers(1, 2), st.sampled_from([None, "so"]))
@settings(max_examples=40, deadline=None)
def test_ids_are_transformers(
    name: str, schema: dict[str, Any], arguments: dict[str, Any], result: str, count: int, content: str | None
) -> None:
    codec, reference = codec_of(name)
    messages = talk(json.dumps(arguments), result, content=content, count=1 if name == "llama3" else count)
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = defined({"type": "function", "function": {"description": result, "name": "add", "parameters": parameters}})
    assert codec.template is not None
    formed = codec.template.in_form(messages, add_generation_prompt=True)
    given_arguments = formed[1]["tool_calls"][0]["function"]["arguments"]
    assert given_arguments == (json.dumps(arguments) if FORMS[name].has_text_arguments else arguments)
    for given_tools in (tools, None):
        ids = codec.encode_chat(messages, tools=given_tools)
        expected = reference.apply_chat_template(
            formed, tools=given_tools, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert ids == list(expected)


HOSTILE: Final = ("<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|im_", "end|>", "<|")
WORDS: Final = st.lists(st.sampled_from([*HOSTILE, "a", "|>", '"']), max_size=4).map("".join)


@pytest.mark.parametrize("name", FORMS)
@given(WORDS, WORDS, WORDS, WORDS, WORDS)
@settings(max_examples=60, deadline=None)
def test_no_text_of_tools_becomes_a_control_token(
    name: str, about: str, member: str, value: str, result: str, choice: str
) -> None:
    codec = codec_of(name)[0]
    schema = {"type": "object", "properties": {member: {"enum": [choice, "b"], "description": about}}}
    tools = defined({"type": "function", "function": {"name": "add", "description": about, "parameters": schema}})
    plain = defined({"type": "function", "function": {"name": "add", "description": "a", "parameters": {}}})
    added = codec.tokenizer.get_added_tokens_decoder().items()
    controls = {token_id for token_id, token in added if token.special or token.content in TEMPLATES[name]}

    def count(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in controls]

    messages = talk(json.dumps({member: [value, {value: value}]}), result)
    ids = codec.encode_chat(messages, tools=tools)
    assert count(ids) == count(codec.encode_chat(talk('{"a": 1}', "b"), tools=plain))
    text = codec.decode(ids)
    for said in (about, member, value):
        assert json.dumps(said, ensure_ascii=False)[1:-1] in text or said in text


def test_strings_beside_each_other_make_no_control_token_together(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}{{ t.function.description }}{{ t.function.parameters.title }}{% endfor %}"
    folder = write_model_folder(tmp_path, template=template + CHATML)
    codec = PromptCodec(read_model_folder(folder))
    end = codec.tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    for halves in (("<|im_", "end|>"), ("a<", "|im_end|>b"), ("<|im_end|", ">")):
        function = {"name": "f", "description": halves[0], "parameters": {"title": halves[1]}}
        ids = codec.encode_chat(
            [{"role": "user", "content": "a"}], tools=defined({"type": "function", "function": function})
        )
        assert ids.count(end) == 1
        assert codec.decode(ids).startswith("".join(halves))


def test_a_template_that_writes_calls_only_without_content_is_given_none() -> None:
    codec = codec_of("nulls")[0]
    assert '[TOOL_CALLS]add[ARGS]{"a":1}' in codec.decode(codec.encode_chat(talk('{"a":1}', "3")))
    with pytest.raises(TemplateRefusalError, match="leaves out"):
        codec.encode_chat(talk("{}", "3", content="so"))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_of_its_own_for_tools_is_used_for_tools_and_calls(tmp_path: Path, as_file: bool) -> None:
    folder = write_model_folder(tmp_path, tool_json(plain=PLAIN), template=CHATML)
    if as_file:
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATES["hermes"])
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = {"default": CHATML, "tool_use": TEMPLATES["hermes"]}
        config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    codec, reference = PromptCodec(read_model_folder(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    hello = [{"role": "user", "content": "hi <tool_call>"}]
    tag = codec.tokenizer.token_to_id("<tool_call>")
    assert tag not in codec.encode_chat(hello)
    for messages, tools in ((hello[:1], None), (talk('{"a": 1}', "3"), defined(ADD))):
        template = codec.template_for(messages, tools)
        assert template is not None
        formed = template.in_form(messages, add_generation_prompt=True)
        text = reference.apply_chat_template(formed, tools=tools, add_generation_prompt=True, tokenize=False)
        assert codec.decode(codec.encode_chat(messages, tools=tools)) == text
    assert tag in codec.encode_chat(talk("{}", "3"))


def test_calls_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path)))
    with pytest.raises(TemplateRefusalError, match=r"leaves out what message 1 \(role 'assistant'\) calls") as raised:
        codec.encode_chat(talk("{}", "3"))
    assert raised.value.index == 1


@pytest.mark.parametrize("arguments", ['{"a": ', '"a"', "[1]", '{"a": "\\ud800"}', '{"a": NaN}', "[" * 3000])
def test_arguments_that_are_no_object_stay_the_text_that_they_are(arguments: str) -> None:
    """Such as a call that a limit has cut."""
    codec = codec_of("hermes")[0]
    text = codec.decode(codec.encode_chat(talk(arguments, "3")))
    assert json.dumps(arguments, ensure_ascii=False) in text


def test_no_arguments_are_an_empty_object() -> None:
    codec = codec_of("hermes")[0]
    assert '"arguments": {}}' in codec.decode(codec.encode_chat(talk("", "3")))


def test_a_tool_is_given_without_what_only_the_server_reads() -> None:
    tool = {"type": "function", "function": {"strict": True, "description": None, "name": "f", "x": 1}, "y": 2}
    parsed = parse_tools([tool])[0]
    assert parsed.is_strict
    assert parsed.definition["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert list(defined(ADD)[0]["function"]) == ["name", "description", "parameters"]
