"""The tokenizer in a model's folder: its file, and the special tokens that the folder names (`eos_token` …)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared.reading import InputFile

MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024
"""Largest `tokenizer.json` (one of 256 k entries has about 35 MB)."""
MAX_TOKENIZER_PARTS: Final = 2**23
"""Names and texts in it, two for each entry and three for each merge."""
TOKENIZER_HINT: Final = "Save the tokenizer in the format of the tokenizers library"
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_file(folder: Path) -> InputFile:
    """Return the folder's `tokenizer.json`, to be read."""
    return InputFile(folder / "tokenizer.json", MAX_TOKENIZER_BYTES, hint=TOKENIZER_HINT)


def special_tokens(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token that has a name.

    Args:
        tokenizer_config: contents of `tokenizer_config.json`; goes first.
        special_tokens_map: contents of `special_tokens_map.json`, which older folders have beside it.
    """
    found: dict[str, str] = {}
    for name in _NAMES:
        for content in (special_tokens_map, tokenizer_config):
            value = content.get(name)
            if isinstance(value, dict):  # an AddedToken as JSON
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
    return found
