"""Finds the checkpoint that `--model` names: a folder, an id on the Hugging Face hub, or the model that ships."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cli.hub import MODEL_ID, ShowProgress, fetch, find_cached, parse_source
from shared.errors import StartupError
from shared.reading import check_text, is_file, is_folder

SHIPPED_NAME = "sluice-demo"
"""Name under which the model that ships is served."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on this machine."""

    folder: Path
    name: str
    """Name under which it is served unless the person names another."""


def shipped_folder() -> Path:
    """Return where the model that ships lies, installed or in a checkout."""
    return Path(str(files("demo_model"))) / "model"


def find_model(text: str, show: ShowProgress = lambda _what: lambda _num_bytes, _total: None) -> Model:
    """Return the model; one that is not on this machine yet is fetched from the hub.

    Args:
        text: a folder, an id on the hub (`owner/name`, `owner/name@revision`), or nothing for the model that ships.
        show: as of `fetch`.

    Raises:
        StartupError: there is no such model, or it cannot be had now.
    """
    if not text:
        return Model(_checked(shipped_folder(), "the model that ships is incomplete"), SHIPPED_NAME)
    folder = _expanded(text)
    if is_folder(folder):
        return Model(_checked(_utf8(folder.resolve()), f"the folder {text} holds no model"), folder.resolve().name)
    if os.path.lexists(folder):
        raise StartupError(f"{text} is not a folder", "Give the folder that holds config.json")
    if not MODEL_ID.match(text):
        hint = "Give the folder that holds config.json, or an id owner/name"
        raise StartupError(f"there is no folder {text}", hint, "no_such_model")
    source = parse_source(text)
    return Model(find_cached(source) or fetch(source, None, show), source.name)


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~name` of nobody
        return Path(text)


def _utf8(folder: Path) -> Path:
    """Return the folder, whose name is that of the model too: messages and logs carry it."""
    try:
        check_text(str(folder))
    except ValueError as error:
        raise StartupError(f"the folder {folder} cannot be used, {error}", "Give it another name") from None
    return folder


def _checked(folder: Path, problem: str) -> Path:
    if not is_file(folder / "config.json"):
        raise StartupError(
            f"{problem}: config.json is missing in {folder}", "Give a folder in Hugging Face format", "no_such_model"
        )
    return folder
