"""What is known of an answer: of one that was streamed, also while it comes, and of one that was not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, cast

from sluice_client.pacer import PacerStats
from sluice_client.params import ToolCall
from sluice_client.protocol import AnswerRecord


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that was not streamed."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None
    request_id: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The texts of all choices (`n`), by index; the first one is `text`."""
    logprobs: dict[str, Any] | None = None
    """Of the first choice, in OpenAI's format; None unless they were asked for."""


class AnswerFacts(ABC):
    """What `AsyncAnswer` and `Answer` say of themselves. Each is read in one step: another thread may write meanwhile.

    Args:
        record: of the answer, written while it comes.
    """

    def __init__(self, record: AnswerRecord) -> None:
        self.record = record
        """What the server said, as it said it."""

    @property
    def text(self) -> str:
        """Everything received so far; the whole answer after the end."""
        return "".join(self.record.parts)

    @property
    def reasoning(self) -> str:
        """The model's thinking, if the server sends it apart; never displayed."""
        return "".join(self.record.reasoning_parts)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Calls of tools, complete after the end; as they are they may go into a message of the assistant."""
        return [cast("ToolCall", call) for _, call in sorted(self.record.tool_calls.items())]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities received so far, in OpenAI's format: chat's entries, or the parts of a completion's."""
        return list(self.record.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the model ended; None while it has not."""
        return self.record.finish_reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts, if the server sent them."""
        return self.record.usage

    @property
    def request_id(self) -> str | None:
        """From the header x-request-id, else the id of the chunks."""
        return self.record.request_id

    @property
    def model(self) -> str | None:
        """The model that answers, as the server names it."""
        return self.record.model

    @property
    def server_stats(self) -> dict[str, Any]:
        """What a Sluice server says of the answer after its end: `qoe`, `ttft_s`, `tokens`; else empty."""
        return self.record.server_stats

    @property
    @abstractmethod
    def stats(self) -> PacerStats:
        """QoE, stalls and buffer, as seen here."""

    @property
    def qoe(self) -> float:
        """QoE of the answer as it reached this client, in [0, 1]; time counts from the sending of the request."""
        return self.stats.qoe

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the reader waited after the first token."""
        return self.stats.stall_seconds

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending the request to the first token; None while there is none."""
        return self.stats.ttft_s
