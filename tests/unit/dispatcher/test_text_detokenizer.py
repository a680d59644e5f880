"""The incremental detokeniser against the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.dispatcher.text.detokenizer import Detokenizer, DetokenizerTable, load_table
from shared.errors import StartupError
from tests.support.text_models import byte_level_json, metaspace_json, sentencepiece_json


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


BYTE_LEVEL = Tokenizer.from_str(byte_level_json())
SENTENCEPIECE = Tokenizer.from_str(sentencepiece_json())
METASPACE = Tokenizer.from_str(metaspace_json())
TABLES: dict[str, tuple[Tokenizer, DetokenizerTable]] = {
    "byte-level": (BYTE_LEVEL, load_table(BYTE_LEVEL)),
    "sentencepiece": (SENTENCEPIECE, load_table(SENTENCEPIECE)),
    "metaspace": (METASPACE, load_table(METASPACE)),
}
FIRST_BYTE = id_of(SENTENCEPIECE, "<0x00>")


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=60)


def in_pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.push(ids[start:stop]) for start, stop in pairwise(borders)]
    return [*pieces, detokenizer.flush()]


def byte_runs(ids: list[int]) -> list[bytes]:
    """The runs of byte tokens, as the library sees them: special tokens and ids without a token do not end a run."""
    runs: list[bytes] = [b""]
    for token_id in ids:
        if token_id <= 2 or SENTENCEPIECE.id_to_token(token_id) is None:
            continue
        if FIRST_BYTE <= token_id < FIRST_BYTE + 256:
            runs[-1] += bytes((token_id - FIRST_BYTE,))
        else:
            runs.append(b"")
    return runs


def is_exact(ids: list[int]) -> bool:
    """Whether each run of byte tokens is UTF-8, or breaks before its first whole character."""
    for run in byte_runs(ids):
        try:
            run.decode()
        except UnicodeDecodeError as error:
            if error.start > 0:
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=60))
@settings(max_examples=400, deadline=None)
def test_pieces_join_to_the_librarys_text_for_any_ids(name: str, data: st.DataObject, cuts: list[int]) -> None:
    """Of sentencepiece unless a run of bytes breaks late."""
    tokenizer, table = TABLES[name]
    every = ids_of(tokenizer)
    ids = data.draw(every.filter(is_exact) if name == "sentencepiece" else every)
    assert "".join(in_pieces(table.start(), ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TABLES)
@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_texts_with_emoji_and_multibyte_characters_come_back_token_by_token(name: str, text: str) -> None:
    tokenizer, table = TABLES[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = table.start()
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    if name != "metaspace":  # it has no byte fallback: unknown characters are lost in encoding
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
        assert len(pieces) == len(ids)
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_emoji_of_four_byte_tokens_appears_whole_with_its_last_byte() -> None:
    detokenizer = TABLES["sentencepiece"][1].start()
    assert [detokenizer.push([FIRST_BYTE + value]) for value in "🦊".encode()] == ["", "", "", "🦊"]


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character() -> None:
    ids = BYTE_LEVEL.encode("🦊", add_special_tokens=False).ids
    detokenizer = TABLES["byte-level"][1].start()
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_byte_run_that_breaks_late_keeps_the_characters_already_shown() -> None:
    detokenizer = TABLES["sentencepiece"][1].start()
    euro_then_broken = [FIRST_BYTE + value for value in ("€".encode() + b"\xff")]
    assert "".join(in_pieces(detokenizer, euro_then_broken, [])) == "€\ufffd"


@pytest.mark.parametrize("name", ["sentencepiece"])
def test_a_continuation_keeps_the_space_that_a_text_of_its_own_loses(name: str) -> None:
    tokenizer, table = TABLES[name]
    ids = [id_of(tokenizer, "▁fox")]
    assert table.start(first=True).push(ids) == "fox"
    assert table.start(first=False).push(ids) == " fox"


def test_special_tokens_and_ids_without_a_token_have_no_text() -> None:
    for tokenizer, table in TABLES.values():
        special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        assert table.start().push([*special, 10**6]) == ""
        assert table.start().push([10**6]) == ""


def make_wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def make_without_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))


@pytest.mark.parametrize(("make", "named"), [(make_wordpiece, "WordPiece"), (make_without_decoder, "none")])
def test_a_decoder_of_another_kind_is_refused_by_name(make: Callable[[], Tokenizer], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_table(make())


def test_a_decoder_that_differs_from_the_table_is_refused() -> None:
    """An added token with a character that the byte alphabet knows decodes to that byte, as in the library."""
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("e", "xx"), decoders.Fuse()])
    table = load_table(tokenizer)  # a Replace is understood ...
    assert table.start().push([id_of(tokenizer, "e")]) == "xx"
    tokenizer.decoder = decoders.Sequence([decoders.Strip("e", 1, 0), decoders.Fuse()])
    with pytest.raises(StartupError):  # ... stripping each token is not
        load_table(tokenizer)
