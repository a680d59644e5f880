"""`sluice chat`: a conversation in the terminal. Also reads messages from a pipe, one per line."""

from __future__ import annotations

import asyncio
import importlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cli.answer import describe_answer, show_answer, start_answer
from cli.console import Console
from cli.conversation import Conversation, Talk
from cli.exit_codes import DONE, FAILED, UNREACHABLE, CommandError
from cli.http import check_url, refusal_hint, topic_of
from sluice_client.async_client import AsyncSluiceClient
from sluice_client.errors import APIStatusError, SluiceClientError

QUOTES: Final = '"""'
LEAVE: Final = ("/bye", "/exit", "/quit")


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
        conversation: what is said.
    """

    def __init__(self, runner: asyncio.Runner, console: Console, server: Server, conversation: Conversation) -> None:
        self._runner = runner
        self._console = console
        self._server = server
        self._conversation = conversation
        self._client: AsyncSluiceClient | None = None

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
        """Send a message and show the answer; both become part of the conversation, unless nothing comes.

        Raises:
            CommandError: the answer broke off.
            KeyboardInterrupt: the person stopped it; the server was told, and the text so far is kept.
        """
        assert self._client is not None, "connected"
        talk = self._conversation.talk
        answer = start_answer(self._client, self._conversation.with_next(text), pacing=talk.pacing, **talk.params)
        try:
            self._runner.run(show_answer(answer, sys.stdout))
        finally:
            self._conversation.add(text, answer.text)
        self._console.line(self._console.style(describe_answer(answer), "dim"))

    async def _connect(self) -> str:
        url, model = self._server.url, self._server.model
        self._client = AsyncSluiceClient(url, model=model or None, api_key=self._server.api_key or None)
        await self._client.__aenter__()
        try:
            models = await self._client.models()
        except APIStatusError as error:
            hint = refusal_hint(error.code or "", "Give a key with --api-key, or set SLUICE_API_KEY")
            hint = hint if error.status in (401, 403) else ""
            raise CommandError(f"{url} refuses to talk: {error}", hint, FAILED, topic_of(error.code or "")) from error
        except SluiceClientError as error:
            hint = "Start a cluster with `sluice up`, or name another with --url"
            raise CommandError(f"nothing to talk to at {url}: {error}", hint, UNREACHABLE, "nothing_answers") from error
        if model and model not in models:
            raise CommandError(f"{url} does not serve '{model}'", f"It serves: {', '.join(models)}", FAILED)
        return model or (models[0] if models else "")


def run_chat(server: Server, console: Console, talk: Talk, question: str | None = None) -> int:
    """Talk until the end of input, or ask one question; return the exit code.

    Raises:
        CommandError: it is no URL, or nothing answers there; where nobody types, also when an answer breaks off.
    """
    check_url(server.url)
    is_interactive = question is None and sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):  # line editing and history of what was typed
            importlib.import_module("readline")
    conversation = Conversation(talk)
    with asyncio.Runner() as runner:
        chat = Chat(runner, console, server, conversation)
        try:
            name = chat.connect()
            if is_interactive:
                console.line(f"{name} at {server.url}; Ctrl-C stops an answer, /help tells more, Ctrl-D leaves")
                _converse(chat, conversation, console)
            else:
                for text in [question] if question is not None else filter(None, map(str.strip, sys.stdin)):
                    chat.say(text)
        finally:
            chat.close()
    return DONE


def _converse(chat: Chat, conversation: Conversation, console: Console) -> None:
    """Talk with who types, until they leave: neither Ctrl-C nor an answer that fails ends it."""
    while True:
        try:
            line = input("> ").strip()
            if line in LEAVE:
                return
            if line.startswith("/"):
                console.line(conversation.obey(line))
            elif text := _whole(line):
                chat.say(text)
        except KeyboardInterrupt:
            console.line(console.style("\nstopped; the conversation goes on, Ctrl-D leaves", "dim"))
        except CommandError as error:
            console.line(str(error))
        except EOFError:
            console.line()
            return


def _whole(line: str) -> str:
    """Return the message that a line begins: it alone, or up to the next three quotes if it begins with such.

    Raises:
        EOFError: of the input.
    """
    if not line.startswith(QUOTES):
        return line
    text = line.removeprefix(QUOTES)
    while not text.endswith(QUOTES):
        text += "\n" + input(". ").rstrip()
    return text.removesuffix(QUOTES).strip()
