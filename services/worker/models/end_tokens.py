"""Which ids end a text: all that any file of the model's folder names.

    config.json, generation_config.json   eos_token_id: an id, or several
    tokenizer_config.json                 eos_token: a text, of which tokenizer.json says the id
    special_tokens_map.json               same, in older folders

Fine-tunes name theirs in any one of them, and leave their base model's in the others. An entry that is no id of the
model cannot be sampled: it is left out, and said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.worker.models.config_json import Config
from shared.errors import StartupError
from shared.model_files import COPY_AGAIN, MAX_TOKENIZER_PARTS, read_object, special_tokens, tokenizer_file

MAX_END_TOKENS: Final = 256
"""That one file names; models are published with some ten."""
_MAX_DIGITS: Final = 10


@dataclass(frozen=True, slots=True)
class EndTokens:
    """What ends a text."""

    ids: tuple[int, ...]
    """Ascending."""
    left_out: tuple[str, ...]
    """What is no id of the model, a sentence each."""


def read_end_tokens(model_dir: Path, config: Config, vocab_size: int) -> EndTokens:
    """Return the end tokens that the folder names.

    Args:
        model_dir: the folder.
        config: contents of its `config.json`.
        vocab_size: ids are below.

    Raises:
        StartupError: a file is broken, or names more than `MAX_END_TOKENS`.
    """
    ids: set[int] = set()
    left_out: list[str] = []
    generation = read_object(model_dir / "generation_config.json", required=False)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        value = content.get("eos_token_id")
        entries = value if isinstance(value, list) else [value]
        if len(entries) > MAX_END_TOKENS:
            raise StartupError(
                f"{name}: eos_token_id has {len(entries)} entries, more than {MAX_END_TOKENS}", COPY_AGAIN
            )
        for entry in entries:
            token_id = _as_id(entry)
            if token_id is not None and 0 <= token_id < vocab_size:
                ids.add(token_id)
            elif entry is not None:
                left_out.append(
                    f"{name}: eos_token_id {str(entry)[:80]!r} is no id of the model (0 to {vocab_size - 1})"
                )
    for name, token, token_id in _of_tokenizer(model_dir):
        if token_id is not None and 0 <= token_id < vocab_size:
            ids.add(token_id)
        else:
            what = "is in no vocabulary" if token_id is None else f"has id {token_id}, the model 0 to {vocab_size - 1}"
            left_out.append(f"{name}: eos_token {token[:80]!r} {what}")
    return EndTokens(tuple(sorted(ids)), tuple(left_out))


def _as_id(entry: object) -> int | None:
    if isinstance(entry, str) and entry.isascii() and entry.isdigit() and len(entry) <= _MAX_DIGITS:
        return int(entry)
    return entry if type(entry) is int else None


def _read_tokenizer(model_dir: Path) -> Config:
    file = tokenizer_file(model_dir)
    content = file.read_json(max_parts=MAX_TOKENIZER_PARTS) if file.exists() else {}
    return content if isinstance(content, dict) else {}


def _of_tokenizer(model_dir: Path) -> list[tuple[str, str, int | None]]:
    """Return the tokenizer's end tokens, each with the file that names it and its id.

    The id is that of tokenizer.json, else what older folders say.
    """
    config = read_object(model_dir / "tokenizer_config.json", required=False)
    older = read_object(model_dir / "special_tokens_map.json", required=False)
    files = {"special_tokens_map.json": special_tokens({}, older), "tokenizer_config.json": special_tokens(config, {})}
    tokens = {token: name for name, named in files.items() if (token := named.get("eos_token"))}
    if not tokens:
        return []
    decoder = config.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    objects = ((id_text, entry) for id_text, entry in entries if isinstance(entry, dict))
    listed = {entry["content"]: id_text for id_text, entry in objects if isinstance(entry.get("content"), str)}
    tokenizer, added = _read_tokenizer(model_dir), read_object(model_dir / "added_tokens.json", required=False)
    found: list[tuple[str, str, int | None]] = []
    for token, name in tokens.items():
        ids = (_as_id(value) for value in (_id_in(tokenizer, token), listed.get(token), added.get(token)))
        found.append((name, token, next((token_id for token_id in ids if token_id is not None), None)))
    return found


def _id_in(tokenizer: Config, token: str) -> object:
    """Return the token's id in the contents of tokenizer.json: among the added ones, else among the model's own."""
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token:
            return entry.get("id")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return vocabulary.get(token)
    pieces = vocabulary if isinstance(vocabulary, list) else ()  # of a unigram model: a piece and its score
    return next((i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [token]), None)
