"""Token ids to text, piece by piece, in constant time per token; never half a code point.

The tokenizer's decoder is read once into a table (what each id contributes), so that a new token costs a list look-up
and not a call that decodes a window again. The pieces of one answer, joined, equal `Tokenizer.decode(all ids,
skip_special_tokens=True)`:

- byte-level BPE (GPT-2, Llama 3, Qwen): every id is a string of bytes; UTF-8 is decoded incrementally, and invalid
  bytes become U+FFFD exactly as in the library. Always equal.
- sentencepiece-style pieces (Llama 2, Mistral, Gemma), `▁` for a space, `<0x41>` for a byte: equal whenever each run of
  byte tokens is valid UTF-8 or breaks before its first whole character. (The library turns a run that breaks *later*
  wholly into U+FFFD; characters that were already shown cannot be taken back, so they stay here.)

Special tokens have no text, and other decoders are refused at start, by name. `load_table` compares every other id with
the library.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from shared.errors import StartupError

REPLACEMENT: Final = "\ufffd"
_MAX_PIECES: Final = 1 << 20
_SPACE_MARK: Final = "▁"


class ByteLevelTable:
    """Ids of a byte-level BPE as bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.texts = [_as_text(piece) for piece in pieces]

    def start(self, *, first: bool = True) -> ByteLevelDetokenizer:
        """Return the detokeniser of a new answer, whether a text of its own or one that goes on after a prompt."""
        return ByteLevelDetokenizer(self)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the id's bytes; nothing for a special token."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


class ByteLevelDetokenizer:
    """The text of one answer. Not shared between requests."""

    __slots__ = ("_pieces", "_tail", "_texts")

    def __init__(self, table: ByteLevelTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self._tail = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is unfinished."""
        if len(token_ids) == 1 and not self._tail:
            try:
                text = self._texts[token_ids[0]]
            except IndexError:
                return ""  # padding rows of the embedding: no token, no text
            if text is not None:
                return text
        pieces = self._pieces
        data = self._tail + b"".join([pieces[token_id] for token_id in token_ids if token_id < len(pieces)])
        text, used = codecs.utf_8_decode(data, "replace", False)  # noqa: FBT003  the C function takes it by position
        self._tail = data[used:]
        return text

    def flush(self) -> str:
        """Return what is left at the end of the answer: U+FFFD for an unfinished character."""
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text


class PieceTable:
    """Ids of a sentencepiece-style tokenizer: a text, a byte (0..255), or None for those that are skipped.

    Args:
        pieces: by id.
        first_pieces: what an id contributes as the very first token, where that differs.
        strip_first_space: the whole text loses one leading space.
    """

    def __init__(
        self, pieces: list[str | int | None], first_pieces: dict[int, str], *, strip_first_space: bool
    ) -> None:
        self.pieces = pieces
        self.first_pieces = first_pieces
        self.strip_first_space = strip_first_space

    def start(self, *, first: bool = True) -> PieceDetokenizer:
        """Return the detokeniser of a new answer.

        Args:
            first: the answer is a text of its own (chat); False if it goes on after a prompt (completions), where
                a leading space belongs to it.
        """
        return PieceDetokenizer(self, first=first)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the id stands for in the middle of a text, in UTF-8, or its one byte."""
        piece = self.pieces[token_id] if token_id < len(self.pieces) else None
        if piece is None:
            return b""
        return bytes((piece,)) if isinstance(piece, int) else piece.encode("utf-8", "surrogatepass")


class PieceDetokenizer:
    """The text of one answer. Not shared between requests."""

    __slots__ = ("_at_first_piece", "_broken", "_run", "_strip", "_table")

    def __init__(self, table: PieceTable, *, first: bool) -> None:
        self._table = table
        self._run = b""  # bytes of a run of byte tokens that make no whole character yet
        self._broken = False  # the run is no UTF-8: each further byte of it is U+FFFD
        self._at_first_piece = first
        self._strip = first and table.strip_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; "" while a character is unfinished."""
        text = "".join([self._piece(token_id) for token_id in token_ids])
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return what is left at the end of the answer: U+FFFD for an unfinished character."""
        text = self._end_run()
        return text.removeprefix(" ") if self._strip else text

    def _piece(self, token_id: int) -> str:
        pieces = self._table.pieces
        piece = pieces[token_id] if token_id < len(pieces) else None
        if piece is None:
            return ""
        at_first, self._at_first_piece = self._at_first_piece, False
        if isinstance(piece, int):
            return self._byte(piece)
        if at_first:
            piece = self._table.first_pieces.get(token_id, piece)
        return self._end_run() + piece if self._run or self._broken else piece

    def _byte(self, value: int) -> str:
        if self._broken:
            return REPLACEMENT
        self._run += bytes((value,))
        try:
            text, used = codecs.utf_8_decode(self._run, "strict", False)  # noqa: FBT003  by position
        except UnicodeDecodeError:
            self._broken = True
            text, self._run = REPLACEMENT * len(self._run), b""
            return text
        self._run = self._run[used:]
        return text

    def _end_run(self) -> str:
        text = REPLACEMENT * len(self._run)
        self._run, self._broken = b"", False
        return text


Detokenizer = ByteLevelDetokenizer | PieceDetokenizer
DetokenizerTable = ByteLevelTable | PieceTable
"""What each id contributes; built once, shared by all requests."""


def load_table(tokenizer: Tokenizer) -> DetokenizerTable:
    """Return the table of this tokenizer, checked id by id against the library.

    Raises:
        StartupError: its decoder is of a kind that is not supported, or the check failed.
    """
    tokens = _tokens_by_id(tokenizer)
    steps = _decoder_steps(tokenizer)
    kinds = [str(step.get("type")) for step in steps]
    table: DetokenizerTable
    if kinds == ["ByteLevel"]:
        table = ByteLevelTable([b"" if token is None else _byte_level_bytes(token) for token in tokens])
    elif kinds == ["Metaspace"]:
        table = _metaspace_table(tokens, steps[0])
    elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        table = _fallback_table(tokens, steps)
    else:
        names = ", ".join(kinds) or "none"
        raise StartupError(
            f"the tokenizer's decoder ({names}) is not supported",
            "Use a byte-level or sentencepiece model",
            "unsupported_model",
        )
    _check_table(table, tokenizer, tokens)
    return table


def _tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    """Return each id's token; None for special tokens, which have no text, and for holes."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > _MAX_PIECES:
        raise StartupError(f"the tokenizer's largest id is {size - 1}; at most {_MAX_PIECES} ids are supported")
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return [None if token_id in special else tokenizer.id_to_token(token_id) for token_id in range(size)]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    if not isinstance(decoder, dict):
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _byte_chars() -> dict[str, int]:
    """Return the 256 characters by which byte-level BPE writes bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


_BYTE_CHARS: Final = _byte_chars()


def _byte_level_bytes(token: str) -> bytes:
    """Return the token's bytes; one with any other character (an added token) stands for itself."""
    try:
        return bytes([_BYTE_CHARS[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def _as_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _metaspace_table(tokens: list[str | None], step: dict[str, Any]) -> PieceTable:
    mark = str(step.get("replacement", _SPACE_MARK))
    pieces: list[str | int | None] = [None if token is None else token.replace(mark, " ") for token in tokens]
    first: dict[int, str] = {}
    if step.get("prepend_scheme", "always") != "never":
        first = {i: token.replace(mark, "") for i, token in enumerate(tokens) if token is not None and mark in token}
    return PieceTable(pieces, first, strip_first_space=False)


def _fallback_table(tokens: list[str | None], steps: list[dict[str, Any]]) -> PieceTable:
    kinds = [step["type"] for step in steps]
    for step in steps:
        if step["type"] == "Replace" and "String" not in step.get("pattern", {}):
            raise StartupError("the tokenizer's decoder replaces by a regular expression, which is not supported")
        if step["type"] == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
            raise StartupError("the tokenizer's decoder strips other than one leading space, which is not supported")
    if "Strip" in kinds and kinds.index("Strip") < kinds.index("Fuse"):
        raise StartupError("the tokenizer's decoder strips each token, which is not supported")
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    pieces: list[str | int | None] = []
    for token in tokens:
        text = token
        for old, new in replaced if text is not None else ():
            text = text.replace(old, new)  # type: ignore[union-attr]  # not None: checked in the line above
        value = _fallback_byte(text) if text is not None and "ByteFallback" in kinds else None
        pieces.append(text if value is None else value)
    return PieceTable(pieces, {}, strip_first_space="Strip" in kinds)


def _fallback_byte(token: str) -> int | None:
    """Return 65 for `<0x41>`, None for anything else."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _check_table(table: DetokenizerTable, tokenizer: Tokenizer, tokens: Sequence[str | None]) -> None:
    # not the special ones: the library shows Llama's `</s>` if its file says that it is looked for in normalised text
    texts = [token_id for token_id, token in enumerate(tokens) if token is not None]
    for start in range(0, len(texts), 4096):
        ids = texts[start : start + 4096]
        expected = tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=True)
        for token_id, text in zip(ids, expected, strict=True):
            detokenizer = table.start()
            if detokenizer.push([token_id]) + detokenizer.flush() != text:
                raise StartupError(f"the tokenizer decodes id {token_id} in a way that is not supported")
