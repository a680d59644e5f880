"""`sluice run`: a conversation with a model, and a cluster for as long as it takes if none serves it yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cli.chat import Server, run_chat
from cli.cluster.background import start_in_background
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.conversation import Talk
from cli.model import SHIPPED_NAME
from cli.run_file import find_runs
from cli.runs import run_down

STOP_LIMIT_S: Final = 200.0


def run_model(
    settings: UpSettings, flags: Mapping[str, Any], console: Console, talk: Talk, question: str | None
) -> int:
    """Talk with the model that the settings name; return the exit code.

    Args:
        settings: of the cluster that is started if none serves it; at a free port unless one is named.
        flags: from which they were made.
        console: where the person looks.
        talk: how the conversation is held.
        question: the only one; None: people, or a pipe, ask.
    """
    name = _name_of(settings)
    url = next((run.url for run in find_runs() if run.model == name), None)
    if url is not None:
        console.line(f"{name} is served at {url} already")
        return run_chat(Server(url, name, settings.api_key), console, talk, question)
    port = {} if "port" in settings.model_fields_set else {"port": "0"}
    code, started = start_in_background({**flags, **port}, console)
    if started is None:
        return code
    try:
        return run_chat(Server(str(started["url"]), name, settings.api_key), console, talk, question)
    finally:
        asyncio.run(run_down(str(started["url"]), console, is_all=False, limit_s=STOP_LIMIT_S))


def _name_of(settings: UpSettings) -> str:
    """Return the name under which the model is served, see `find_model`."""
    if settings.served_model_name:
        return settings.served_model_name[0]
    folder = Path(settings.model).expanduser()
    if not settings.model:
        return SHIPPED_NAME
    return folder.resolve().name if folder.is_dir() else settings.model.partition("@")[0]
