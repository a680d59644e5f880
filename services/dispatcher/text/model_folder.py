"""What the dispatcher reads from a model's folder: tokenizer, chat template, and two facts of the configuration.

Weights are never opened here, and nothing of the folder is executed except the chat template, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, … as the chat template sees them."""
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
    template, template_path = _find_template(folder, tokenizer_config)
    return ModelFolder(
        tokenizer_json=tokenizer_json,
        template=template,
        template_path=template_path,
        special_tokens=special_tokens(tokenizer_config, older),
        max_model_len=_positive(config, "max_position_embeddings"),
        vocab_size=_positive(config, "vocab_size"),
    )


def _find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str | None, Path | None]:
    """Return the template as transformers finds it, the file first, then the tokenizer's configuration; and where."""
    file = InputFile(folder / "chat_template.jinja", 4 * MAX_TEMPLATE_CHARS, hint=COPY_AGAIN)
    if file.exists():
        return _check_template(file.read_text(), file.path), file.path
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several by name; `default` is the one for plain chat
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None, None
    path = folder / "tokenizer_config.json"
    return _check_template(source, path), path


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
