"""The parameters of requests and the messages of conversations, as types: what editors complete and mypy checks.

They are those that Sluice knows (`docs/api.md` says what each may be). What another server knows besides goes into
`extra_body`. None means "not given", and is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NotRequired, TypedDict

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_OWN_ARGUMENTS = ("model", "pace", "qoe", "idempotency_key")
_MIN_LIKENESS_RATIO = 0.7
"""A known name that is less like the unknown one is not worth a question."""


class TextPart(TypedDict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class SystemMessage(TypedDict):
    """What the model is told before everything else."""

    role: Literal["system", "developer"]
    content: str | Sequence[TextPart]
    name: NotRequired[str | None]


class UserMessage(TypedDict):
    """What the person says."""

    role: Literal["user"]
    content: str | Sequence[TextPart]
    name: NotRequired[str | None]


class CalledFunction(TypedDict):
    """What a call asks for."""

    name: str
    arguments: str
    """JSON, as the model wrote it: check it before it is used."""


class ToolCall(TypedDict):
    """A call of a tool, in an answer or in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """What the model said, and what it called."""

    role: Literal["assistant"]
    content: NotRequired[str | Sequence[TextPart] | None]
    refusal: NotRequired[str | None]
    """Taken where there is no content."""
    name: NotRequired[str | None]
    tool_calls: NotRequired[Sequence[ToolCall] | None]
    """Each is answered by a `ToolMessage` right behind."""


class ToolMessage(TypedDict):
    """The result of a call."""

    role: Literal["tool"]
    tool_call_id: str
    content: str | Sequence[TextPart]
    name: NotRequired[str | None]


ChatMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class Function(TypedDict):
    """What the model may call."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[Mapping[str, Any] | None]
    """JSON schema of the arguments."""
    strict: NotRequired[bool | None]
    """The arguments of a call have to match it."""


class FunctionTool(TypedDict):
    """A tool; there is no other kind."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """Names a function."""

    name: str


class NamedTool(TypedDict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StreamOptions(TypedDict, total=False):
    """Of an answer that is streamed."""

    include_usage: bool | None
    """Have the tokens counted; so they are unless `stream_options` is given."""


class SloLimits(TypedDict, total=False):
    """Limits that a request is to keep, in seconds."""

    ttft_s: float | None
    tpot_s: float | None


class NamedSchema(TypedDict):
    """A JSON schema, as OpenAI has it."""

    name: str
    schema: Mapping[str, Any]
    strict: NotRequired[bool | None]
    """False: a `oneOf` whose schemas may overlap is taken as `anyOf`, and the answer says so."""
    description: NotRequired[str | None]


class PlainFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(TypedDict):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = PlainFormat | SchemaFormat


class StructuredOutputs(TypedDict, total=False):
    """What the answer is held to, as vLLM names it; one of them."""

    json: Mapping[str, Any] | str | None
    """A JSON schema, or its text."""
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    """Lark or GBNF."""


class CommonParams(TypedDict, total=False):
    """What chats and completions share."""

    n: int | None
    """Choices; 1 where the answer is streamed."""
    best_of: int | None
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    """Token id -> what is added to its logit."""
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    stream_options: StreamOptions | None
    service_tier: ServiceTier | None
    slo: SloLimits | None
    cache_salt: str | None
    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    modalities: Sequence[Literal["text"]] | None
    user: str | None
    metadata: Mapping[str, str] | None
    extra_body: Mapping[str, Any] | None
    """Fields that only another server knows; of one that is given here too, this value is sent."""


class ChatParams(CommonParams, total=False):
    """What `chat` and `chat_once` take besides their own arguments."""

    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, bool | float | str | None] | None
    reasoning_effort: ReasoningEffort | None
    thinking_token_budget: int | None
    continue_final_message: bool | None
    """The answer goes on with the last message, the assistant's own."""
    add_generation_prompt: bool | None
    tools: Sequence[FunctionTool] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    """False: an answer has one call at most."""
    store: bool | None
    prompt_cache_key: str | None
    safety_identifier: str | None


class CompletionParams(CommonParams, total=False):
    """What `complete` and `complete_once` take besides their own arguments."""

    logprobs: int | None
    """Alternatives per token."""
    echo: bool | None


def chat_fields(params: ChatParams) -> dict[str, Any]:
    """The fields of a chat request's body that were given.

    Raises:
        TypeError: one has a name that is not known.
    """
    return _fields(params, ChatParams.__optional_keys__)


def completion_fields(params: CompletionParams) -> dict[str, Any]:
    """The fields of a completion request's body that were given; see `chat_fields`."""
    return _fields(params, CompletionParams.__optional_keys__)


def _fields(params: Mapping[str, object], known: frozenset[str]) -> dict[str, Any]:
    for name in params.keys() - known:
        raise TypeError(f"unknown parameter '{name}'{_hint(name, known)}")
    given = {name: value for name, value in params.items() if value is not None}
    extra = given.pop("extra_body", {})
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra_body must be a mapping, not {type(extra).__name__}")
    return {**given, **extra}


def _hint(name: str, known: frozenset[str]) -> str:
    if name == "stream":
        return ": chat and complete always stream, chat_once and complete_once never do"
    alike = get_close_matches(name, [*sorted(known), *_OWN_ARGUMENTS], n=1, cutoff=_MIN_LIKENESS_RATIO)
    return f"; did you mean '{alike[0]}'?" if alike else "; what another server knows goes into extra_body"
