"""The special tokens that a model's folder names: `bos_token`, `eos_token`, and what else transformers calls so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
