"""Files of a model's folder, as all who look into it read them: JSON, the tokenizer, the names of special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shared.reading import InputFile

MAX_JSON_BYTES: Final = 16 * 1024 * 1024
"""Largest JSON but for `tokenizer.json`: an index of a hundred thousand tensors."""
MAX_COUNT: Final = 2**31 - 1
"""Largest number of anything that a model has: so that what is multiplied has 64 bits."""
COPY_AGAIN: Final = "Copy the checkpoint again"
MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024
"""Largest `tokenizer.json` (one of 256 k entries has about 35 MB)."""
MAX_TOKENIZER_PARTS: Final = 2**23
"""Names and texts in it, two for each entry and three for each merge."""
TOKENIZER_HINT: Final = "Save the tokenizer in the format of the tokenizers library"
SPECIAL_TOKEN_NAMES: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Special tokens that have a name, which chat templates read."""


def read_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the JSON object in a small file of the folder; an empty one if it need not be there and is not.

    Raises:
        StartupError: it cannot be read, is too large, or holds no object.
    """
    file = InputFile(path, MAX_JSON_BYTES, hint=COPY_AGAIN)
    if not required and not file.exists():
        return {}
    value = file.read_json()
    if not isinstance(value, dict):
        raise file.error("holds no JSON object")
    return value


def tokenizer_file(folder: Path) -> InputFile:
    """Return the folder's `tokenizer.json`, to be read."""
    return InputFile(folder / "tokenizer.json", MAX_TOKENIZER_BYTES, hint=TOKENIZER_HINT)


def special_tokens(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token that has a name, as transformers does.

    Args:
        tokenizer_config: contents of `tokenizer_config.json`.
        special_tokens_map: contents of `special_tokens_map.json`, which older folders have beside it. It goes first,
            and is not looked at where the configuration knows the added tokens itself.
    """
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        older = {} if "added_tokens_decoder" in tokenizer_config else special_tokens_map
        for content in (tokenizer_config, older):
            value = content.get(name)
            if isinstance(value, dict):  # an AddedToken as JSON
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
    return found
