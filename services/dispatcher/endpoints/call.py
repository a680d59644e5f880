"""One checked request, its prompts and choices: what the endpoints hand to `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.dispatcher.access.grants import Grant
from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.answers.event_ids import Seen
from services.dispatcher.answers.idempotency import Retry
from services.dispatcher.endpoints.params import Params
from services.dispatcher.session.request import FailureCode, RequestFailedError
from services.dispatcher.session.session import Session
from services.dispatcher.text.thinking import ThinkStage, ThinkTags
from services.dispatcher.text.tools import ToolUse
from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent to a worker, and what of it the answer repeats."""

    packed: bytes
    """Token ids, as a submission carries them (`shared.messages.request.pack_token_ids`)."""
    echo: str = ""
    """Text that stands before that of each of its choices (`echo`)."""
    stage: ThinkStage = ThinkStage.SPEAKING
    """Where its answers begin, if thinking is told apart; in completions it is not."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.packed) // 4


@dataclass(slots=True)
class Fate:
    """How a request ends, for metrics and the log."""

    finish: str = "cancelled"
    """See `RequestRecord.finish`; until something else is known: the client may leave at any await."""


class Stopper:
    """Ends a request from outside: by its sender's word, or because a newer connection asks for its answer."""

    def __init__(self) -> None:
        self.code: FailureCode | None = None
        """Why it was stopped; None while it was not."""
        self._scopes: dict[asyncio.Timeout, None] = {}

    def stop(self, code: FailureCode) -> None:
        """End every wait of the request. The first reason stays."""
        if self.code is None:
            self.code = code
        now_s = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now_s)
        self._scopes.clear()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Whatever waits in here ends when the request is stopped.

        Raises:
            RequestFailedError: it was stopped.
        """
        if self.code is not None:
            raise RequestFailedError(self.code)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes[scope] = None
                try:
                    yield
                finally:
                    self._scopes.pop(scope, None)
        except TimeoutError:
            if not scope.expired() or self.code is None:
                raise
            raise RequestFailedError(self.code) from None


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """One checked request."""

    request_id: RequestId
    public_id: str
    """What `x-request-id` says."""
    is_chat: bool
    params: Params
    encode: Callable[[], list[Prompt]]
    """Makes the prompts; runs off the event loop."""
    num_prompts: int
    num_chars: int
    """Characters of the longest prompt."""
    prompt_param: str
    """`messages` or `prompt`: what an error about the prompt names."""
    default_max_tokens: int | None
    """None: as many as the context holds."""
    cache_salt: str
    grant: Grant
    """Of who asks."""
    arrival_s: float
    created_unix_s: int
    tool_use: ToolUse | None = None
    """None: calls of tools are not looked for in its answers."""
    retry: Retry | None = None
    """None: the client gave no key."""
    seen: Seen = ()
    """What the client has of each choice; of a stream that cannot be resumed there is nothing to say."""
    stopper: Stopper = field(default_factory=Stopper)
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer, besides the usual ones; known once the request is admitted."""
    fate: Fate = field(default_factory=Fate)
    address: str | None = None
    """Of whom its connection counts for; None: it shares one with others."""

    @property
    def num_choices(self) -> int:
        """Answers in all, over all prompts."""
        return self.num_prompts * self.params.num_choices

    @property
    def caller(self) -> str:
        """Who asks: nobody else can cancel it, or ask for its answer."""
        return self.grant.identity

    @property
    def answer_id(self) -> str:
        """The `id` of the answer."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"

    @property
    def is_resumable(self) -> bool:
        """Whether its events carry ids."""
        return bool(self.seen)

    @property
    def endpoint(self) -> str:
        """For metrics and logs."""
        return "chat" if self.is_chat else "completions"


@dataclass(slots=True)
class Choice:
    """One of the `n` answers to a prompt."""

    index: int
    """In the request: prompt by prompt."""
    text: AnswerText
    parent: Choice | None
    """The first choice of the same prompt; None if this is it."""
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """A worker has taken it, or none will."""
    echo: str = ""
    """Text that stands before its own."""
    session: Session | None = None
    """None until the request is admitted."""
    failure: FailureCode | None = None
    """Why it has no whole answer; known at its end."""
    objection: FailureCode | None = None
    """Why its reader ended it, if not by a stop string."""

    def begin(self, session: Session, prompt: Prompt, tags: ThinkTags | None) -> None:
        """The request is admitted.

        Args:
            session: the choice's.
            prompt: its own.
            tags: of the model; None: its thinking is not told apart.
        """
        self.session = session
        self.echo = prompt.echo
        if tags is not None:
            self.text.split_thinking(tags, prompt.stage)

    @property
    def opened(self) -> Session:
        """The session of an admitted request."""
        assert self.session is not None, "the request was not admitted"
        return self.session
