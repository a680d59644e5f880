"""Finds the checkpoint that `--model` names: a folder, an id on the Hugging Face hub, or the model that ships."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shared.errors import StartupError

SHIPPED_NAME = "sluice-demo"
"""Name under which the model that ships is served."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
_NEEDED_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on this machine."""

    folder: Path
    name: str
    """Name under which it is served unless the person names another."""


def shipped_folder() -> Path:
    """Return where the model that ships lies, installed or in a checkout."""
    return Path(str(files("demo_model"))) / "model"


def find_model(text: str) -> Model:
    """Return the model; one that is not on this machine yet is downloaded.

    Raises:
        StartupError: there is no such model, or it cannot be had now.
    """
    if not text:
        return Model(_checked(shipped_folder(), "the model that ships is incomplete"), SHIPPED_NAME)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return Model(_checked(folder.resolve(), f"the folder {text} holds no model"), folder.resolve().name)
    if folder.exists():
        raise StartupError(f"{text} is not a folder", "Give the folder that holds config.json")
    if not _ID.match(text):
        raise StartupError(f"there is no folder {text}", "Give the folder that holds config.json, or an id owner/name")
    return Model(_checked(_download(text), f"{text} is not a model that can be served"), text)


def _checked(folder: Path, problem: str) -> Path:
    if not (folder / "config.json").is_file():
        raise StartupError(f"{problem}: config.json is missing in {folder}", "Give a folder in Hugging Face format")
    return folder


def _download(model_id: str) -> Path:
    """Return the folder of the hub's model, from its cache if it lies there."""
    from huggingface_hub import snapshot_download  # half a second, and needed for ids only
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_NEEDED_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not in the cache: ask the network
    except ValueError as error:
        raise StartupError(f"'{model_id}' is no model id: {error}", "Use owner/name") from error
    hint = "Check the id, or give a folder on this machine; a gated model needs HF_TOKEN"
    try:
        return Path(snapshot_download(model_id, allow_patterns=_NEEDED_FILES))
    except RepositoryNotFoundError as error:
        raise StartupError(f"there is no folder and no public model '{model_id}'", hint) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = type(error).__name__
        hint = "Go online once, or give a folder on this machine"
        raise StartupError(
            f"model '{model_id}' is not on this machine and cannot be fetched ({reason})", hint
        ) from error
