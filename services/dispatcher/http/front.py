"""What every endpoint needs, in one place; built once per process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from services.dispatcher.access.access import Access
from services.dispatcher.access.grants import Grant
from services.dispatcher.answers.live import LiveCalls
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.endpoints.params import ParamRules
from services.dispatcher.http.doorway import Doorway
from services.dispatcher.http.sockets import Sockets
from services.dispatcher.http.sse import EventStreams
from services.dispatcher.limits.tenants import Tenants
from services.dispatcher.metrics import DispatcherMetrics
from services.dispatcher.session.sessions import Sessions
from services.dispatcher.text.grammar_trials import GrammarTrials
from services.dispatcher.text.pool import TextPool
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.thinking import ThinkTags
from services.dispatcher.text.tool_forms import ModelCalls
from shared.browsers import BrowserRules
from shared.messages.request import MAX_PROMPT_TOKENS
from shared.process.log import get_logger
from shared.transport.bus import Bus

_log = get_logger()

MAX_WARNED: Final = 1000
"""Names of unknown parameters that are remembered."""


class UnknownNames:
    """Warns once about each parameter that is ignored."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def note(self, given: Iterable[str], known: frozenset[str]) -> None:
        """Look at the names of one request."""
        for name in given:
            if name not in known and name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                _log.warning("parameter_ignored", name=name[:64])


@dataclass(frozen=True, slots=True)
class Front:
    """The parts that endpoints use."""

    settings: DispatcherSettings
    bus: Bus
    codec: PromptCodec
    think_tags: ThinkTags | None
    """None: the model's thinking is not told apart."""
    model_calls: ModelCalls | None
    """None: it is not known how the model calls tools."""
    pool: TextPool
    bodies: TextPool
    """Of one thread, which reads long bodies: while it does, the event loop has its turns between two long calls."""
    trials: GrammarTrials
    sessions: Sessions
    streams: EventStreams
    sockets: Sockets
    live: LiveCalls
    metrics: DispatcherMetrics
    max_model_len: int
    """The checkpoint's own context, in tokens; workers may take less."""
    created_unix_s: int
    """When this process started."""
    now: Callable[[], float]
    """The event loop's clock."""
    unix_now: Callable[[], float]
    draw_seed: Callable[[], int]
    rules: ParamRules
    access: Access
    tenants: Tenants
    doorway: Doorway
    browsers: BrowserRules
    unknown_names: UnknownNames = field(default_factory=UnknownNames)

    @property
    def model(self) -> str:
        """Name under which the model answers."""
        return self.settings.model_name()

    @property
    def models(self) -> tuple[str, ...]:
        """Names under which the model may be asked; the first is the one above."""
        return self.settings.model_names()

    def rules_for(self, grant: Grant) -> ParamRules:
        """Return what is allowed to this sender."""
        max_tier = grant.tenant.max_tier
        return self.rules if max_tier is self.rules.max_tier else replace(self.rules, max_tier=max_tier)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of prompt and output together: what every worker holds, and one message carries."""
        return min(self.sessions.cluster.max_request_tokens(self.max_model_len), MAX_PROMPT_TOKENS)
