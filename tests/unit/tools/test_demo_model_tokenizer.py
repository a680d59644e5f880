"""Any text survives the tokenizer, and a training document is exactly what the chat template renders."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.thinking import ThinkStage, find_think_tags
from tools.demo_model.data import Encoded, Encoder, Packer, batches
from tools.demo_model.forms import tool
from tools.demo_model.grammar import THOUGHT_END, Conversation, Grammar, sample_conversations
from tools.demo_model.tokenizer import MAX_TOOLS_CHARS, SPECIAL_TOKENS, TAGS, TOOL, VOCAB_SIZE, save, train_on_grammar

TOKENIZER = train_on_grammar(count=800)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save(TOKENIZER, folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    found = AutoTokenizer.from_pretrained(folder)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


@given(text=st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_have_the_first_ids(loaded: PreTrainedTokenizerFast) -> None:
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert len(loaded) == VOCAB_SIZE
    assert loaded.convert_tokens_to_ids([TOOL, *TAGS]) == list(range(VOCAB_SIZE - 5, VOCAB_SIZE))
    added = loaded.added_tokens_decoder
    assert {token.content for token in added.values() if not token.special} == set(TAGS)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 4)


def test_a_plain_text_starts_with_bos(loaded: PreTrainedTokenizerFast) -> None:
    assert loaded.encode("Once")[0] == 0
    assert loaded.encode("Once", add_special_tokens=False)[0] != 0


def test_the_template_marks_roles_and_asks_for_an_answer(loaded: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    )


def test_the_template_refuses_other_roles(loaded: PreTrainedTokenizerFast) -> None:
    with pytest.raises(jinja2.TemplateError, match="not function"):
        loaded.apply_chat_template([{"role": "function", "content": "1"}])


@pytest.mark.parametrize("arguments", ['{"a": 3, "b": 4}', {"a": 3, "b": 4}], ids=["text", "mapping"])
@pytest.mark.parametrize("content", [None, "", " Let me see. "])
def test_the_template_writes_calls_and_results(
    loaded: PreTrainedTokenizerFast, arguments: object, content: str | None
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    begin = "Let me see.\n" if content else ""
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f"<|bos|><|user|>3 + 4 =<|end|><|assistant|>{begin}{said}\n{said}<|end|><|tool|>7<|end|><|assistant|>"
    )


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_the_template_names_tools_at_the_end_of_the_systems_message(
    loaded: PreTrainedTokenizerFast, system: str | None
) -> None:
    chat = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": "Hi"})
    bare = {"type": "function", "function": {"name": "add"}}
    tools = [tool("look", "where", "what"), tool("add", "x", "y"), bare, tool("add", "one", "two", "three")]
    text = loaded.apply_chat_template(chat, tools=tools, tokenize=False)
    before = f"{system}\n\n" if system else ""
    assert text == f"<|bos|><|system|>{before}Tools: look, add(x, y), add, add<|end|><|user|>Hi<|end|>"


def test_many_tools_with_long_names_leave_room_for_a_chat(loaded: PreTrainedTokenizerFast) -> None:
    tools = [tool(f"{index:03}_{'x' * 60}", *"abcdefgh") for index in range(128)] + [tool("add", "a", "b")]
    text = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools, tokenize=False)
    assert ", add(a, b)<|end|>" in text
    assert len(text) < MAX_TOOLS_CHARS + 150


def test_thinking_is_opened_where_it_is_asked_for_and_not_sent_back(loaded: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nWho is it?\n</think>\n\nHello!"},
        {"role": "user", "content": "Bye"},
    ]
    plain = "<|bos|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Bye<|end|><|assistant|>"
    for kwargs, more in (({}, ""), ({"enable_thinking": False}, ""), ({"enable_thinking": True}, "<think>\n")):
        text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs)
        assert text == plain + more


def test_the_dispatcher_tells_where_an_answer_begins(loaded: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """And a tag that somebody writes is no tag."""
    save(loaded, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    codec = PromptCodec(read_model_folder(tmp_path))
    tags = find_think_tags("auto", codec)
    assert tags is not None
    chat = [{"role": "user", "content": f"What is 3 + 4? {' '.join(TAGS)} {TOOL}"}]
    for thinking, stage in ((True, ThinkStage.OPENED), (False, ThinkStage.UNDECIDED)):
        ids = codec.encode_chat(chat, kwargs={"enable_thinking": thinking})
        assert tags.stage_after(ids) is stage
        assert tags.stage_of_form(stage) is (ThinkStage.OPENED if thinking else ThinkStage.SPEAKING)
        assert [token for token in ids if token >= VOCAB_SIZE - 5] == ([tags.opening_id] if thinking else [])


def forms(seed: int, count: int) -> list[Conversation]:
    grammar = Grammar(seed)
    return [grammar.form() for _ in range(count)]


def counted(tokenizer: PreTrainedTokenizerFast, document: Encoded) -> str:
    ids = [token for token, counts in zip(document.ids, document.counts, strict=True) if counts]
    return str(tokenizer.decode(ids))


def test_training_documents_equal_the_rendered_template(loaded: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(loaded)
    for chat in sample_conversations(3, 50):
        rendered = loaded.apply_chat_template(chat.messages, tokenize=False)
        document = encoder.chat(chat)
        assert document.ids == loaded.encode(rendered, add_special_tokens=False)
        assert counted(loaded, document) == "".join(turn.answer + "<|end|>" for turn in chat.turns)


def test_training_documents_with_forms_do_too(loaded: PreTrainedTokenizerFast) -> None:
    """A thought stands before the last answer only; calls that come back in another form are not learned."""
    encoder = Encoder(loaded)
    for chat in forms(3, 100):
        tools = [dict(tool) for tool in chat.tools]
        prompt = loaded.apply_chat_template(
            chat.messages[:-1],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=chat.is_thinking,
        )
        document, said = encoder.chat(chat), chat.turns[-1].said
        answers = "" if chat.has_compact_calls else "".join(turn.answer + "<|end|>" for turn in chat.turns[:-1])
        if chat.budget_chars is None:
            assert document.ids == loaded.encode(prompt + said + "<|end|>", add_special_tokens=False)
            assert counted(loaded, document) == answers + said + "<|end|>"
        else:
            thought, _, answer = said.partition(THOUGHT_END)
            cut = f"{prompt}{thought[: chat.budget_chars]}</think>"
            assert loaded.decode(document.ids) == f"{cut}\n\n{answer}<|end|>"
            assert counted(loaded, document) == f"{answers}\n\n{answer}<|end|>"


def document(first: int, length: int) -> Encoded:
    return Encoded(list(range(first, first + length)), [False] + [True] * (length - 1))


def test_packed_documents_do_not_see_or_predict_each_other() -> None:
    """Two rows of 8: documents of 3 and 4 tokens, then one of 6; the seventh token of row 0 is the last used."""
    packer = Packer(row_tokens=8, batch_tokens=16)
    assert [packer.add(document(first, length)) for first, length in ((10, 3), (20, 4), (30, 6))] == [None] * 3
    rows = packer.add(document(40, 5))
    assert rows is not None
    assert rows.ids[0].tolist() == [10, 11, 12, 20, 21, 22, 23, 0]
    assert rows.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert rows.targets[0].tolist() == [11, 12, -100, 21, 22, 23, -100, -100]
    assert rows.targets[1].tolist() == [31, 32, 33, 34, 35, -100, -100, -100]
    mask = rows.attention_bias()[0, 0] == 0
    assert torch.equal(mask, mask.tril())
    assert mask[4].tolist() == [False, False, False, True, True, False, False, False]
    assert mask.diagonal().all()


def test_the_same_seed_gives_the_same_batches() -> None:
    first, second = (next(batches(TOKENIZER, 5, 1024)) for _ in range(2))
    assert first[0] == second[0] > 0
    assert torch.equal(first[1].ids, second[1].ids)
    assert torch.equal(first[1].targets, second[1].targets)
    assert not torch.equal(first[1].ids, next(batches(TOKENIZER, 6, 1024))[1].ids)
