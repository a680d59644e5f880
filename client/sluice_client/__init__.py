"""Streams answers evenly or at reading speed: QoE arithmetic, token pacer, and a streaming SDK.

Importing this package, `sluice_client.qoe` or `sluice_client.pacer` loads the standard library only; aiohttp comes with
a client, of either kind.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice_client.answer import Answer
    from sluice_client.answer_facts import AnswerFacts, Reply
    from sluice_client.async_answer import AsyncAnswer
    from sluice_client.async_client import AsyncSluiceClient
    from sluice_client.client import SluiceClient
    from sluice_client.errors import (
        APIConnectionError,
        APIResponseError,
        APIStatusError,
        APIStreamError,
        ConnectionLostError,
        IncompleteStreamError,
        ProtocolError,
        SluiceClientError,
    )
    from sluice_client.paced_stream import PacedStream
    from sluice_client.pacer import PacerStats, Piece, SmoothPacing, make_pacer
    from sluice_client.params import (
        AssistantMessage,
        ChatMessage,
        ChatParams,
        CompletionParams,
        FunctionTool,
        ReasoningEffort,
        ResponseFormat,
        ServiceTier,
        SloLimits,
        StreamOptions,
        StructuredOutputs,
        SystemMessage,
        TextPart,
        ToolCall,
        ToolChoice,
        ToolMessage,
        UserMessage,
    )
    from sluice_client.qoe import QoeState, QoeTarget
    from sluice_client.retry import RetryPolicy
    from sluice_client.transport import ClientLimits

__all__ = [
    "APIConnectionError",
    "APIResponseError",
    "APIStatusError",
    "APIStreamError",
    "Answer",
    "AnswerFacts",
    "AssistantMessage",
    "AsyncAnswer",
    "AsyncSluiceClient",
    "ChatMessage",
    "ChatParams",
    "ClientLimits",
    "CompletionParams",
    "ConnectionLostError",
    "FunctionTool",
    "IncompleteStreamError",
    "PacedStream",
    "PacerStats",
    "Piece",
    "ProtocolError",
    "QoeState",
    "QoeTarget",
    "ReasoningEffort",
    "Reply",
    "ResponseFormat",
    "RetryPolicy",
    "ServiceTier",
    "SloLimits",
    "SluiceClient",
    "SluiceClientError",
    "SmoothPacing",
    "StreamOptions",
    "StructuredOutputs",
    "SystemMessage",
    "TextPart",
    "ToolCall",
    "ToolChoice",
    "ToolMessage",
    "UserMessage",
    "make_pacer",
]

_MODULES = {
    "answer": ("Answer",),
    "answer_facts": ("AnswerFacts", "Reply"),
    "async_answer": ("AsyncAnswer",),
    "async_client": ("AsyncSluiceClient",),
    "client": ("SluiceClient",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "paced_stream": ("PacedStream",),
    "pacer": ("SmoothPacing", "PacerStats", "Piece", "make_pacer"),
    "params": (
        *("ChatMessage", "SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage", "TextPart"),
        *("FunctionTool", "ToolCall", "ToolChoice"),
        *("ChatParams", "CompletionParams", "ReasoningEffort", "ResponseFormat", "ServiceTier", "SloLimits"),
        *("StreamOptions", "StructuredOutputs"),
    ),
    "qoe": ("QoeState", "QoeTarget"),
    "retry": ("RetryPolicy",),
    "transport": ("ClientLimits",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name on its first use."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
