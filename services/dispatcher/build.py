"""Wires the parts above the bus: text, streams, metrics, and the HTTP server on top of a `DispatcherService`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.dispatcher.access.access import Access
from services.dispatcher.answers.live import LiveCalls
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.endpoints.params import ParamRules
from services.dispatcher.http.doorway import Doorway, claim_files
from services.dispatcher.http.front import Front
from services.dispatcher.http.server import HttpServer
from services.dispatcher.http.sockets import Sockets
from services.dispatcher.http.sse import EventStreams
from services.dispatcher.http.unsent import ReaderLimits
from services.dispatcher.limits.tenants import Tenants
from services.dispatcher.metrics import DispatcherMetrics
from services.dispatcher.service import DispatcherService
from services.dispatcher.text.generation_config import SamplingDefaults, read_sampling_defaults
from services.dispatcher.text.grammar_trials import GrammarTrials
from services.dispatcher.text.model_folder import ModelFolder, read_model_folder
from services.dispatcher.text.pool import TextPool
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.template import MAX_MESSAGES, ChatTemplate
from services.dispatcher.text.template_trial import find_max_messages
from services.dispatcher.text.thinking import ThinkTags, find_think_tags
from services.dispatcher.text.tool_forms import ModelCalls, find_model_calls
from shared.browsers import BrowserRules
from shared.errors import StartupError
from shared.ids import new_incarnation
from shared.process.log import get_logger
from shared.process.tasks import TaskOwner
from shared.systems import UnknownSystemError, find_live_system
from shared.transport.bus import Bus

_log = get_logger()


@dataclass(frozen=True, slots=True)
class ModelText:
    """What was loaded from the model's folder."""

    folder: ModelFolder
    codec: PromptCodec
    defaults: SamplingDefaults
    think_tags: ThinkTags | None
    """None: the model's thinking is not told apart."""
    model_calls: ModelCalls | None
    """None: it is not known how the model calls tools."""


def load_text(settings: DispatcherSettings) -> ModelText:
    """Read tokenizer and template; takes seconds for a large vocabulary.

    Raises:
        StartupError: something of it is missing or cannot be used; also an unknown system.
    """
    try:
        find_live_system(settings.system)
    except UnknownSystemError as error:
        raise StartupError(str(error), "Choose one with --system") from None
    folder = read_model_folder(settings.model)
    from_model = settings.generation_config == "auto"
    defaults = read_sampling_defaults(settings.model) if from_model else SamplingDefaults()
    template = _load_template(folder, folder.template, folder.template_path)
    codec = PromptCodec(folder, template, _load_template(folder, folder.tool_template, folder.tool_template_path))
    _say_unknown(codec)
    tags = find_think_tags(settings.reasoning_parser, codec)
    return ModelText(folder, codec, defaults, tags, find_model_calls(settings.tool_parser, codec))


def _load_template(folder: ModelFolder, source: str | None, path: Path | None) -> ChatTemplate | None:
    """Return the template, tried before it is compiled here."""
    if source is None:
        return None
    max_messages = find_max_messages(source, tuple(sorted(folder.special_tokens.items())), str(path))
    if max_messages < MAX_MESSAGES:
        _log.warning("template_is_slow", max_messages=max_messages, meaning="longer conversations are refused")
    template = ChatTemplate(source, folder.special_tokens, max_messages=max_messages)
    if not template.forms.takes_some:
        _log.warning("template_refuses", meaning="it takes no conversation of those that were tried")
    if template.forms.lost_roles:
        roles = sorted(template.forms.lost_roles)
        _log.warning("template_leaves_out", roles=roles, meaning="conversations with such messages are refused")
    return template


def _say_unknown(codec: PromptCodec) -> None:
    """Say what the tokenizer knows and the model does not."""
    if codec.unknown_tokens:
        tokens, said = sorted(codec.unknown_tokens), "the model has no such ids: they are plain text"
        _log.warning("tokens_without_ids", count=len(tokens), first=tokens[0], num_ids=codec.vocab_size, meaning=said)
    if codec.has_unknown_pieces:
        said = "texts that need a piece without an id of the model are refused"
        _log.warning("vocabulary_beyond_the_model", num_ids=codec.vocab_size, meaning=said)


def _doorway(settings: DispatcherSettings) -> Doorway:
    wanted = settings.max_connections
    possible = claim_files(wanted)
    if possible < wanted:
        _log.warning("few_connections", wanted=wanted, possible=possible, limited_by="ulimit -n")
    return Doorway(possible, settings.max_connections_per_address)


def _browser_rules(settings: DispatcherSettings) -> BrowserRules:
    names = None if settings.has_keys else (settings.host, *settings.allow_host)
    return BrowserRules(names, settings.allow_origin)


def _trials(settings: DispatcherSettings, text: ModelText) -> GrammarTrials:
    end = text.codec.tokenizer.token_to_id(text.folder.special_tokens.get("eos_token", ""))
    return GrammarTrials(settings.model, text.codec.vocab_size, end or 0)


class Dispatcher:
    """A whole dispatcher: the service on the bus, and HTTP in front of it.

    Args:
        settings: checked.
        bus: connected; the caller closes it.
        text: from `load_text`.
        on_failure: called when a task of it dies.

    Raises:
        ConfigError: the file of keys cannot be used (`Access`).
        StartupError: the process may not open files enough.
    """

    def __init__(
        self,
        settings: DispatcherSettings,
        bus: Bus,
        text: ModelText,
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._settings = settings
        self._tasks = TaskOwner(on_failure)
        self.service = DispatcherService(settings, bus, on_failure, incarnation=new_incarnation())
        now = asyncio.get_running_loop().time
        self.front = Front(
            settings=settings,
            bus=bus,
            codec=text.codec,
            think_tags=text.think_tags,
            model_calls=text.model_calls,
            pool=TextPool(
                settings.tokenizer_threads,
                settings.max_tokenizing,
                max_flex=settings.max_queued_flex,
                flex_memory=settings.flex_memory,
            ),
            bodies=TextPool(
                1, settings.max_tokenizing, max_flex=settings.max_queued_flex, flex_memory=settings.flex_memory
            ),
            trials=_trials(settings, text),
            sessions=self.service.sessions,
            streams=EventStreams(settings.keep_alive_s, ReaderLimits(settings.write_limit_s, settings.max_unsent), now),
            sockets=Sockets(settings.write_limit_s, lambda: self.service.sessions.draining, now),
            live=LiveCalls(self.service.sessions, now),
            metrics=DispatcherMetrics(settings.model_name(), settings.system),
            max_model_len=text.folder.max_model_len or 2**31 - 1,
            created_unix_s=int(time.time()),
            now=now,
            unix_now=time.time,
            draw_seed=lambda: secrets.randbits(63),
            rules=ParamRules(text.codec.vocab_size, text.defaults, min(settings.max_choices, settings.max_requests)),
            access=Access(settings.api_key, settings.api_keys_file, now, settings.api_keys_kept),
            tenants=Tenants(),
            doorway=_doorway(settings),
            browsers=_browser_rules(settings),
        )
        self.server = HttpServer(self.front)

    async def start(self) -> int:
        """Serve from now on; return the port.

        Raises:
            StartupError: the address cannot be used.
        """
        port = await self.server.start(self._settings.host, self._settings.port)
        await self.service.start()
        self._tasks.start(self.front.streams.sweep_forever(), name="streams")
        self._tasks.start(self.front.access.reload_forever(), name="keys")
        self._tasks.start(self.front.trials.run_forever(), name="grammar_trials")
        self._tasks.start(self.front.sockets.sweep_forever(), name="sockets")
        return port

    async def drain(self) -> None:
        """Refuse new requests and let the running ones end, up to the limit of the settings."""
        await self.service.drain(self._settings.drain_limit_s)

    async def stop(self) -> None:
        """End everything; requests that still run are cancelled at their workers."""
        self.service.sessions.draining = True
        await self.front.sockets.close()
        await self.server.close()
        await self._tasks.close()
        await self.service.stop()
        self.front.bodies.close()
        self.front.pool.close()
