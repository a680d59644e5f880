"""Parameters that mean something, but not here: refused by name, unless their value asks for nothing.

Anything that no list here or in the endpoints knows is ignored, because clients send new names every month.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from services.dispatcher.endpoints.guided import GUIDES
from services.dispatcher.http.errors import unsupported

_IsNeutral = Callable[[Any], bool]


def _never(_value: Any) -> bool:
    return False


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(member is None for member in value.values())
    return value in ([], "")


def _is_false(value: Any) -> bool:
    return value is False


def _one_of(*neutral: Any) -> _IsNeutral:
    def is_neutral(value: Any) -> bool:
        return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)

    return is_neutral


_COMMON: Final[dict[str, _IsNeutral]] = {
    "length_penalty": _one_of(1, 1.0),
    "use_beam_search": _is_false,
    "prompt_logprobs": _is_false,  # 0 asks for those of the prompt's own tokens
    "logits_processors": _is_empty,
    "include_stop_str_in_output": _is_false,
    "truncate_prompt_tokens": _never,  # -1 cuts to the context what would be refused
    "allowed_token_ids": _is_empty,
    "bad_words": _one_of("", [], [""]),
}
_TEMPLATE: Final[dict[str, _IsNeutral]] = {
    "documents": _is_empty,
    "chat_template": _is_empty,
}
CHAT: Final[dict[str, _IsNeutral]] = {
    **_COMMON,
    **_TEMPLATE,
    "functions": _is_empty,
    "function_call": _one_of("none", "auto", ""),
    "add_special_tokens": _is_false,
    "audio": _is_empty,
    "prediction": _is_empty,
    "web_search_options": _never,  # {} asks for a search
    "echo": _is_false,
}
COMPLETIONS: Final[dict[str, _IsNeutral]] = {
    **_COMMON,
    "suffix": _is_empty,
    "prompt_embeds": _is_empty,
    "thinking_token_budget": _never,
}
TOKENIZE: Final[dict[str, _IsNeutral]] = _TEMPLATE

SHARED_NAMES: Final = (
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "service_tier", "qoe", "n", "best_of", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
    *("cache_salt", "modalities", "user", "metadata", "slo"),
    *GUIDES,
)
"""What both chat and completions know."""

_REASONS: Final = {
    "thinking_token_budget": "Completions know no thinking; chat does.",
    "chat_template": "Chat templates come with the model; a request cannot bring one.",
    "functions": "Functions of the old kind are not supported; use 'tools'.",
    "function_call": "Functions of the old kind are not supported; use 'tools' and 'tool_choice'.",
}


def refuse_unsupported(values: Mapping[str, Any], table: Mapping[str, _IsNeutral]) -> None:
    """Raise the 400 for the first parameter that asks for something that does not exist here."""
    for name, is_neutral in table.items():
        value = values.get(name)
        if value is not None and not is_neutral(value):
            raise unsupported(name, _REASONS.get(name, ""))
    modalities = values.get("modalities")
    if modalities is not None and modalities not in ([], ["text"]):
        raise unsupported("modalities", "Only the modality 'text' is supported.")
