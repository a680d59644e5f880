"""`sluice chat`: a conversation in the terminal. Also reads messages from a pipe, one per line."""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cli.answer import describe_answer, show_answer, start_answer
from cli.chat_options import Pacing
from cli.console import Console
from cli.exit_codes import DONE, FAILED, UNREACHABLE, CommandError
from cli.http import check_url, refusal_hint
from sluice_client.client import SluiceClient
from sluice_client.errors import APIStatusError, SluiceClientError

MAX_MESSAGES = 100
"""Messages of the conversation that are sent along; older ones are left out."""


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to talk to."""

    url: str
    model: str
    """Empty for the first one of the server."""
    api_key: str
    """Empty for none."""


class Chat:
    """One conversation with one server.

    Args:
        runner: of the event loop; its Ctrl-C cancels what runs.
        console: for prompts and figures; answers go to stdout.
        server: whom to talk to.
        pacing: of what is shown.
    """

    def __init__(self, runner: asyncio.Runner, console: Console, server: Server, pacing: Pacing) -> None:
        self._runner = runner
        self._console = console
        self._server = server
        self._pacing = pacing
        self._history: list[dict[str, Any]] = []
        self._client: SluiceClient | None = None

    def connect(self) -> str:
        """Return the model's name.

        Raises:
            CommandError: nothing answers there, or it serves no such model.
        """
        return self._runner.run(self._connect())

    def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._runner.run(self._client.aclose())

    def say(self, text: str) -> None:
        """Send a message and show the answer; both become part of the conversation.

        Raises:
            CommandError: the answer broke off.
            KeyboardInterrupt: the person stopped it; the server was told, and the text so far is kept.
        """
        self._history.append({"role": "user", "content": text})
        assert self._client is not None, "connected"
        answer = start_answer(self._client, self._history[-MAX_MESSAGES:], pacing=self._pacing)
        try:
            self._runner.run(show_answer(answer, sys.stdout))
        finally:
            self._history.append({"role": "assistant", "content": answer.text})
        self._console.line(self._console.style(describe_answer(answer), "dim"))

    async def _connect(self) -> str:
        url, model = self._server.url, self._server.model
        self._client = SluiceClient(url, model=model or None, api_key=self._server.api_key or None)
        await self._client.__aenter__()
        try:
            models = await self._client.models()
        except APIStatusError as error:
            hint = refusal_hint(error.code or "", "Give a key with --api-key, or set SLUICE_API_KEY")
            hint = hint if error.status in (401, 403) else ""
            raise CommandError(f"{url} refuses to talk: {error}", hint, FAILED) from error
        except SluiceClientError as error:
            hint = "Start a cluster with `sluice up`, or name another with --url"
            raise CommandError(f"nothing to talk to at {url}: {error}", hint, UNREACHABLE) from error
        if model and model not in models:
            raise CommandError(f"{url} does not serve '{model}'", f"It serves: {', '.join(models)}", FAILED)
        return model or (models[0] if models else "")


def run_chat(server: Server, console: Console, pacing: Pacing) -> int:
    """Talk until the end of input; return the exit code.

    Raises:
        CommandError: it is no URL, or nothing answers there; with input from a pipe, also when an answer breaks off.
    """
    check_url(server.url)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):  # line editing and history of what was typed
            importlib.import_module("readline")
    with asyncio.Runner() as runner:
        chat = Chat(runner, console, server, pacing)
        try:
            name = chat.connect()
            if is_interactive:
                console.line(f"{name} at {server.url}; Ctrl-C stops an answer, Ctrl-D leaves")
            _converse(chat, console, is_interactive=is_interactive)
        finally:
            chat.close()
    return DONE


def _converse(chat: Chat, console: Console, *, is_interactive: bool) -> None:
    while (text := _read(console, is_interactive=is_interactive)) is not None:
        if not text:
            continue
        try:
            chat.say(text)
        except KeyboardInterrupt:
            console.line(console.style("stopped; Ctrl-C again leaves", "dim"))
        except CommandError as error:
            if not is_interactive:
                raise
            console.line(str(error))


def _read(console: Console, *, is_interactive: bool) -> str | None:
    """Return the next message, or None at the end of input or on Ctrl-C."""
    try:
        return input("> " if is_interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        if is_interactive:
            console.line()
        return None
