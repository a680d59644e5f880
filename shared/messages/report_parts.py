"""Parts of a worker's report that say what its steps cost, and which requests have changed their worker."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from shared.messages.base import MessagePart
from shared.prefix_names import NUM_MARKS

MAX_SKETCH_MARKS: Final = 512
"""Of a report: 2.7 KB of it."""
_Count = Annotated[int, Field(ge=0, le=10**9)]
_Seconds = Annotated[float, Field(ge=0)]


class DecodeCost(MessagePart):
    """What a step costs in which sequences decode and no prompt is computed, by the worker's cost model; 0: unknown."""

    step_s: _Seconds = 0.0
    """Whoever is in it."""
    sequence_s: _Seconds = 0.0
    """For each sequence."""
    kv_token_s: _Seconds = 0.0
    """For each token of KV that they have."""

    def of(self, num_sequences: float, num_kv_tokens: float) -> float:
        """Return the seconds of a step in which so many decode."""
        return self.step_s + self.sequence_s * num_sequences + self.kv_token_s * num_kv_tokens

    def times(self, factor: float) -> DecodeCost:
        """Return what steps cost that take so many times as long."""
        return DecodeCost(
            step_s=factor * self.step_s,
            sequence_s=factor * self.sequence_s,
            kv_token_s=factor * self.kv_token_s,
        )


class FetchCount(MessagePart):
    """How many requests a worker was asked to fetch, by why and what came of it."""

    reason: Annotated[str, Field(max_length=16)]
    """A `shared.messages.fetch.FetchReason`."""
    outcome: Annotated[str, Field(max_length=16)]
    """A `FetchOutcome`."""
    count: Annotated[int, Field(ge=1, le=2**53)]


_Total = Annotated[int, Field(ge=0, le=2**53)]


class SharedPrefix(MessagePart):
    """KV of a prefix that several sequences of a worker hold."""

    name: Annotated[str, Field(max_length=64)]
    """Of its last block, in hex: it says which tokens the block and all before it hold, and whose (decision 0013)."""
    num_blocks: Annotated[int, Field(ge=1, le=10**9)]


class MigrationPart(MessagePart):
    """Running requests that change their worker, and, since the start of this process, that have."""

    closing: Annotated[str, Field(max_length=256)] = ""
    """Why it takes no new requests now, in words: those that run are to leave. Empty: it does."""
    shared_prefixes: Annotated[tuple[SharedPrefix, ...], Field(max_length=8)] = ()
    """The longest ones: who has the same prefix needs that much less here."""
    num_fetching: _Count = 0
    """That come here now."""
    num_left_total: _Total = 0
    """That have left for another worker."""
    fetches_total: Annotated[tuple[FetchCount, ...], Field(max_length=64)] = ()
    """What came of those that were to come here."""
    num_bytes_total: _Total = 0
    """Of KV that came."""
    seconds_total: Annotated[float, Field(ge=0)] = 0.0
    """For which they were under way."""
    num_as_tokens_total: _Total = 0
    """Of those that have come: without KV, as a planner wanted it."""
    num_recomputed_tokens_total: _Total = 0
    """Of the others: tokens whose KV was computed again."""
    num_recomputed_total: _Total = 0
    """Of the others: requests of which more than two blocks were computed again."""
    bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Rate at which requests' KV comes, while it does, by a moving average of the time of a byte; of the first request,
    what has come of it yet."""
    pulled_token_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a token of a prefix takes to come from another worker at that rate; 0: none has come, or may."""


class PrefixSketch(MessagePart):
    """Which prefixes a worker holds: marks of some names of its blocks (`shared.prefix_names`).

    Those below a bound are all there. Names are hashes, so this is a uniform sample of them, of one size whatever is
    held, and the same names are in the samples of all who hold them: a bottom-k sketch (Cohen and Kaplan, "Summarizing
    data using bottom-k sketches", PODC 2007). Who knows a prompt's names can tell, from those below the bound, up to
    about which of them a worker holds it. Besides, it has the names where sequences ended not long ago: what goes on
    with one of these is found to the block.
    """

    bound: Annotated[int, Field(ge=0, le=NUM_MARKS)] = NUM_MARKS
    """All marks below it are listed; of larger ones some are."""
    marks: Annotated[str, Field(max_length=16 * MAX_SKETCH_MARKS // 3 + 4)] = ""
    """Ascending, each once, as little-endian 32 bits, in base64."""
