"""Chat templates and prompts: transformers' ids for ordinary text, plain text for a user's control strings."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import ChatTemplate, TemplateRefusalError
from services.dispatcher.text.token_finder import TokenFinder
from shared.errors import StartupError
from tests.support.text_models import (
    CHATML,
    SPACES,
    SPECIAL,
    THINKER,
    byte_level_json,
    metaspace_json,
    sentencepiece_json,
    write_model_folder,
)

TOOL_TEMPLATE = CHATML + "{# <tool> #}"
ROLES = st.sampled_from(["system", "user", "assistant"])
SAID = [{"role": "user", "content": "a"}]
CONTROL = ["<|im_end|>", "<|im_start|>system", "<|endoftext|>", "{{ 7*7 }}", "{% raw %}", "<tool>", "\n", " ", "fox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def codec(folder: Path) -> PromptCodec:
    return PromptCodec(read_model_folder(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def transformers_ids(reference: Any, messages: list[dict[str, Any]]) -> list[int]:
    encoded = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


@given(
    st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=30)}), min_size=1, max_size=4).filter(
        lambda messages: all("<" not in message["content"] for message in messages)
    )
)
@settings(max_examples=100, deadline=None)
def test_ordinary_messages_give_transformers_ids(
    codec: PromptCodec, reference: Any, messages: list[dict[str, Any]]
) -> None:
    assert codec.encode_chat(messages) == transformers_ids(reference, messages)


@given(
    st.lists(st.text("<|ab é>", min_size=1, max_size=6), max_size=8, unique=True),
    st.text("<|ab é>", max_size=60),
)
def test_of_many_strings_those_are_found_that_trying_the_longest_first_finds(texts: list[str], text: str) -> None:
    longest_first = "|".join(re.escape(each) for each in sorted(texts, key=lambda each: -len(each))) or "(?!)"
    finder = TokenFinder(texts)
    assert finder.replace(text, lambda found: f"[{found}]") == re.sub(longest_first, r"[\g<0>]", text)
    assert finder.stands_in(text) == (re.search(longest_first, text) is not None)


@pytest.mark.parametrize("names", [["z" * i for i in range(1, 1500)], ["a" * i + "b" for i in range(400)]])
def test_control_tokens_may_begin_alike(tmp_path: Path, names: list[str]) -> None:
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_special_tokens(names)
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, tokenizer.to_str())))
    assert max(codec.encode_chat([{"role": "user", "content": f"a{names[-1]}z"}])) < 420


@given(st.lists(st.lists(st.sampled_from(CONTROL), max_size=5).map("".join), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_what_users_write_never_becomes_a_control_token(codec: PromptCodec, contents: list[str]) -> None:
    """The control tokens of the prompt are those of the same conversation with harmless texts, and no text is lost."""
    control = {codec.tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    messages = [{"role": "user", "content": content} for content in contents]
    harmless = [{"role": "user", "content": "x"} for _ in contents]

    def controls(ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in control]

    ids = codec.encode_chat(messages)
    assert controls(ids) == controls(codec.encode_chat(harmless))
    rendered = "".join(f"<|im_start|>user\n{content.strip()}<|im_end|>\n" for content in contents)
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == rendered + "<|im_start|>assistant\n"


KWARGS_TEMPLATE = CHATML + "{% if mood == 'calm' %}{{ '<tool>' }}{% endif %}{{ mood }}{{ tone ~ bos_token }}{{ size }}"


@pytest.fixture(scope="module")
def with_kwargs(tmp_path_factory: pytest.TempPathFactory) -> PromptCodec:
    folder = write_model_folder(tmp_path_factory.mktemp("kwargs"), template=KWARGS_TEMPLATE)
    return PromptCodec(read_model_folder(folder))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (CHATML, set()),
        (THINKER, {"enable_thinking"}),
        (KWARGS_TEMPLATE, {"mood", "tone", "size"}),
        ("{% set a = a | default(1) %}{% set b = 2 %}{{ a + b }}{{ range(2) }}{{ namespace() }}", {"a"}),
        ("{{ messages }}{{ tools }}{{ documents }}{{ eos_token }}{{ strftime_now('%d') }}{{ self }}", set()),
        ("{% macro m(x) %}{{ x }}{{ y }}{% endmacro %}{% for z in messages %}{{ m(z) }}{% endfor %}", {"y"}),
    ],
)
def test_variables_are_what_a_template_reads_and_nobody_else_gives(source: str, names: set[str]) -> None:
    assert ChatTemplate(source, {}).variables == names


def test_a_template_reads_the_values_that_a_request_gives_it(with_kwargs: PromptCodec) -> None:
    ids = with_kwargs.encode_chat(SAID, kwargs={"mood": "calm", "size": 2.5})
    assert with_kwargs.decode(ids).endswith("<|im_start|>assistant\n<tool>calm2.5")
    assert with_kwargs.tokenizer.token_to_id("<tool>") in ids
    assert with_kwargs.decode(with_kwargs.encode_chat(SAID)).endswith("<|im_start|>assistant\n")


@given(
    st.lists(st.sampled_from([*CONTROL, "<|im_", "\U000f0000", "0"]), max_size=4).map("".join),
    st.sampled_from(["", "end|>", "<|im_end|>"]),
    st.sampled_from(["a", *CONTROL]),
)
@example("<|im_", "end|>", "a")
@settings(max_examples=100, deadline=None)
def test_values_for_a_template_never_become_control_tokens_and_none_is_lost(
    with_kwargs: PromptCodec, mood: str, tone: str, content: str
) -> None:
    """Alone, together with the next one, or beside control strings of a message."""
    said = [{"role": "user", "content": content}]
    ids = with_kwargs.encode_chat(said, kwargs={"mood": mood, "tone": tone})
    names = [*SPECIAL, "<tool>"]
    control = {with_kwargs.tokenizer.token_to_id(name) for name in names}
    harmless = with_kwargs.encode_chat(SAID)
    assert [i for i in ids if i in control] == [i for i in harmless if i in control]
    assert with_kwargs.decode(ids).endswith(f"<|im_start|>assistant\n{mood}{tone}")


def test_a_completion_prompt_is_plain_text_too(codec: PromptCodec) -> None:
    control = codec.tokenizer.token_to_id("<|im_end|>")
    ids = codec.encode_text("fox<|im_end|> fox")
    assert control not in ids
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == "fox<|im_end|> fox"


def test_a_token_that_only_the_template_writes_is_plain_for_users_and_itself_for_the_assistant(tmp_path: Path) -> None:
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, template=TOOL_TEMPLATE)))
    tool = codec.tokenizer.token_to_id("<tool>")
    assert tool not in codec.encode_chat([{"role": "user", "content": "a <tool> b"}])
    assert tool in codec.encode_chat([{"role": "assistant", "content": "a <tool> b"}])


@pytest.mark.parametrize("eos", ["<tool>", {"content": "<tool>"}, "og"])
def test_a_token_that_the_folder_names_is_a_control_token_however_tokenizer_json_marks_it(
    tmp_path: Path, eos: Any
) -> None:
    """`<tool>` is an added token that is not special, `og` an ordinary piece; transformers makes both special."""
    text = eos if isinstance(eos, str) else eos["content"]
    folder = write_model_folder(tmp_path, template="{{ messages[0].content }}{{ eos_token }}")
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": eos}))
    codec = PromptCodec(read_model_folder(folder))
    eos_id = codec.tokenizer.token_to_id(text)
    assert codec.encode_chat([{"role": "user", "content": "a"}])[-1] == eos_id
    assert eos_id not in codec.encode_text(f"a {text} b")
    assert codec.decode(codec.encode_text(f"a {text} b")) == f"a {text} b"
    assert codec.encode_chat([{"role": "user", "content": text}]).count(eos_id) == 1
    assert codec.decode([eos_id], skip_special_tokens=True) == ""


def test_a_completion_prompt_has_the_tokenizers_own_bos(tmp_path: Path) -> None:
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, sentencepiece_json())))
    assert codec.encode_text("the fox") == codec.tokenizer.encode("the fox").ids
    assert codec.encode_text("the fox")[0] == codec.tokenizer.token_to_id("<s>")
    guarded = codec.encode_text("the</s>fox")
    assert guarded[0] == codec.tokenizer.token_to_id("<s>")
    assert codec.tokenizer.token_to_id("</s>") not in guarded


PARTS = st.lists(
    st.sampled_from(["</s>", "<s>", "<unk>", "</", "s>", "the", "fox", " ", "a", "é", "🦊", "<0x41>"]), max_size=8
)


@pytest.mark.parametrize("spaces", SPACES)
@given(PARTS.map("".join))
@settings(max_examples=60, deadline=None)
def test_a_control_string_is_a_word_like_others(spaces: str, text: str) -> None:
    """The ids are those of a tokenizer that never heard of control tokens, and so is the text that comes back."""
    codec, innocent = piece_codec(spaces), Tokenizer.from_str(sentencepiece_json(spaces, ()))
    ids = codec.encode_text(text, add_special_tokens=False)
    assert ids == innocent.encode(text, add_special_tokens=False).ids
    assert codec.encode_text(text) == [1, *ids]
    assert codec.decode(ids) == innocent.decode(ids)
    if not text.startswith(" "):  # of which Metaspace keeps one less
        assert codec.decode(ids) == text


@cache
def piece_codec(spaces: str, turn: AddedToken | None = None) -> PromptCodec:
    """Return the codec of a sentencepiece-like model, whose template may write a control token of its own."""
    added: list[AddedToken | str] = ["<unk>", "<s>", "</s>", *([turn] if turn else [])]
    template = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content | trim }} <|turn|>{% endfor %}"
    with TemporaryDirectory() as folder:
        written = write_model_folder(Path(folder), sentencepiece_json(spaces, added), template=template)
        return PromptCodec(read_model_folder(written))


@pytest.mark.parametrize("spaces", SPACES)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"lstrip": True},
        {"rstrip": True},
        {"normalized": True},
        {"normalized": True, "lstrip": True},
        {"normalized": True, "rstrip": True},
        {"special": False, "normalized": True},
        {"special": False},
    ],
    ids=str,
)
@given(PARTS.map("".join), PARTS.map("".join))
@settings(max_examples=10, deadline=None)
def test_around_the_templates_own_tokens_all_is_as_the_library_has_it(
    spaces: str, flags: dict[str, bool], question: str, answer: str
) -> None:
    """The ids are those of a tokenizer that knows the template's token and no other."""
    turn = AddedToken("<|turn|>", **{"special": True, "normalized": False, **flags})
    codec, innocent = piece_codec(spaces, turn), Tokenizer.from_str(sentencepiece_json(spaces, (turn,)))
    rendered = f"<|turn|>user: {question.strip()} <|turn|><|turn|>assistant: {answer.strip()} <|turn|>"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert codec.encode_chat(messages) == innocent.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["the </s> fox", "</s>", "the<s></s>fox", "</s></s>"])
def test_a_vocabulary_that_holds_the_control_string_as_a_piece_still_gives_plain_text(
    tmp_path: Path, text: str
) -> None:
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, metaspace_json())))
    ids = codec.encode_text(text)
    assert {1, 2}.isdisjoint(ids)
    assert codec.decode(ids) == text


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_vocabulary_that_merges_to_the_control_string_still_gives_plain_text(
    tmp_path: Path, ignore_merges: bool
) -> None:
    vocab = {piece: index for index, piece in enumerate(["a", "<", "/", "s", ">", "</", "s>", "</s>", "</s>a"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, str(tokenizer.to_str()))))
    assert codec.encode_text("a</s>") == [0, 5, 6]
    assert codec.encode_text("</s>a</s>") == [5, 6, 0, 5, 6]


def test_special_tokens_that_are_looked_for_in_normalised_text_have_no_text_either(tmp_path: Path) -> None:
    """As in Llama's first files: the library shows `</s>` in an answer, and takes it for a token after a space only."""
    added = [AddedToken(token, special=True, normalized=True) for token in ("<unk>", "<s>", "</s>")]
    template = "{% for m in messages %}{{ m.content }} </s>{{ m.content }}</s>{% endfor %}"
    folder = write_model_folder(tmp_path, sentencepiece_json(added=added), template=template)
    codec = PromptCodec(read_model_folder(folder))
    assert codec.table.start().push([1, *codec.encode_text("the fox", add_special_tokens=False), 2]) == "the fox"
    assert (
        codec.encode_chat([{"role": "user", "content": "the"}])
        == codec.tokenizer.encode("the </s>the</s>", add_special_tokens=False).ids
    )
    ids = codec.encode_chat([{"role": "user", "content": "the </s>"}])
    assert ids.count(2) == 1
    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == "the </s> </s>the </s></s>"


def test_added_tokens_keep_their_ids_beside_renamed_ones(codec: PromptCodec) -> None:
    """`<tool>` comes after the control tokens, and is none of them: this template does not write it."""
    tool = codec.tokenizer.token_to_id("<tool>")
    ids = codec.encode_text("a<tool><|im_end|><tool>")
    assert [token_id for token_id in ids if token_id == tool] == [tool, tool]
    assert codec.decode(ids) == "a<tool><|im_end|><tool>"


def test_a_token_that_is_looked_for_in_normalised_text_is_plain_for_users_in_every_spelling(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<call>", normalized=True)])
    call = tokenizer.token_to_id("<call>")
    assert call is not None
    assert call in tokenizer.encode("<CALL>").ids
    folder = write_model_folder(tmp_path, str(tokenizer.to_str()), template=CHATML + "<call>")
    codec = PromptCodec(read_model_folder(folder))
    assert call not in codec.encode_text("<CALL>")
    assert codec.encode_chat([{"role": "user", "content": "<CALL>"}]).count(call) == 1


def test_private_use_characters_in_a_message_do_not_confuse_the_placeholders(codec: PromptCodec) -> None:
    content = "\U000f00000\U000f0000 <|im_end|> \U000f0001"
    ids = codec.encode_chat([{"role": "user", "content": content}])
    assert content in codec.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_templates_own_refusal_is_passed_on_short_and_printable() -> None:
    template = ChatTemplate("{{ raise_exception('roles must\x00 alternate' + 'x' * 500) }}", {})
    with pytest.raises(TemplateRefusalError) as caught:
        template.render([])
    assert caught.value.reason.startswith("roles must alternate")
    assert len(caught.value.reason) == 200


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 5 | dictsort }}",
        "{{ '{:q}'.format(1) }}",
        "{{ cycler().next() }}",
        "{{ '\\ud800' }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_the_sandbox_is_a_refusal_without_details(source: str) -> None:
    with pytest.raises(TemplateRefusalError) as caught:
        ChatTemplate(source, {}).render([])
    assert caught.value.reason == ""


def test_templates_have_the_helpers_of_transformers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        " {{ strftime_now('%Y') }} {{ bos_token }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2031, 5, 6))
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "b"}]
    assert template.render(messages) == '"é<" 2031 <s>'


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(StartupError, match="template"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("config.json", None),
        ("tokenizer.json", "{"),
        ("config.json", "[1]"),
        ("config.json", "{"),
    ],
)
def test_a_file_that_is_missing_or_malformed_is_named_at_start(tmp_path: Path, name: str, content: str | None) -> None:
    path = write_model_folder(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(StartupError, match=name):
        PromptCodec(read_model_folder(tmp_path))


def test_the_template_file_goes_before_the_tokenizers_configuration(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert read_model_folder(folder).template == "{{ messages[0].content }}!"


def test_a_model_without_a_template_refuses_to_chat_and_completes(tmp_path: Path) -> None:
    codec = PromptCodec(read_model_folder(write_model_folder(tmp_path, template=None)))
    with pytest.raises(TemplateRefusalError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "hi"}])
    assert codec.encode_text("hi")


@pytest.mark.parametrize("what", ["text", "chat", "ids"])
def test_other_threads_go_on_while_a_long_text_is_cut_or_read(codec: PromptCodec, what: str) -> None:
    """A call that held the interpreter's lock would leave this thread no turn until it is over."""
    text, ids, ended = "\u0301" * 120_000, list(range(300, 400)) * 2_500, threading.Event()
    work: dict[str, Callable[[], object]] = {
        "text": lambda: codec.encode_text(text),
        "chat": lambda: codec.encode_chat([{"role": "user", "content": text}]),
        "ids": lambda: [codec.decode(ids) for _ in range(4)],
    }

    def run() -> None:
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            work[what]()
        ended.set()

    thread, num_beats = threading.Thread(target=run), 0
    thread.start()
    while not ended.wait(0.0005):
        num_beats += 1
    thread.join()
    assert num_beats > 20


def test_a_text_full_of_control_strings_is_plain_text_in_good_time(codec: PromptCodec) -> None:
    ids = codec.encode_text("<|im_end|>a" * 10_000)
    assert codec.tokenizer.decode(ids) == "<|im_end|>a" * 10_000
    assert codec.tokenizer.token_to_id("<|im_end|>") not in ids
