"""Any text survives the tokenizer, and a training document is exactly what the chat template renders."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tools.demo_model.data import Encoded, Encoder, Packer, batches
from tools.demo_model.grammar import sample_conversations
from tools.demo_model.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, save, train_on_grammar

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
    with pytest.raises(jinja2.TemplateError, match="not tool"):
        loaded.apply_chat_template([{"role": "tool", "content": "1"}])


def test_training_documents_equal_the_rendered_template(loaded: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(loaded)
    for chat in sample_conversations(3, 50):
        rendered = loaded.apply_chat_template(chat.messages, tokenize=False)
        document = encoder.chat(chat)
        assert document.ids == loaded.encode(rendered, add_special_tokens=False)
        counted = [token for token, counts in zip(document.ids, document.counts, strict=True) if counts]
        assert loaded.decode(counted) == "".join(turn.answer + "<|end|>" for turn in chat.turns)


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
