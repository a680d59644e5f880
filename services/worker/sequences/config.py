"""Limits of one engine, and what it is told about a new sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from services.worker.contract.arrays import U32
from shared.api_keys import Tier
from shared.ids import RequestId, StreamId
from shared.types import LatencyLimits, ReaderTarget, SamplingParams

EMPTY_U32: U32 = np.zeros(0, dtype=np.uint32)
EMPTY_U32.flags.writeable = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Everything that grows with load is bounded by one of them."""

    max_sequences: int
    """Rows of the sequence table: waiting, running and preempted sequences together."""
    max_batch_tokens: int
    """Most tokens that one step computes; raising it shortens prefills and lengthens the gaps between tokens."""
    max_batch_rows: int
    """Most sequences in one step."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence unless it ignores them."""
    block_size: int
    """Token slots of one KV block."""
    num_lanes: int = 1
    """Batches that may be in flight at once, with other sequences each: 1, or the stages of the executor's pipeline."""
    overlaps: bool = False
    """Behind the one batch in flight, decodes may be made whose first token it samples; with one lane."""
    finished_kept: int = 256
    """Ended sequences whose outputs are kept for replays; the oldest is forgotten first."""
    prefix_caching: bool = True
    """Keep the KV of freed blocks until they are needed, and share it with sequences that begin alike."""

    shares_blocks: bool = False
    """Best effort fills blocks from the right, so that one of it and one of real time can share a block; one lane."""

    def __post_init__(self) -> None:
        assert self.num_lanes == 1 or not self.shares_blocks, "what two rows write is in one place"
        for name in ("max_sequences", "max_batch_tokens", "max_batch_rows", "vocab_size", "block_size", "num_lanes"):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        assert self.num_lanes == 1 or not self.overlaps, "only one lane overlaps with itself"
        assert self.max_model_len >= 2, "a model's context holds at least a prompt token and an output token"
        assert self.finished_kept >= 0, "finished_kept must not be negative"
        assert all(0 <= token < self.vocab_size for token in self.eos_token_ids), "EOS ids lie in the vocabulary"


class AddRefusal(Enum):
    """Why `SequenceRegistry.add` did not take a sequence, as `RefusalReason` has it; nothing of it is left."""

    FULL = "full"  # no free row of the table
    TOO_LONG = "too_long"  # prompt + max_tokens can never fit the KV memory or the context
    INVALID = "invalid"  # no prompt, ids outside the vocabulary, numbers out of range, a fork with another prompt
    DUPLICATE = "duplicate"  # this (request, attempt) runs here with another stream handle, or has ended here


@dataclass(frozen=True, slots=True)
class NewSequence:
    """One request as the engine takes it in."""

    request_id: RequestId
    stream: StreamId
    """The dispatcher's handle (u32); goes into the events."""
    attempt: int
    """1 to 65535; with the request's id it names the sequence."""
    channel: int
    """Index of the dispatcher that gets the tokens, given by the emitter; goes into the events."""
    prompt: U32
    """[num_prompt] token ids."""
    sampling: SamplingParams
    arrival_s: float
    """When the request reached the dispatcher, on this worker's clock; may lie before the engine's first step."""
    expires_s: float
    """From then on the sequence is dropped, on this worker's clock; it ends with `FinishReason.CANCELLED`."""
    generated: U32 = field(default_factory=lambda: EMPTY_U32)
    """[num_generated] outputs of earlier attempts; `max_tokens` and the positions count them."""
    tier: Tier = Tier.DEFAULT
    slo: LatencyLimits | None = None
    """What the request is to keep; None: nobody has said."""
    qoe: ReaderTarget | None = None
    """The reader's schedule; None: nobody has said, or nobody follows it."""
    displayed: tuple[float, float] | None = None
    """Of `generated`, as `Submit.displayed`; None: all were on time, as far as is known."""
    thought_s: float | None = None
    """When the tag came that ends the thinking in `generated`, seconds after arrival; None: not known, or there is
    none."""
    last_token_s: float | None = None
    """When the newest of `generated` came, on this worker's clock; None: not known, or there is none."""
    num_preemptions: int = 0
    """How often earlier attempts were preempted."""
    fork_of: RequestId | None = None
    """The request's first choice, with the same prompt and salt: this one shares that one's KV, and waits until its
    prompt is computed, unless it goes on after `generated` and finds that KV. If that one is not here, or gives its KV
    up before, this one runs by itself."""
    cache_salt: str = ""
    """Sequences find each other's cached KV only under the same salt."""


def check_new(new: NewSequence, config: EngineConfig, num_usable_blocks: int) -> AddRefusal | None:
    """Return why the sequence can never run in this engine, or None.

    The newest token needs no KV until the step after it, so a sequence of `max_tokens` outputs needs KV for one less.
    """
    if not _is_valid(new, config):
        return AddRefusal.INVALID
    num_prompt = int(new.prompt.size)
    if num_prompt >= config.max_model_len:
        return AddRefusal.TOO_LONG
    num_kv_tokens = num_prompt + max_outputs(num_prompt, new.sampling.max_tokens, config.max_model_len) - 1
    if -(-num_kv_tokens // config.block_size) > num_usable_blocks:
        return AddRefusal.TOO_LONG
    return None


def max_outputs(num_prompt: int, max_tokens: int, max_model_len: int) -> int:
    """Return how many outputs the sequence may have: `max_tokens`, or less where the model's context ends."""
    return min(max_tokens, max_model_len - num_prompt)


def _is_valid(new: NewSequence, config: EngineConfig) -> bool:
    if not (0 <= new.stream < 2**32 and 1 <= new.attempt < 2**16):
        return False
    if new.prompt.size == 0 or int(new.prompt.max()) >= config.vocab_size:
        return False
    if new.generated.size and int(new.generated.max()) >= config.vocab_size:
        return False
    if not _is_choice_possible(new.sampling, config):
        return False
    return new.generated.size == 0 or new.prompt.size + new.generated.size <= config.max_model_len


def _is_choice_possible(sampling: SamplingParams, config: EngineConfig) -> bool:
    """Return whether all ids exist, and a token is left to choose while `min_tokens` excludes the stop ids."""
    if sampling.logit_bias and max(token for token, _ in sampling.logit_bias) >= config.vocab_size:
        return False
    if sampling.thinking and max(sampling.thinking.opening_id, sampling.thinking.closing_id) >= config.vocab_size:
        return False
    if not sampling.min_tokens:
        return True
    stops = {*sampling.stop_token_ids, *config.eos_token_ids}
    return sum(0 <= token < config.vocab_size for token in stops) < config.vocab_size
