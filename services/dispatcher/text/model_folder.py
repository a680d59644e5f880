"""What the dispatcher reads from a model's folder: tokenizer, chat template, and two facts of the configuration.

Weights are never opened here, and nothing of the folder is executed except the chat template, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from shared.errors import StartupError
from shared.model_families import DEFAULTS, family_of
from shared.model_files import COPY_AGAIN, MAX_COUNT, read_object, special_tokens, tokenizer_file
from shared.reading import InputFile, is_folder
from shared.sizes import describe_number

MAX_TEMPLATE_CHARS = 200_000
"""Longest chat template."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The parts of a checkpoint that text needs."""

    tokenizer_json: str
    """Contents of `tokenizer.json`."""
    template: str | None
    """Source of the chat template; None for a model without one (it completes, but does not chat)."""
    template_path: Path | None
    """Where the template stands."""
    tool_template: str | None
    """Source of another one for conversations with tools (`tool_use`); None: there is none of its own."""
    tool_template_path: Path | None
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, … as the chat template sees them."""
    added_tokens: Mapping[int, AddedToken]
    """Added tokens by id, from beside `tokenizer.json`."""
    added_tokens_win: bool
    """Their flags go before those in `tokenizer.json`."""
    max_model_len: int
    """The checkpoint's own context, in tokens; 0 if its configuration does not say."""
    vocab_size: int
    """Rows of the embedding; 0 if the configuration does not say."""


def read_model_folder(folder: Path) -> ModelFolder:
    """Return what stands in the folder.

    Raises:
        StartupError: a file is missing, too large or malformed; the text names it.
    """
    if not is_folder(folder):
        raise StartupError(
            f"there is no model folder {folder}", "Give --model a folder with config.json and tokenizer.json"
        )
    config = read_object(folder / "config.json")
    config = {**DEFAULTS.get(family_of(config) or "", {}), **config}
    tokenizer_json = tokenizer_file(folder).read_text()
    tokenizer_config = read_object(folder / "tokenizer_config.json", required=False)
    older = read_object(folder / "special_tokens_map.json", required=False)
    named = special_tokens(tokenizer_config, older)
    template, template_path = _find_template(folder, tokenizer_config, "default")
    tool_template, tool_template_path = _find_template(folder, tokenizer_config, "tool_use")
    return ModelFolder(
        tokenizer_json=tokenizer_json,
        template=template,
        template_path=template_path,
        tool_template=tool_template,
        tool_template_path=tool_template_path,
        special_tokens=named,
        added_tokens=_added_tokens(folder, tokenizer_config, named),
        added_tokens_win="added_tokens_decoder" in tokenizer_config,
        max_model_len=_positive(config, "max_position_embeddings"),
        vocab_size=_positive(config, "vocab_size"),
    )


def _find_template(folder: Path, tokenizer_config: Mapping[str, Any], name: str) -> tuple[str | None, Path | None]:
    """Return the template as transformers finds it, a file first, then the tokenizer's configuration; and where.

    Of several by name, `default` is the one for plain chat; one that stands alone is that too.
    """
    alone = [folder / "chat_template.jinja"] if name == "default" else []
    for path in (folder / "additional_chat_templates" / f"{name}.jinja", *alone):
        file = InputFile(path, 4 * MAX_TEMPLATE_CHARS, hint=COPY_AGAIN)
        if file.exists():
            return _check_template(file.read_text(), path), path
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = [item for item in source if isinstance(item, dict) and item.get("name") == name]
        source = named[-1].get("template") if named else None
    elif isinstance(source, dict):
        source = source.get(name)
    elif name != "default":
        source = None
    if source is None:
        return None, None
    path = folder / "tokenizer_config.json"
    return _check_template(source, path), path


def _added_tokens(folder: Path, tokenizer_config: Mapping[str, Any], named: Mapping[str, str]) -> dict[int, AddedToken]:
    """Return the added tokens that the tokenizer's configuration lists, else those of the oldest folders' own file."""
    path = folder / "tokenizer_config.json"
    try:
        if "added_tokens_decoder" in tokenizer_config:
            entries = tokenizer_config["added_tokens_decoder"].items()
            return {int(token_id): AddedToken(**entry) for token_id, entry in entries}
        extra = tokenizer_config.get("extra_special_tokens") or tokenizer_config.get("additional_special_tokens") or ()
        texts = extra.values() if isinstance(extra, dict) else extra
        special = {*named.values(), *(text for text in texts if isinstance(text, str))}
        path = folder / "added_tokens.json"
        return {
            int(token_id): AddedToken(text, special=text in special, normalized=text not in special)
            for text, token_id in read_object(path, required=False).items()
        }
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StartupError(f"the added tokens in {path} cannot be read ({str(error)[:200]})", COPY_AGAIN) from None


def _check_template(source: object, path: Path) -> str:
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS:
        raise StartupError(f"the chat template in {path} is not a text of at most {MAX_TEMPLATE_CHARS} characters")
    return source


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return 0
    if value > MAX_COUNT:
        raise StartupError(f"config.json: {name} is {describe_number(value)}, must be at most {MAX_COUNT}", COPY_AGAIN)
    return value
