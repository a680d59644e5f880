"""Values that several services speak about: sampling, the reader's target, limits of latency, reasons to finish.

Frozen and validated (pydantic), because they arrive from outside; a service that needs them in a hot loop copies the
numbers into its own columns once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 1024
"""Most tokens with a bias in one request."""
MAX_TOP_LOGPROBS = 20
"""Most alternatives whose log-probabilities go with a token."""
MAX_THINKING_SPEED = 20.0
"""Most tokens of thinking per second that are wanted: the fastest reader does not read more."""


class Value(BaseModel):
    """A frozen value object; unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FinishReason(IntEnum):
    """Why a sequence ended; one byte on the wire. NONE means that it goes on."""

    NONE = 0
    STOP = 1  # an EOS or a stop id was sampled; that token is the last of the stream
    LENGTH = 2  # max_tokens, or the model's context, is used up
    CANCELLED = 3  # the dispatcher asked for it
    ERROR = 4  # the sequence failed twice in a step of its own; the other sequences went on
    SUPERSEDED = 5  # a newer attempt of the request took the sequence over, for another dispatcher
    RELEASED = 6  # its worker has no place for it any more: it goes on at another one


class ReaderTarget(Value):
    """The reader's schedule (Andes, section 2): when the first token is expected, and how fast the reader reads."""

    ttft_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """Expected time to the first token, seconds from the request's arrival."""
    speed_tokens_per_s: Annotated[float, Field(gt=0, le=10_000)] = 4.8
    """Expected speed of digestion, tokens per second."""
    thinking_speed_tokens_per_s: Annotated[float, Field(gt=0, le=MAX_THINKING_SPEED)] = MAX_THINKING_SPEED
    """Speed at which thinking is wanted, tokens per second: nobody reads it, and the answer waits for its end."""


class LatencyLimits(Value):
    """What a request is to keep (its SLO); None: nobody has said."""

    ttft_s: Annotated[float | None, Field(gt=0, le=3600)] = None
    """Longest time to the first token, seconds from the request's arrival."""
    tpot_s: Annotated[float | None, Field(gt=0, le=3600)] = None
    """Longest mean time per further token, seconds."""


class Thinking(Value):
    """An answer that may begin with thinking, told apart by tags that are one token each.

    It ends with the first closing tag; where the prompt has not opened it, it begins if the first token opens it.
    """

    opening_id: Annotated[int, Field(ge=0, lt=2**31)]
    closing_id: Annotated[int, Field(ge=0, lt=2**31)]
    is_open: bool = False
    """The prompt has opened it."""
    budget: Annotated[int | None, Field(ge=0)] = None
    """Most tokens between the tags; behind them the closing one is forced. None: as many as come."""

    def count(self, tokens: Sequence[int]) -> int | None:
        """Return how many of an answer's first tokens are its thinking, tags included; None while that may go on."""
        if not self.is_open and tokens and tokens[0] != self.opening_id:
            return 0
        return tokens.index(self.closing_id) + 1 if self.closing_id in tokens else None

    def is_spent(self, tokens: Sequence[int]) -> bool:
        """Return whether the closing tag comes next: an answer with these tokens thinks, and its budget is used up."""
        if self.budget is None or self.count(tokens) is not None:
            return False
        return len(tokens) - (not self.is_open) == self.budget


MAX_GRAMMAR_BYTES = 700_000
"""Longest grammar that an answer can be held to: it travels in one message with what is not uploaded."""

MAX_PREEMPTIONS = 65_535
"""Preemptions of one request that are counted; more count as so many."""


class SamplingParams(Value):
    """How the next token is chosen and when a sequence stops; complete, so that any worker continues it alike."""

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens to generate; the dispatcher has already cut it to the model's context."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 means greedy: the largest logit, the lowest id on a tie."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep the tokens whose probability is at least this share of the likeliest one's; 0 keeps all."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of each token that the output has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit once for each time that the output has it."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the positive and multiplies the negative logits of tokens that the prompt or the output has."""
    logit_bias: Annotated[
        tuple[tuple[Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(ge=-100, le=100)]], ...],
        Field(max_length=MAX_LOGIT_BIAS),
    ] = ()
    """Added to the logits of these ids; of an id that occurs twice, both count."""
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] = 0
    """Key of the counter-based generator: the draw depends on (seed, position) alone."""
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=64)] = ()
    """Ids that end the sequence, besides the model's own EOS ids."""
    ignore_eos: bool = False
    """Go on past the model's EOS ids (benchmarks, simulation)."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No EOS and no stop id before this many outputs: they cannot be drawn."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    """Report the chosen token's log-probability and this many likeliest tokens; None: nothing. See `TokenLogprob`."""
    thinking: Thinking | None = None
    """None: nothing of the answer is thinking, or it is not told apart by tokens."""
    grammar: Annotated[bytes, Field(max_length=MAX_GRAMMAR_BYTES)] = b""
    """What the answer has to match, behind its thinking: a grammar as llguidance takes it (JSON or Lark), UTF-8.
    No token that breaks it can be drawn, and the answer ends where the grammar ends. Empty: it is free. `min_tokens`,
    `ignore_eos` and stop ids do not come with it."""

    @property
    def penalises(self) -> bool:
        """Whether tokens are more or less likely for having come before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def follows_tokens(self) -> bool:
        """Whether the choice of a token depends on which tokens came before, beyond the model's own logits."""
        return self.penalises or self.is_guided

    @property
    def is_guided(self) -> bool:
        """Whether tokens are excluded by those before."""
        return bool(self.grammar) or (self.thinking is not None and self.thinking.budget is not None)
